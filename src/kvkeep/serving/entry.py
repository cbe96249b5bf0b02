"""Entry policies over pages: a token a request for many requests at once, and prompts by the library's own code.

The step is that of :class:`kvkeep.runtime.entry.EntryResidency`, vectorised over requests at positions of their own. A
prompt, or any piece of one, *is* that class: what a page holds is laid out as its slots, it takes in the piece, and
what it then holds is written back. Tokens held lie in the first slots of a block, in no particular order, so that a
paged attention kernel reads them as a short sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.policies.base import EntryPolicy, Geometry, Step
from kvkeep.runtime.entry import EntryResidency
from kvkeep.runtime.residency import NotFinite
from kvkeep.serving.choice import PROTECTED, Chooser
from kvkeep.serving.memory import memory_shapes, recall, remember
from kvkeep.serving.pages import Pages, State
from kvkeep.serving.recurrence import Recurrence
from kvkeep.serving.rows import Rows


def entry_state(policy: EntryPolicy, geometry: Geometry, dtype: torch.dtype) -> State:
    """What a page keeps of a request beside its pairs, which are of ``dtype``."""
    budget, heads, wide = policy.budget, geometry.kv_heads, torch.promote_types(dtype, torch.float32)
    shapes = {
        "positions": ((heads, budget.rest), torch.int32),
        "recent": ((heads, budget.window), torch.int32),
        "coming": ((heads, budget.window), wide),
        "priority": ((heads, budget.rest), wide),
    }
    return State(shapes | memory_shapes(policy.new_memory(geometry, 1, torch.device("cpu"), wide)))


class EntryLayer:
    """One layer's requests under an entry policy.

    Args:
        policy, geometry: see :mod:`kvkeep.policies.base`.
        pages: with the state of :func:`entry_state`.
        backend: of the step, see :class:`~kvkeep.serving.choice.Chooser`.
    """

    attends = False  # a step leaves the attention to the engine's kernel

    def __init__(self, policy: EntryPolicy, geometry: Geometry, pages: Pages, backend: str = "auto"):
        self.policy, self.geometry, self.pages = policy, geometry, pages
        self.wide = pages.state["priority"].dtype
        self.chooser = Chooser(pages, policy.budget, backend)
        self.start = policy.new_memory(geometry, 1, pages.flat.device, self.wide)
        pages.state["recent"].zero_()  # read before it is written, by requests that begin
        compiled = self.chooser.compiled and Recurrence.takes(policy, geometry, pages)
        self.recurrence = Recurrence(policy, geometry, pages) if compiled else None

    @torch.no_grad()
    def step(self, rows: Rows, query: Tensor | None, keys: Tensor, values: Tensor) -> None:
        """Take in one token of every request.

        Args:
            rows: the requests; scored more than one token ahead only by a policy that judges alone.
            query: not needed.
            keys, values: ``[R, H, D]``, rotated at their true positions.

        Raises:
            NotFinite: naming layer and position, where a priority is.
        """
        if rows.ahead:
            self.score(rows, keys, values)
        if not self.chooser.settle(rows, keys, values):
            raise NotFinite(
                f"layer {self.geometry.layer}: priorities not finite at position {max(rows.seen)} or before"
            )

    def score(self, rows: Rows, keys: Tensor, values: Tensor) -> None:
        """Ask for the priorities of the tokens that leave next."""
        leaving = self.chooser.fetch(rows)
        if self.recurrence is not None:
            self.recurrence.score(rows, keys, values, leaving)
            return
        memory = recall(self.pages, rows, self.start)
        first = rows.positions - self.policy.budget.window
        step = Step(
            geometry=self.geometry,
            entering=leaving if rows.ahead > 1 else (keys[:, :, None], values[:, :, None]),
            leaving=leaving,
            positions=first[:, None] + torch.arange(rows.ahead, device=first.device),
            memory=memory,
        )
        self.chooser.note(rows, self.policy.priority(step))
        remember(self.pages, rows, memory)

    def prefill(self, block: int, seen: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Take in n tokens of one request and attend as token by token decoding would.

        Args:
            block: of the request.
            seen: tokens it has had before; 0 begins a new request, whatever the block holds.
            query: ``[1, Hq, n, D]``; keys, values: ``[1, H, n, D]``.

        Returns:
            ``[1, Hq, n, Dv]``.
        """
        rows = Rows.of([block], [seen], keys.device)
        residency = EntryResidency(self.policy, self.geometry, keys, values)
        residency.memory = recall(self.pages, rows, self.start)
        if seen:
            self.lay_out(residency, rows)
        output = residency.advance(query, keys, values)
        self.put_back(residency, rows)
        return output

    def lay_out(self, residency: EntryResidency, rows: Rows) -> None:
        """Fill an empty residency with what the page holds."""
        slots, state, seen = residency.slots, self.pages.state, rows.seen[0]
        count = min(seen, self.policy.budget.rest)
        shift = slots.capacity - count
        keys, values = self.pages.read(rows.blocks, self.pages.every(0, count, 1))
        positions, priority = (state[name][rows.blocks, :, :count] for name in ("positions", "priority"))
        sources = keys, values, positions, priority.masked_fill(priority == PROTECTED, 0)  # protected by position there
        for target, source in zip(slots.tensors(), sources, strict=True):
            target[:, :, shift:] = source
        slots.held = [count]
        residency.start_at([seen])
        recent = state["recent"][rows.blocks].long() + shift
        residency.recent = recent.clamp(max=slots.capacity - 1)  # of fewer tokens than a window the rest is anything

    def put_back(self, residency: EntryResidency, rows: Rows) -> None:
        """Write what a residency holds into the page."""
        slots, state, blocks, budget = residency.slots, self.pages.state, rows.blocks, self.policy.budget
        count = slots.held[0]
        keys, values, positions, priority = (slots.view(tensor) for tensor in slots.tensors())
        self.pages.write(blocks, self.pages.every(0, count, 1), keys, values)
        state["positions"][blocks, :, :count] = positions
        inside = (positions >= budget.sinks) & (positions < residency.clock[:, None, None] - budget.window)
        state["priority"][blocks, :, :count] = priority.masked_fill(~inside, PROTECTED)
        state["priority"][blocks, :, count:] = PROTECTED
        state["recent"][blocks] = (residency.recent - (slots.capacity - count)).clamp(min=0).int()
        remember(self.pages, rows, residency.memory)

    def held_tokens(self, block: int, seen: int) -> Tensor:
        """int32 ``[H, n]``, positions of the tokens held, oldest first: for tests and pictures."""
        count = min(seen, self.policy.budget.rest)
        return self.pages.state["positions"][block, :, :count].sort(-1).values

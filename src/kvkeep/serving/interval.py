"""Attention policies over pages: what a page holds becomes the library's residency, takes in tokens, and goes back.

A policy that watches the attention needs the probabilities, which no paged kernel hands out, so its steps attend here:
the pages of the requests are gathered, :class:`kvkeep.runtime.interval.IntervalResidency` makes its step, and what
changed is written. Tokens held lie in the last slots of a page, as they do in the residency.

A policy that asks for keys and values only at an eviction leaves the attention to the engine: its steps write one pair,
and only requests that stand at an eviction are gathered. Tokens held lie in the first slots, as a kernel wants them.

Either way in no particular order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.policies.base import AttentionPolicy, Geometry
from kvkeep.runtime.interval import IntervalResidency
from kvkeep.runtime.residency import rows_by
from kvkeep.serving.memory import memory_shapes, recall, remember
from kvkeep.serving.pages import Pages, State
from kvkeep.serving.rows import Rows, held
from kvkeep.slots import EMPTY, Slots, gather_slots

SLOT = "slot."  # what the names of statistics begin with in a page
RECENT = "recent"  # the newest queries of a request, for policies that want them


def watches(policy: AttentionPolicy) -> bool:
    """Whether a policy looks at queries or attention between two evictions."""
    return type(policy).observe is not AttentionPolicy.observe or policy.recent_queries > 0


def interval_state(policy: AttentionPolicy, geometry: Geometry, dtype: torch.dtype) -> State:
    """What a page keeps of a request beside its pairs, which are of ``dtype``."""
    heads, slots, wide = geometry.kv_heads, policy.budget.slots, torch.promote_types(dtype, torch.float32)
    shapes = {"positions": ((heads, slots), torch.int32)}
    for name, statistic in policy.slot_statistics(geometry).items():
        shapes[SLOT + name] = ((heads, slots, *statistic.shape), wide)
    if policy.recent_queries:
        shapes[RECENT] = ((heads, geometry.group, policy.recent_queries, geometry.head_dim), dtype)
    return State(shapes | memory_shapes(policy.new_memory(geometry, 1, torch.device("cpu"), wide)))


class IntervalLayer:
    """One layer's requests under an attention policy.

    Args:
        policy, geometry: see :mod:`kvkeep.policies.base`.
        pages: with the state of :func:`interval_state`.
    """

    def __init__(self, policy: AttentionPolicy, geometry: Geometry, pages: Pages):
        self.policy, self.geometry, self.pages = policy, geometry, pages
        self.attends = watches(policy)
        one = pages.flat.new_empty(1, geometry.kv_heads, 1, geometry.head_dim)
        self.empty = IntervalResidency(policy, geometry, one, one)  # of one row, before its first token

    @torch.no_grad()
    def step(self, rows: Rows, query: Tensor, keys: Tensor, values: Tensor) -> Tensor | None:
        """Take in one token of every request.

        Args:
            rows: the requests.
            query: ``[R, Hq, D]``; keys, values: ``[R, H, D]``.

        Returns:
            ``[R, Hq, Dv]``, or None where the attention is the engine's.

        Raises:
            NotFinite: naming layer and position.
        """
        if self.attends:
            return self.watched_step(rows, query, keys, values)
        budget = self.policy.budget
        due = [row for row, seen in enumerate(rows.seen) if seen > budget.rest and self.empty.boundary(seen)]
        if due:
            self.evict(rows.subset(due))
        count = held(budget, rows.positions + 1) - 1  # [R], held before this token
        slots = count[:, None].expand(-1, self.pages.heads)  # [R, H]
        self.pages.write(rows.blocks, slots[..., None], keys[:, :, None], values[:, :, None])
        heads = torch.arange(self.pages.heads, device=slots.device)
        self.pages.state["positions"][rows.blocks[:, None], heads, slots] = (
            rows.positions[:, None].int().expand_as(slots)
        )
        return None

    def watched_step(self, rows: Rows, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        residency = self.gather(rows)
        output = residency.step(query[:, :, None], keys[:, :, None], values[:, :, None])
        if any(self.empty.boundary(seen) for seen in rows.seen):
            self.scatter(residency, rows)
        else:  # nobody has moved
            slots, pages = residency.slots, self.pages
            newest = torch.tensor([slots.capacity - count for count in slots.held], device=keys.device)
            at = newest[:, None, None].expand(-1, pages.heads, 1)  # [R, H, 1]
            pages.write(rows.blocks, at, keys[:, :, None], values[:, :, None])
            self.scatter_state(residency, rows, None)
        return output[:, :, 0]

    def evict(self, rows: Rows) -> None:
        """Evict from requests that stand at an eviction."""
        for _, same in rows_by(rows.seen):
            part = rows.subset(same)
            residency = self.gather(part)
            residency.open_interval()
            self.scatter(residency, part)

    @torch.no_grad()
    def prefill(self, block: int, seen: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Take in n tokens of one request; as :meth:`kvkeep.serving.entry.EntryLayer.prefill`."""
        rows = Rows.of([block], [seen], keys.device)
        residency = self.gather(rows)
        output = residency.advance(query, keys, values)
        self.scatter(residency, rows)
        return output

    # Between pages and the slots of a residency, whose tokens lie last

    def gather(self, rows: Rows) -> IntervalResidency:
        """A residency of the requests, with copies of what their pages hold."""
        pages, capacity = self.pages, self.policy.budget.slots
        held_now = held(self.policy.budget, rows.positions)
        turn = self.turn(held_now)
        vacant = torch.arange(capacity, device=held_now.device) < capacity - held_now[:, None, None]
        keys, values = (_turned(pair, turn) for pair in pages.read_all(rows.blocks, capacity))
        positions = _turned(pages.state["positions"][rows.blocks], turn).masked_fill(vacant, EMPTY)
        extras = {name: _turned(pages.state[SLOT + name][rows.blocks], turn) for name in self.empty.slots.extras}
        residency = object.__new__(IntervalResidency)
        residency.__dict__.update(self.empty.__getstate__())
        fills = self.empty.slots.fills
        residency.slots = Slots(keys, values, positions, held_now.tolist(), extras, fills, tidy=False)
        residency.clock = rows.positions.clone()
        residency.start_at(rows.seen)
        residency.memory = recall(pages, rows, self.empty.memory)
        if residency.recent is not None:
            residency.recent = pages.state[RECENT][rows.blocks]
        return residency

    def scatter(self, residency: IntervalResidency, rows: Rows) -> None:
        """Write what a residency of the requests holds into their pages."""
        pages, slots = self.pages, residency.slots
        turn = self.turn(torch.tensor(slots.held, device=rows.blocks.device))
        back = None if turn is None else turn.argsort(-1)  # where in the slots a page's slot lies
        everything = pages.every(0, slots.capacity, len(rows.seen))
        pages.write(rows.blocks, everything, _turned(slots.keys, back), _turned(slots.values, back))
        self.scatter_state(residency, rows, back)

    def scatter_state(self, residency: IntervalResidency, rows: Rows, back: Tensor | None) -> None:
        pages, slots = self.pages, residency.slots
        pages.state["positions"][rows.blocks] = _turned(slots.positions, back)
        for name, extra in slots.extras.items():
            pages.state[SLOT + name][rows.blocks] = _turned(extra, back)
        remember(pages, rows, residency.memory)
        if residency.recent is not None:
            pages.state[RECENT][rows.blocks] = residency.recent

    def turn(self, held_now: Tensor) -> Tensor | None:
        """The page's slot for every slot of a residency, int64 ``[R, H, slots]``; None where they are the same."""
        if self.attends:
            return None
        slot = torch.arange(self.policy.budget.slots, device=held_now.device)
        return ((slot + held_now[:, None]) % len(slot))[:, None].expand(-1, self.pages.heads, -1)

    def held_tokens(self, block: int, seen: int) -> Tensor:
        """int32 ``[H, n]``, positions of the tokens held, oldest first: for tests and pictures."""
        slots, count = self.policy.budget.slots, int(held(self.policy.budget, torch.tensor(seen)))
        first = slots - count if self.attends else 0
        return self.pages.state["positions"][block, :, first : first + count].sort(-1).values


def _turned(tensor: Tensor, turn: Tensor | None) -> Tensor:
    """``[R, H, slots, ...]`` in another order of slots."""
    return tensor if turn is None else gather_slots(tensor, turn)

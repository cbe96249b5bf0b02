"""Attention policies over pages: what a page holds becomes the library's residency, takes in tokens, and goes back.

A policy that watches the attention needs the probabilities, which no paged kernel hands out, so its steps attend here:
the pages of the requests are gathered, :class:`kvkeep.runtime.interval.IntervalResidency` makes its step, and what
changed is written. A policy that asks for keys and values only at an eviction leaves the attention to the engine: its
steps write one pair, and only requests that stand at an eviction are gathered.

Tokens held lie in the first slots of a block, in no particular order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.policies.base import AttentionPolicy, Geometry
from kvkeep.runtime.interval import IntervalResidency
from kvkeep.runtime.residency import Residency, require_finite, rows_by
from kvkeep.serving.memory import memory_shapes, recall, remember
from kvkeep.serving.pages import Pages, State
from kvkeep.serving.rows import Rows, held
from kvkeep.slots import EMPTY, Slots

RECENT = "recent"  # the newest queries of a request, for policies that want them


def watches(policy: AttentionPolicy) -> bool:
    """Whether a policy looks at queries or attention between two evictions."""
    return type(policy).observe is not AttentionPolicy.observe or policy.recent_queries > 0


def interval_state(policy: AttentionPolicy, geometry: Geometry, dtype: torch.dtype) -> State:
    """What a page keeps of a request beside its pairs, which are of ``dtype``."""
    heads, slots, wide = geometry.kv_heads, policy.budget.slots, torch.promote_types(dtype, torch.float32)
    shapes = {"positions": ((heads, slots), torch.int32)}
    for name, statistic in policy.slot_statistics(geometry).items():
        shapes["slot." + name] = ((heads, slots, *statistic.shape), wide)
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
        layer, newest = self.geometry.layer, max(rows.seen)
        require_finite(keys[:, :, None], "keys", layer, newest)
        require_finite(values[:, :, None], "values", layer, newest)
        residency = self.gather(rows)
        output = residency.step(query[:, :, None], keys[:, :, None], values[:, :, None])
        self.scatter(residency, rows)
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

    # Between pages, whose tokens lie first, and slots, whose tokens lie last

    def gather(self, rows: Rows) -> IntervalResidency:
        """A residency of the requests, with copies of what their pages hold."""
        pages, capacity = self.pages, self.policy.budget.slots
        held_now = held(self.policy.budget, rows.positions)
        index = self.shifted(held_now, capacity)
        keys, values = pages.read(rows.blocks, index)
        positions = pages.state["positions"][rows.blocks].gather(2, index)
        vacant = torch.arange(capacity, device=index.device) < capacity - held_now[:, None, None]
        slots = Slots(keys, values, positions.masked_fill(vacant, EMPTY), held_now.tolist())
        for name in self.empty.slots.extras:
            stored = pages.state["slot." + name][rows.blocks]
            slots.extras[name] = stored.gather(2, _over(index, stored))
        residency = object.__new__(IntervalResidency)
        residency.__dict__.update(self.empty.__dict__)
        residency.slots, residency.seen = slots, list(rows.seen)
        residency.memory = recall(pages, rows, self.empty.memory)
        if residency.recent is not None:
            residency.recent = pages.state[RECENT][rows.blocks]
        return residency

    def scatter(self, residency: Residency, rows: Rows) -> None:
        """Write what a residency of the requests holds into their pages."""
        pages, slots, capacity = self.pages, residency.slots, self.policy.budget.slots
        index = self.shifted(torch.tensor(slots.held, device=rows.blocks.device), capacity)
        everything = pages.every(0, capacity, len(rows.seen))
        back = torch.empty_like(index).scatter_(2, index, everything)  # where in the slots a page's slot lies
        keys, values = (tensor.gather(2, _over(back, tensor)) for tensor in (slots.keys, slots.values))
        pages.write(rows.blocks, everything, keys, values)
        pages.state["positions"][rows.blocks] = slots.positions.gather(2, back)
        for name, extra in slots.extras.items():
            pages.state["slot." + name][rows.blocks] = extra.gather(2, _over(back, extra))
        remember(pages, rows, residency.memory)
        if residency.recent is not None:
            pages.state[RECENT][rows.blocks] = residency.recent

    def shifted(self, held_now: Tensor, capacity: int) -> Tensor:
        """For every slot of a right-aligned row the page's slot, int64 ``[R, H, capacity]``: a rotation."""
        slot = torch.arange(capacity, device=held_now.device)
        return ((slot + held_now[:, None]) % capacity)[:, None].expand(-1, self.pages.heads, -1)

    def held_tokens(self, block: int, seen: int) -> Tensor:
        """int32 ``[H, n]``, positions of the tokens held, oldest first: for tests and pictures."""
        count = int(held(self.policy.budget, torch.tensor(seen)))
        return self.pages.state["positions"][block, :, :count].sort(-1).values


def _over(index: Tensor, tensor: Tensor) -> Tensor:
    """``[R, H, n]`` -> the index of a gather of ``[R, H, N, ...]``."""
    tail = tensor.shape[3:]
    return index.reshape(*index.shape, *(1,) * len(tail)).expand(*index.shape, *tail)

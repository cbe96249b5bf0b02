"""Attention policies at work: every ``interval`` queries, those who watched the attention choose who goes.

Schedule (ForesightKV, arXiv 2602.03203, section 3, in the row's own positions): at the start of query
``q = rest + t * interval``, t >= 1, the ``interval`` lowest of the ``rest + interval`` tokens held are dropped, never
the newest ``window`` or the sinks. Between two such queries nothing is dropped, so a piece of any length is walked in
blocks that end there, and a block of one query is the same code as a block of many.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from kvkeep.kernels.place import compiled, raw
from kvkeep.policies.base import AttentionPolicy, Geometry, Held, Observation
from kvkeep.runtime.residency import Residency, rows_by
from kvkeep.slots import Slots, lowest
from kvkeep.sparse_attention import ROW_BLOCK, masked_attention, packed_attention


class IntervalResidency(Residency):
    """See the module's docstring.

    Attributes:
        alike: see :meth:`in_step`.
        counted: what ``clock`` says, on the host, which must know when an interval ends.
        recent: ``[B, H, G, r, D]``, the query at position p for the newest r, at ``p % r``, if the policy asks for any.
        dense: hold a whole piece of many tokens while it attends, and prune once after it.
    """

    row_tensors = (*Residency.row_tensors, "recent")

    def __init__(self, policy: AttentionPolicy, geometry: Geometry, keys: Tensor, values: Tensor, dense=False):
        super().__init__(policy, geometry, keys, values)
        self.dense = dense
        self.rest, self.interval, self.capacity = self.budget.rest, self.budget.interval, self.budget.slots
        self.on_cpu = keys.device.type == "cpu"
        self.alike, self.observes = True, type(policy).observe is not AttentionPolicy.observe
        self.due: int | None = None  # where a piece in hand ends in an eviction of its own
        self.counted = [0] * keys.shape[0]
        for name, statistic in policy.slot_statistics(geometry).items():
            self.slots.add_extra(name, statistic.shape, self.wide, statistic.fill)
        self.recent = None
        if policy.recent_queries:
            shape = (keys.shape[0], geometry.kv_heads, geometry.group, policy.recent_queries, geometry.head_dim)
            self.recent = keys.new_zeros(shape)
        self.memory = policy.new_memory(geometry, keys.shape[0], keys.device, self.wide)

    def step(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self.alike and self.on_cpu:
            return self.step_alike(query, keys, values)
        self.check(keys, values)
        for seen, rows in rows_by(self.counted):
            if len(rows) == len(self.counted):
                self.open_interval()
            elif self.boundary(seen):
                index = torch.tensor(rows, device=keys.device)
                part = self.select(index)
                part.open_interval()
                self.assign(index, part)
        return self.attend(query, keys, values)

    def step_alike(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """A token of rows at one position, on the CPU: what torch need not do is in two compiled loops."""
        counted, interval = self.counted, self.interval
        past = counted[0] - self.rest
        if past >= 0 and past % interval == 0:
            self.open_interval()
        held = self.slots.held
        free = self.capacity - held[0] - 1
        append, arrays, unasked, watch, keys_packed, values_packed = self.bound
        asked = raw(query) if unasked is None else unasked
        if not append(*arrays, raw(keys), raw(values), asked, free):
            self.check(keys, values)
        for row in range(len(held)):
            held[row] += 1
            counted[row] += 1
        seen = keys_packed[:, free:], values_packed[:, free:]
        output, probabilities = packed_attention(query, *seen, self.geometry.scaling)
        if watch is not None:
            loop, statistics = watch
            loop(*statistics, raw(probabilities), interval - (past % interval if past > 0 else past))
        elif self.observes:
            shape = (*keys.shape[:2], -1, 1, held[0])
            self.watch(query, probabilities.view(shape), self.clock[:, None] - 1)
        return output

    @cached_property
    def bound(self) -> tuple:
        """What a step needs of this object, so that it need not ask again.

        The loop that appends and its first arguments; a query to write where none is remembered; the policy's loop that
        counts, with its own first arguments, or None; the slots with rows and heads as one axis.
        """
        slots, recent, unasked = self.slots, self.recent, None
        if recent is None:
            recent = slots.keys.new_empty(*slots.keys.shape[:2], 0, 0, 0)
            unasked = raw(slots.keys.new_empty(1, 1, 1, 0))
        arrays = tuple(map(raw, (slots.keys, slots.values, slots.positions, recent, self.clock)))
        watch = self.policy.counting({name: raw(extra) for name, extra in slots.extras.items()})
        watch = None if watch is None else (compiled(watch.name), watch.arguments)
        packed = slots.keys.flatten(0, 1), slots.values.flatten(0, 1)
        return compiled("places.append"), arrays, unasked, watch, *packed

    def ingest(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        count, outputs, start = keys.shape[2], [], 0
        one_shot = self.dense and self.slots.held[0] + count > self.budget.slots
        if one_shot:
            self.slots = self.resized(self.slots.held[0] + count)
            self.due = self.counted[0] + count
        while start < count:
            if not one_shot:
                self.open_interval()
            stop = min(count, start + min(self.until_boundary(), ROW_BLOCK))
            piece = slice(start, stop)
            outputs.append(self.attend(query[:, :, piece], keys[:, :, piece], values[:, :, piece]))
            start = stop
        if one_shot:
            self.due = None
            self.policy.end_interval(self.statistics())
            self.evict()
            self.policy.begin_interval(self.statistics())
            self.slots = self.resized(self.budget.slots)
            self.unbind()
        return torch.cat(outputs, 2)

    def boundary(self, query_index: int) -> bool:
        return query_index >= self.rest and (query_index - self.rest) % self.interval == 0

    def until_boundary(self) -> int:
        """Queries from here to the next boundary, at least 1."""
        past = self.counted[0] - self.rest
        return -past if past < 0 else self.interval - past % self.interval

    def open_interval(self) -> None:
        """At a boundary: evict down to ``rest`` and tell the policy that an interval begins."""
        query_index = self.counted[0]
        if self.boundary(query_index):
            self.policy.end_interval(self.statistics())
            if self.evict() or query_index == self.budget.rest:
                self.policy.begin_interval(self.statistics())

    def statistics(self) -> dict[str, Tensor]:
        return {name: self.slots.view(extra) for name, extra in self.slots.extras.items()}

    def until_eviction(self, positions: Tensor) -> Tensor:
        """Queries from each of ``positions`` int64 ``[B, n]`` to the next eviction, itself included."""
        if self.due is not None:
            return self.due - positions
        intervals = ((positions - self.rest) // self.interval + 1).clamp(min=1)
        return self.rest + intervals * self.interval - positions

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Write n pairs, attend over all held, let the policy watch."""
        count, slots = keys.shape[2], self.slots
        positions = self.positions(count)
        slots.append(keys, values, positions)
        held_at = slots.view(slots.positions)
        if count > 1:
            mask = held_at[:, :, None] <= positions[:, None, :, None]  # [B, H, n, N], rows are uniform here
        else:
            mask = None if slots.uniform else slots.live()[:, :, None]
        output, probabilities = masked_attention(
            query, slots.view(slots.keys), slots.view(slots.values), mask, self.geometry.scaling
        )
        self.watch(query, probabilities, positions)
        if self.recent is not None:
            self.remember(query.unflatten(1, (self.geometry.kv_heads, -1)), positions)
        self.pass_on(count)
        return output

    def watch(self, query: Tensor, probabilities: Tensor, positions: Tensor) -> None:
        """Show the policy the attention of n queries."""
        slots = self.slots
        self.policy.observe(
            Observation(
                geometry=self.geometry,
                query=query.unflatten(1, (self.geometry.kv_heads, -1)),  # [B, H, G, n, D]
                positions=positions,
                probabilities=probabilities,
                statistics=self.statistics(),
                memory=self.memory,
                held=slots.view(slots.positions),
                until=partial(self.until_eviction, positions),  # few policies ask
            )
        )

    def remember(self, query: Tensor, positions: Tensor) -> None:
        """Write the newest of n queries ``[B, H, G, n, D]`` over the oldest remembered."""
        size = self.recent.shape[3]
        query, column = query[:, :, :, -size:], positions[:, -size:] % size  # [B, n]
        self.recent.scatter_(3, column[:, None, None, :, None].expand(query.shape), query)

    def remembered(self) -> Tensor | None:
        """The newest queries, oldest first, of rows that are at the same query."""
        return None if self.recent is None else self.recent.roll(-self.counted[0], 3)

    def evict(self) -> bool:
        """Drop all but ``rest`` tokens of every row, which are at the same query; False where there are no more."""
        slots, budget, query_index = self.slots, self.budget, self.counted[0]
        count = slots.held[0] - budget.rest
        if count <= 0:
            return False
        positions = slots.view(slots.positions)
        candidates = (positions >= budget.sinks) & (positions < query_index - budget.window)
        held = Held(
            geometry=self.geometry,
            query_index=query_index,
            evictions=(query_index - budget.rest) // budget.interval - 1,
            keys=slots.view(slots.keys),
            values=slots.view(slots.values),
            positions=positions,
            statistics=self.statistics(),
            memory=self.memory,
            queries=self.remembered(),
            candidates=candidates,
            count=count,
        )
        scores = self.policy.keep_scores(held).to(self.wide)
        self.require_finite(scores, "keep scores")
        victims = lowest(scores, positions, candidates, count)
        if self.lifetimes is not None:
            self.lifetimes.scatter_(2, positions.gather(2, victims).long(), query_index)
        slots.drop(victims)
        return True

    def resized(self, capacity: int) -> Slots:
        """The same tokens in more or fewer slots."""
        old = self.slots
        new = Slots.empty(old.keys, old.values, capacity)
        for name, extra in old.extras.items():
            new.add_extra(name, extra.shape[3:], extra.dtype, old.fills[name])
        width = old.width
        for target, source in zip(new.tensors(), old.tensors(), strict=True):
            target[:, :, capacity - width :] = source[:, :, old.capacity - width :]
        new.held, new.tidy = list(old.held), old.tidy
        return new

    # The count on the host

    @property
    def seen(self) -> list[int]:
        return self.counted

    def pass_on(self, count: int) -> None:
        super().pass_on(count)
        self.counted = [counted + count for counted in self.counted]

    def start_at(self, seen: Sequence[int]) -> None:
        super().start_at(seen)
        self.counted = list(seen)
        self.alike = self.in_step()

    def select(self, rows: Tensor) -> IntervalResidency:
        part = super().select(rows)
        part.counted = [self.counted[row] for row in rows.tolist()]
        part.alike = part.in_step()
        return part

    def assign(self, rows: Tensor, part: IntervalResidency) -> None:
        super().assign(rows, part)
        for row, counted in zip(rows.tolist(), part.counted, strict=True):
            self.counted[row] = counted
        self.alike = self.in_step()

    def in_step(self) -> bool:
        """Whether all rows are at one position, in slots that are all free in the same way."""
        return len(set(self.counted)) == 1 and self.slots.uniform and self.slots.tidy

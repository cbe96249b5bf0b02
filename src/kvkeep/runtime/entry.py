"""Entry policies at work: every query, the token that has just left the window competes for the top-k slots.

Order of a step (KVpop, arXiv 2607.05061, section 3 and figure 3): update the scorer's memory, score the token that
leaves the window, evict, write the new pair where the loser was, attend. A piece of many tokens is one running top-k
over [tokens held, in order] + [new tokens] with the priorities they already have, which is exact: tokens held are
older than all new ones, and what was dropped could never return.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kvkeep.kernels.place import compiled, raw, replace_lowest
from kvkeep.lifetimes import running_topk
from kvkeep.policies.base import EntryPolicy, Geometry, Step
from kvkeep.runtime.residency import Residency
from kvkeep.slots import gather_slots, pad_front
from kvkeep.sparse_attention import causal_attention, live_attention, masked_output, packed_output


class EntryResidency(Residency):
    """See the module's docstring.

    Once every row is full, a step changes nothing on the host and asks the device nothing.

    Attributes:
        recent: int64 ``[B, H, window]``, the slot of the token at position p for the newest p, at ``p % window``; of a
            token to come, the free slot that it will get.
        known: int64 ``[B]``, the first position whose priority is not known where a loop scores tokens before they
            leave, or 0.
        dense: attend densely within each piece of many tokens and prune once after it.
        keep: False forgets the tokens after a piece (offline, where only attention and lifetimes are wanted).
    """

    row_tensors = (*Residency.row_tensors, "known", "recent")

    def __init__(self, policy: EntryPolicy, geometry: Geometry, keys: Tensor, values: Tensor, dense=False, keep=True):
        super().__init__(policy, geometry, keys, values)
        self.dense, self.keep, self.steady = dense, keep, False
        self.slots.add_extra("priority", (), self.wide)
        batch, heads, capacity = self.slots.positions.shape
        coming = capacity - 1 - torch.arange(self.budget.window, device=keys.device)
        self.recent = coming.expand(batch, heads, -1).contiguous()
        self.known = torch.zeros_like(self.clock)
        self.memory = policy.new_memory(geometry, keys.shape[0], keys.device, self.wide)

    def step(self, query: Tensor | None, keys: Tensor, values: Tensor) -> Tensor | None:
        slots, bound = self.slots, None if is_dynamo_compiling() else self.bound
        if bound is None:
            self.score_leaving(keys, values)
            fine = replace_lowest(*self.places, keys, values, self.budget.sinks, self.budget.window)
        else:
            loop, before, after, *packed = bound
            fine = loop(*before, raw(keys), raw(values), *after)
        if not fine:
            self.check(keys, values)
            raise self.not_finite("priorities")
        if self.steady and bound is not None and query is not None:
            return packed_output(query, *packed, self.geometry.scaling)
        if not self.steady:
            slots.held = [min(held + 1, self.budget.rest) for held in slots.held]
            self.steady = min(slots.held) == self.budget.rest
        if query is None:
            return None
        held = slots.view(slots.keys), slots.view(slots.values)
        return masked_output(query, *held, _rows(slots.live()), self.geometry.scaling)

    @property
    def places(self) -> tuple[Tensor, ...]:
        """What a step writes, as :func:`kvkeep.kernels.place.replace_lowest` takes it."""
        slots = self.slots
        return slots.keys, slots.values, slots.positions, slots.extras["priority"], self.recent, self.clock

    @cached_property
    def bound(self) -> tuple | None:
        """All of a step but attention as one compiled loop, its arguments before and after the new pair; packed slots.

        None where the policy has no loop, or the tensors are not on the CPU.
        """
        loop = self.policy.loop(self.geometry, self.wide) if self.clock.device.type == "cpu" else None
        if loop is None:
            return None
        others = (self.known,) if loop.ahead else self.memory.values()
        arrays = tuple(map(raw, (*self.places, *others)))
        slots, after = self.slots, (self.budget.sinks, self.budget.window, *loop.arguments)
        return compiled(loop.name), arrays, after, slots.keys.flatten(0, 1), slots.values.flatten(0, 1)

    def assign(self, rows: Tensor, part: EntryResidency) -> None:
        super().assign(rows, part)
        self.steady = min(self.slots.held) == self.budget.rest

    def score_leaving(self, keys: Tensor, values: Tensor) -> None:
        """Give the token at ``clock - window`` its priority."""
        slots, window = self.slots, self.budget.window
        positions = self.clock[:, None] - window  # [B, 1]
        slot = self.recent.gather(2, (positions % window)[:, None].expand(-1, keys.shape[1], -1))  # [B, H, 1]
        leaving = gather_slots(slots.keys, slot), gather_slots(slots.values, slot)
        slots.extras["priority"].scatter_(2, slot, self.priority((keys, values), leaving, positions))

    def ingest(self, query: Tensor | None, keys: Tensor, values: Tensor) -> Tensor | None:
        held, count = self.slots.held[0], keys.shape[2]
        positions = self.positions(count)
        if held:
            order = self.slots.view(self.slots.positions).argsort(-1)  # oldest first
            old = [gather_slots(self.slots.view(tensor), order) for tensor in self.slots.tensors()]
            new_positions = positions[:, None].expand(*keys.shape[:3]).int()
            keys, values = torch.cat([old[0], keys], 2), torch.cat([old[1], values], 2)
            token = torch.cat([old[2], new_positions], 2)
            known = old[3]
        else:
            token = positions[:, None].expand(*keys.shape[:3])
            known = keys.new_empty(*keys.shape[:2], 0, dtype=self.wide)
        priority = self.score_pieces(keys, values, known, positions)
        evicted_at = running_topk(priority, self.budget)  # [B, H, held + n], indices of this sequence
        output = self.attend(query, keys, values, evicted_at)
        if self.lifetimes is not None:
            self.lifetimes[:, :, : evicted_at.shape[-1]] = evicted_at
        if self.keep:
            self.store(keys.detach(), values.detach(), token, priority, evicted_at)
        self.pass_on(count)
        self.known.zero_()
        return output

    def score_pieces(self, keys: Tensor, values: Tensor, known: Tensor, positions: Tensor) -> Tensor:
        """Priorities of [held] + [new], of which those that leave the window on the way are scored now."""
        held, count, window = known.shape[-1], positions.shape[1], self.budget.window
        first = held - window  # index of the token that leaves at the first new query
        ahead = min(max(-first, 0), count)  # queries at which none leaves yet
        at = slice(max(first, 0), max(first, 0) + count - ahead)
        keys, values = keys.detach(), values.detach()
        leaving = pad_front(keys[:, :, at], ahead), pad_front(values[:, :, at], ahead)
        scored = self.priority((keys[:, :, held:], values[:, :, held:]), leaving, positions - window)
        priority = torch.cat([known, known.new_zeros(*known.shape[:2], count)], -1)
        priority[:, :, at] = scored[..., ahead:]
        return priority

    def priority(self, entering: tuple, leaving: tuple, positions: Tensor) -> Tensor:
        """The policy's priorities ``[B, H, n]`` of the leaving tokens; if all is well, its memory is written in place.

        Raises:
            NotFinite: naming layer and position.
        """
        memory = dict(self.memory)
        with torch.no_grad():
            priority = self.policy.priority(Step(self.geometry, entering, leaving, positions, memory)).to(self.wide)
        if min(self.slots.held) < self.budget.window:  # nothing leaves yet, somewhere
            priority = priority.masked_fill((positions < 0)[:, None], 0)
        if not self.finite(priority):
            self.check(*entering)  # who is to blame
            self.require_finite(priority, "priorities")
        for name, tensor in memory.items():  # in place: a captured graph finds it where it was
            mine = self.memory.setdefault(name, tensor)
            if mine.shape != tensor.shape:  # of a policy that has no fixed memory, and pays for that elsewhere
                self.memory[name] = tensor
            elif mine is not tensor:
                mine.copy_(tensor)
        return priority

    def attend(self, query: Tensor | None, keys: Tensor, values: Tensor, evicted_at: Tensor) -> Tensor | None:
        if query is None:
            return None
        if self.dense:
            return causal_attention(query, keys, values, self.geometry.scaling)
        return live_attention(query, keys, values, evicted_at, self.geometry.scaling)

    def store(self, keys: Tensor, values: Tensor, token: Tensor, priority: Tensor, evicted_at: Tensor) -> None:
        """Fill the slots with the tokens alive after the last query; as many in every head."""
        length, window, slots = keys.shape[2], self.budget.window, self.slots
        kept = min(length, self.budget.rest)
        alive = (evicted_at <= length - 1).to(torch.uint8).argsort(dim=-1, stable=True)[..., :kept]  # oldest first
        target = slice(slots.capacity - kept, slots.capacity)
        sources = (keys, values, token.to(torch.int32), priority)
        for tensor, source in zip(slots.tensors(), sources, strict=True):
            tensor[:, :, target] = gather_slots(source, alive)
        slots.held = [kept] * len(slots.held)
        self.steady = kept == self.budget.rest
        newest = torch.arange(max(kept - window, 0), kept, device=keys.device) + slots.capacity - kept  # slots
        column = token[:, :, length - len(newest) :].long() % window
        self.recent.scatter_(2, column, newest.expand(*column.shape[:2], -1).contiguous())


def _rows(live: Tensor | None) -> Tensor | None:
    """bool ``[B, 1, N]`` -> ``[B, 1, 1, N]``, the mask of one query."""
    return None if live is None else live[:, :, None]

"""Entry policies at work: every query, the token that has just left the window competes for the top-k slots.

Order of a step (KVpop, arXiv 2607.05061, section 3 and figure 3): update the scorer's memory, score the token that
leaves the window, evict, write the new pair where the loser was, attend. A piece of many tokens is one running top-k
over [tokens held, in order] + [new tokens] with the priorities they already have, which is exact: tokens held are
older than all new ones, and what was dropped could never return.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.kernels.place import replace_lowest
from kvkeep.lifetimes import running_topk
from kvkeep.policies.base import EntryPolicy, Geometry, Step
from kvkeep.runtime.residency import Residency
from kvkeep.slots import gather_slots, pad_front
from kvkeep.sparse_attention import causal_attention, live_attention, masked_attention


class EntryResidency(Residency):
    """See the module's docstring.

    A step changes nothing on the host once every row is full, and asks the device nothing.

    Attributes:
        recent: int64 ``[B, H, window]``, the slot of the token at position p for the newest p, at ``p % window``; of a
            token to come, the free slot that it will get.
        ahead: for how many steps the priority of the leaving token is known.
        dense: attend densely within each piece of many tokens and prune once after it.
        keep: False forgets the tokens after a piece (offline, where only attention and lifetimes are wanted).
    """

    row_tensors = (*Residency.row_tensors, "recent")

    def __init__(self, policy: EntryPolicy, geometry: Geometry, keys: Tensor, values: Tensor, dense=False, keep=True):
        super().__init__(policy, geometry, keys, values)
        self.dense, self.keep, self.ahead = dense, keep, 0
        self.foresees = policy.foresees
        self.slots.add_extra("priority", (), self.wide)
        batch, heads, capacity = self.slots.positions.shape
        coming = capacity - 1 - torch.arange(self.budget.window, device=keys.device)
        self.recent = coming.expand(batch, heads, -1).contiguous()
        self.memory = policy.new_memory(geometry, keys.shape[0], keys.device, self.wide)

    def step(self, query: Tensor | None, keys: Tensor, values: Tensor) -> Tensor | None:
        slots, budget = self.slots, self.budget
        if self.memory:
            self.check(keys, values)  # before they are written there
        if not self.ahead:
            self.score_leaving(keys, values)
        self.ahead -= 1
        store = slots.keys, slots.values, slots.positions, slots.extras["priority"], self.recent, self.clock
        if not replace_lowest(*store, keys, values, budget.sinks, budget.window):
            self.check(keys, values)
        if not self.steady:
            slots.held = [min(held + 1, budget.rest) for held in slots.held]
        if query is None:
            return None
        return masked_attention(
            query, slots.view(slots.keys), slots.view(slots.values), _rows(slots.live()), self.geometry.scaling
        )[0]

    @property
    def steady(self) -> bool:
        return min(self.slots.held) == self.budget.rest

    def score_leaving(self, keys: Tensor, values: Tensor) -> None:
        """Priorities of the tokens that leave the window: of the next, or where that may be of all in it at once.

        Once a window costs less than at every step; but a captured graph must find every step alike.
        """
        slots, window = self.slots, self.budget.window
        batched = self.foresees and keys.device.type == "cpu" and not torch.compiler.is_compiling()
        count = window if batched else 1
        positions = self.positions(count) - window  # [B, n]
        slot = self.recent.gather(2, (positions % window)[:, None].expand(-1, keys.shape[1], -1))  # [B, H, n]
        leaving = gather_slots(slots.keys, slot), gather_slots(slots.values, slot)
        priority = self.priority(leaving if batched else (keys, values), leaving, positions)
        slots.extras["priority"].scatter_(2, slot, priority)
        self.ahead = count

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
        self.ahead = 0
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
        """The policy's priorities ``[B, H, n]`` of the leaving tokens, checked."""
        step = Step(self.geometry, entering, leaving, positions, self.memory)
        with torch.no_grad():
            priority = self.policy.priority(step).to(self.wide)
        real = priority.masked_fill((positions < 0)[:, None], 0)
        self.require_finite(real, "priorities")
        return priority

    def assign(self, rows: Tensor, part: EntryResidency) -> None:
        super().assign(rows, part)
        self.ahead = min(self.ahead, part.ahead)

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
        newest = torch.arange(max(kept - window, 0), kept, device=keys.device) + slots.capacity - kept  # slots
        column = token[:, :, length - len(newest) :].long() % window
        self.recent.scatter_(2, column, newest.expand(*column.shape[:2], -1).contiguous())


def _rows(live: Tensor | None) -> Tensor | None:
    """bool ``[B, 1, N]`` -> ``[B, 1, 1, N]``, the mask of one query."""
    return None if live is None else live[:, :, None]

"""One step of an entry policy for many requests at once: the pair that leaves the window, and the slot that changes.

Two halves around the scoring of the leaving pair: ``fetch`` reads it from its slot; ``settle`` gives it its priority,
chooses a slot for the new pair (a free one, or that of the lowest priority, the oldest of equals) and writes it. Each
is written twice, as tensor operations for any device and as a loop compiled for the CPU; the tests hold them together.

Knows pages and integers; nothing of policies or engines. State names: ``positions`` int32 ``[blocks, H, rest]``,
``priority`` ``[blocks, H, rest]``, ``recent`` int32 ``[blocks, H, window]``, the slot of the token at position p for
the newest p, at ``p % window``.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from kvkeep.budget import Budget
from kvkeep.serving.pages import Pages
from kvkeep.serving.rows import Rows

PROTECTED = torch.inf  # priority of a token in the window, and of a sink

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numbers as they lie, for compiled copies


class Chooser:
    """The two halves of a step over the pages of one layer.

    Args:
        pages: whose state has ``positions``, ``priority`` and ``recent``.
        budget: of an entry policy.
        backend: "numba" for the CPU, "torch" for any device; "auto" takes the first where it can.
    """

    def __init__(self, pages: Pages, budget: Budget, backend: str = "auto"):
        self.pages, self.budget = pages, budget
        self.compiled = backend == "numba" or (backend == "auto" and pages.flat.device.type == "cpu")
        self.heads = torch.arange(pages.heads, device=pages.flat.device)
        if self.compiled:
            self.bits = BITS[pages.dtype.itemsize]
            self.flat = pages.flat.view(self.bits).numpy()
            self.place = pages.place.numpy()
            self.strides = (pages.offset, pages.block_stride, pages.head_stride)
            self.tables = [pages.state[name].numpy() for name in ("positions", "priority", "recent")]

    def fetch(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Keys ``[R, H, 1, D]`` and values of the tokens ``window`` before the new ones; arbitrary where none is."""
        pages = self.pages
        if not self.compiled:
            slots = pages.state["recent"][rows.blocks[:, None], self.heads, self.column(rows)]  # [R, H]
            return pages.read(rows.blocks, slots[..., None].long())
        pairs = torch.empty(len(rows.seen), pages.heads, 1, self.place.shape[1], dtype=pages.dtype)
        out = pairs.view(self.bits).numpy()[:, :, 0]
        _compiled()[0](self.flat, self.place, self.tables[2], *rows.arrays, self.strides, out)
        return pairs[..., : pages.head_dim], pairs[..., pages.head_dim :]

    def settle(self, rows: Rows, priority: Tensor, keys: Tensor, values: Tensor) -> bool:
        """Score what left, choose, write.

        Args:
            rows: the requests.
            priority: ``[R, H]`` of the tokens that left the window.
            keys, values: the new pairs, ``[R, H, D]``.

        Returns:
            False where a priority that counts is not finite: nothing then becomes of the step.
        """
        if not self.compiled:
            return self._settle(rows, priority, keys, values)
        budget, pages = self.budget, self.pages
        new = [pair.to(pages.dtype).view(self.bits).numpy() for pair in (keys, values)]
        parts = (budget.sinks, budget.window, budget.rest)
        return _compiled()[1](
            self.flat, self.place, *self.tables, *rows.arrays, self.strides, priority.numpy(), *new, parts
        )

    def column(self, rows: Rows) -> Tensor:
        return (rows.positions % self.budget.window)[:, None]  # [R, 1]

    def _settle(self, rows: Rows, priority: Tensor, keys: Tensor, values: Tensor) -> bool:
        pages, budget = self.pages, self.budget
        positions, stored, recent = (pages.state[name] for name in ("positions", "priority", "recent"))
        blocks, column = rows.blocks[:, None], self.column(rows)
        slot = recent[blocks, self.heads, column].long()  # [R, H]
        competes = (rows.positions - budget.window >= budget.sinks)[:, None]
        if priority.device.type == "cpu" and not bool(torch.isfinite(priority.masked_fill(~competes, 0)).all()):
            return False
        slot = torch.where(competes, slot, 0)  # what a new request finds there is anything
        stored[blocks, self.heads, slot] = torch.where(competes, priority, stored[blocks, self.heads, slot])
        held = rows.positions.clamp(max=budget.rest)[:, None]
        rank, age = stored[rows.blocks], positions[rows.blocks]  # [R, H, rest]
        tied = rank == rank.amin(-1, keepdim=True)
        loser = torch.where(tied, age, torch.iinfo(torch.int32).max).argmin(-1)
        chosen = torch.where(held < budget.rest, held, loser)  # [R, H]
        pages.write(rows.blocks, chosen[..., None], keys[:, :, None], values[:, :, None])
        positions[blocks, self.heads, chosen] = rows.positions[:, None].expand_as(chosen).int()
        stored[blocks, self.heads, chosen] = PROTECTED
        recent[blocks, self.heads, column] = chosen.int()
        return True


@functools.cache
def _compiled():
    import numba  # here, because importing it costs more than everything else in this file

    return tuple(numba.njit(nogil=True, cache=True)(loop) for loop in (_fetch, _settle))


def _fetch(flat, place, recent, blocks, positions, strides, out):
    """``out [R, H, D + Dv]``: the pair whose slot stands where the new token's will."""
    offset, block_stride, head_stride = strides
    for row in range(len(blocks)):
        column = positions[row] % recent.shape[2]
        for head in range(recent.shape[1]):
            slot = recent[blocks[row], head, column]
            if slot < 0 or slot >= len(place):  # a new request finds anything there
                slot = 0
            base = offset + blocks[row] * block_stride + head * head_stride
            for number in range(place.shape[1]):
                out[row, head, number] = flat[base + place[slot, number]]


def _settle(flat, place, held_at, stored, recent, blocks, positions, strides, priority, keys, values, parts):
    """See :meth:`Chooser.settle`; ``held_at`` are the positions held, ``stored`` their priorities."""
    offset, block_stride, head_stride = strides
    sinks, window, rest = parts
    key_size = keys.shape[2]
    for row in range(len(blocks)):
        if positions[row] - window >= sinks:
            for head in range(recent.shape[1]):
                if not np.isfinite(priority[row, head]):
                    return False
    for row in range(len(blocks)):
        block, position = blocks[row], positions[row]
        column = position % window
        for head in range(recent.shape[1]):
            if position - window >= sinks:
                stored[block, head, recent[block, head, column]] = priority[row, head]
            slot = position
            if position >= rest:
                slot = 0
                for other in range(1, rest):
                    rank, best = stored[block, head, other], stored[block, head, slot]
                    if rank < best or (rank == best and held_at[block, head, other] < held_at[block, head, slot]):
                        slot = other
            base = offset + block * block_stride + head * head_stride
            for number in range(key_size):
                flat[base + place[slot, number]] = keys[row, head, number]
            for number in range(values.shape[2]):
                flat[base + place[slot, key_size + number]] = values[row, head, number]
            held_at[block, head, slot] = position
            stored[block, head, slot] = np.inf
            recent[block, head, column] = slot
    return True

"""One step of an entry policy for many requests at once: what is scored, and the slot that changes.

``fetch`` reads the pairs that are to be scored, ``note`` keeps their scores; ``settle`` gives the token that leaves the
window its priority, chooses a slot for the new pair (a free one, or that of the lowest priority, the oldest of equals)
and writes it. Each is written twice, as tensor operations for any device and as a loop compiled for the CPU; the tests
hold them together.

Knows pages and integers; nothing of policies or engines. State names: ``positions`` int32 ``[blocks, H, rest]``,
``priority`` ``[blocks, H, rest]``; of the token at position p, for the newest p, at ``p % window``: ``recent`` int32
``[blocks, H, window]`` its slot and ``coming`` ``[blocks, H, window]`` the priority that it will leave with.
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


TABLES = ("positions", "priority", "recent", "coming")  # what a page's state must have


class Chooser:
    """A step's choice over the pages of one layer.

    Args:
        pages: with the state above.
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
            self.tables = [pages.state[name].numpy() for name in TABLES]

    def fetch(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Keys ``[R, H, n, D]`` and values of the n = ``rows.ahead`` tokens that leave next; anything where none is."""
        pages, count = self.pages, rows.ahead
        if not self.compiled:
            slots = pages.state["recent"][rows.blocks[:, None, None], self.heads[:, None], self.columns(rows)[:, None]]
            return pages.read(rows.blocks, slots.long())
        pairs = torch.empty(len(rows.seen), pages.heads, count, self.place.shape[1], dtype=pages.dtype)
        _compiled()[0](self.flat, self.place, self.tables[2], *rows.arrays, self.strides, pairs.view(self.bits).numpy())
        return pairs[..., : pages.head_dim], pairs[..., pages.head_dim :]

    def note(self, rows: Rows, priority: Tensor) -> None:
        """Keep the priorities ``[R, H, rows.ahead]`` of what was fetched."""
        coming = self.pages.state["coming"]
        coming[rows.blocks[:, None, None], self.heads[:, None], self.columns(rows)[:, None]] = priority.to(coming.dtype)

    def columns(self, rows: Rows) -> Tensor:
        """int64 ``[R, rows.ahead]``: where the tokens that leave next stand in ``recent`` and ``coming``."""
        return (rows.positions[:, None] + torch.arange(rows.ahead, device=self.heads.device)) % self.budget.window

    def settle(self, rows: Rows, keys: Tensor, values: Tensor) -> bool:
        """Let tokens leave, choose, write.

        Args:
            rows: the requests.
            keys, values: the new pairs, ``[R, H, D]``.

        Returns:
            False where a priority that counts is not finite: nothing then becomes of the step.
        """
        if not self.compiled:
            return self._settle(rows, keys, values)
        budget, pages = self.budget, self.pages
        new = [pair.to(pages.dtype).view(self.bits).numpy() for pair in (keys, values)]
        parts = (budget.sinks, budget.window, budget.rest)
        return _compiled()[1](self.flat, self.place, *self.tables, *rows.arrays, self.strides, *new, parts)

    def _settle(self, rows: Rows, keys: Tensor, values: Tensor) -> bool:
        pages, budget = self.pages, self.budget
        positions, stored, recent, coming = (pages.state[name] for name in TABLES)
        blocks, column = rows.blocks[:, None], (rows.positions % budget.window)[:, None]  # [R, 1]
        slot, priority = recent[blocks, self.heads, column].long(), coming[blocks, self.heads, column]  # [R, H]
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
    """``out [R, H, n, D + Dv]``: the pairs whose slots stand where those of the next n tokens will."""
    offset, block_stride, head_stride = strides
    for row in range(len(blocks)):
        for head in range(recent.shape[1]):
            base = offset + blocks[row] * block_stride + head * head_stride
            for step in range(out.shape[2]):
                slot = recent[blocks[row], head, (positions[row] + step) % recent.shape[2]]
                if slot < 0 or slot >= len(place):  # a new request finds anything there
                    slot = 0
                for number in range(place.shape[1]):
                    out[row, head, step, number] = flat[base + place[slot, number]]


def _settle(flat, place, held_at, stored, recent, coming, blocks, positions, strides, keys, values, parts):
    """See :meth:`Chooser.settle`; ``held_at`` are the positions held, ``stored`` their priorities."""
    offset, block_stride, head_stride = strides
    sinks, window, rest = parts
    key_size = keys.shape[2]
    for row in range(len(blocks)):
        if positions[row] - window >= sinks:
            for head in range(recent.shape[1]):
                if not np.isfinite(coming[blocks[row], head, positions[row] % window]):
                    return False
    for row in range(len(blocks)):
        block, position = blocks[row], positions[row]
        column = position % window
        for head in range(recent.shape[1]):
            if position - window >= sinks:
                stored[block, head, recent[block, head, column]] = coming[block, head, column]
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

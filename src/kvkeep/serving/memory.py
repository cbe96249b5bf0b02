"""The memory of a policy among the pages: what belongs to a request but to none of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.policies.base import Memory
from kvkeep.serving.pages import Pages
from kvkeep.serving.rows import Rows

PREFIX = "memory."  # of its names among a page's


def memory_shapes(memory: Memory) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Of the memory of one row, for a page's state."""
    return {PREFIX + name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in memory.items()}


def recall(pages: Pages, rows: Rows, start: Memory) -> Memory:
    """The memory of the requests, batch first; requests that begin get ``start``, that of one row."""
    memory = {}
    for name, empty in start.items():
        kept = pages.state[PREFIX + name][rows.blocks]
        memory[name] = kept if rows.fresh is None else torch.where(_column(rows.fresh, kept), empty, kept)
    return memory


def remember(pages: Pages, rows: Rows, memory: Memory) -> None:
    """Put it back."""
    for name, tensor in memory.items():
        pages.state[PREFIX + name][rows.blocks] = tensor


def _column(rows: Tensor, like: Tensor) -> Tensor:
    return rows.view(-1, *(1,) * (like.dim() - 1))

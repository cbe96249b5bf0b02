"""Where a layer keeps its requests: one page a request, pairs first, then everything that belongs to them.

A page is what an engine allocates, counts and hands back for one request in one layer. Behind the keys and values lie
the positions, priorities, statistics and memory of the policy, so that a request's whole cache is one page and the
engine's own accounting covers all of it.

Knows tensors and memory layout; nothing of engines. Engines pack keys in layouts of their own, so a ``place`` says
where in a page each number of a pair lies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes, of the state behind the pairs and of a page

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class State:
    """Named tensors of one request, one behind the other.

    Attributes:
        shapes: name -> shape without the request, and dtype.
    """

    shapes: Shapes

    def offsets(self) -> dict[str, int]:
        """Bytes before each of them; every one begins at a multiple of 8."""
        at, offsets = 0, {}
        for name, (shape, dtype) in self.shapes.items():
            offsets[name] = at
            at += -(-math.prod(shape) * dtype.itemsize // 8) * 8
        return offsets | {"": at}

    @property
    def nbytes(self) -> int:
        return self.offsets()[""]

    def page_bytes(self, pair_bytes: int) -> int:
        """Bytes of a page whose pairs take ``pair_bytes``."""
        return aligned(aligned(pair_bytes) + self.nbytes)


def aligned(size: int) -> int:
    """The next multiple of :data:`ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Pages:
    """The pages of one layer, as views of the engine's memory.

    Args:
        cache: ``[blocks, H, slots, ...]``, the engine's view of the pairs. Only its dtype, strides and place in the
            storage count.
        place: int64 ``[slots, D + Dv]``, where the numbers of a pair lie, in elements from the start of a block's head.
        head_dim: D; the rest of ``place`` is the value's.
        pair_bytes: what the pairs of a block take; the state lies behind them.
        state: of a request.

    Raises:
        ValueError: where a block has no room for the state, or its stride does not fit the state's dtypes.
    """

    def __init__(self, cache: Tensor, place: Tensor, head_dim: int, pair_bytes: int, state: State):
        storage, item = cache.untyped_storage(), cache.dtype.itemsize
        self.dtype, self.head_dim, self.place = cache.dtype, head_dim, place
        self.block_stride, self.head_stride = cache.stride(0), cache.stride(1)  # in elements
        self.heads, self.offset = cache.shape[1], cache.storage_offset()
        self.flat = cache.new_empty(0).set_(storage, 0, (storage.nbytes() // item,), (1,))
        page, begin = self.block_stride * item, self.offset * item + aligned(pair_bytes)
        if cache.shape[0] > 1 and page < state.page_bytes(pair_bytes):
            raise ValueError(f"a block of {page} bytes has no room for {state.page_bytes(pair_bytes)}")
        self.state: dict[str, Tensor] = {}
        for name, at in state.offsets().items():
            if not name:
                continue
            shape, dtype = state.shapes[name]
            if page % dtype.itemsize or (begin + at) % dtype.itemsize:
                raise ValueError(f"blocks {page} bytes apart from byte {begin + at} cannot hold {name} of {dtype}")
            stride = (page // dtype.itemsize, *_contiguous(shape))
            view = torch.empty(0, dtype=dtype, device=cache.device)
            self.state[name] = view.set_(storage, (begin + at) // dtype.itemsize, (cache.shape[0], *shape), stride)

        self.whole = None  # [blocks, H, slots, D + Dv], where pairs lie one behind the other
        width = place.shape[1]
        if torch.equal(place, torch.arange(place.numel(), device=place.device).view_as(place)):
            shape, stride = (*cache.shape[:2], *place.shape), (self.block_stride, self.head_stride, width, 1)
            self.whole = self.flat.as_strided(shape, stride, self.offset)

    @property
    def blocks(self) -> int:
        return next(iter(self.state.values())).shape[0]

    def index(self, blocks: Tensor, slots: Tensor) -> Tensor:
        """Where pairs lie: int64 ``[R]`` and ``[R, H, n]`` -> ``[R, H, n, D + Dv]``, in elements of ``flat``."""
        heads = torch.arange(self.heads, device=slots.device) * self.head_stride
        base = self.offset + blocks[:, None] * self.block_stride + heads  # [R, H]
        return self.place[slots] + base[..., None, None]

    def read(self, blocks: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[R, H, n, D]`` and values of the given slots."""
        pairs = self.flat[self.index(blocks, slots)]
        return pairs[..., : self.head_dim], pairs[..., self.head_dim :]

    def read_all(self, blocks: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first ``count`` slots of the blocks."""
        if self.whole is None:
            return self.read(blocks, self.every(0, count, len(blocks)))
        pairs = self.whole[:, :, :count][blocks]
        return pairs[..., : self.head_dim], pairs[..., self.head_dim :]

    def write(self, blocks: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write ``[R, H, n, D]`` and values into the given slots."""
        self.flat[self.index(blocks, slots)] = torch.cat([keys, values], -1).to(self.dtype)

    def every(self, first: int, count: int, rows: int) -> Tensor:
        """The slots ``first .. first + count - 1`` of every head: int64 ``[R, H, n]``."""
        span = torch.arange(first, first + count, device=self.place.device)
        return span.expand(rows, self.heads, -1)


def plain_place(cache: Tensor) -> Tensor:
    """The ``place`` of a cache ``[blocks, H, slots, D + Dv]`` that lies as its strides say."""
    slots = torch.arange(cache.shape[2], device=cache.device)[:, None] * cache.stride(2)
    return slots + torch.arange(cache.shape[3], device=cache.device) * cache.stride(3)


def _contiguous(shape: tuple[int, ...]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]

"""Triton form of :func:`kvkeep.kernels.place.replace_lowest`: a program for every row and KV head.

Torch needs a dozen launches for a step of one layer, each of which costs more than its arithmetic; this needs two.
Importing this file needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MOST_SLOTS_AT_ONCE = 2048


@triton.jit
def _replace(
    keys,  # [B, H, N, D]
    values,  # [B, H, N, Dv]
    positions,  # [B, H, N]
    priority,  # [B, H, N]
    recent,  # [B, H, window]
    clock,  # [B]
    new_keys,  # [B, H, 1, D]
    new_values,  # [B, H, 1, Dv]
    key_row,
    key_head,
    value_row,
    value_head,
    heads,
    slots,
    sinks,
    window,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    where = tl.program_id(0).to(tl.int64)  # row * heads + head: offsets may pass 2**31
    row = where // heads
    head = where % heads
    now = tl.load(clock + row)
    slot = slots - 1 - now
    if slot < 0:
        infinity = float("inf")
        last: tl.constexpr = 2147483647  # later than any position
        least = tl.full([], infinity, priority.dtype.element_ty)
        oldest = tl.full([], last, tl.int32)
        slot = tl.full([], 0, tl.int64)
        for start in range(0, slots, BLOCK):
            other = start + tl.arange(0, BLOCK)
            exists = other < slots
            position = tl.load(positions + where * slots + other, mask=exists, other=last)
            competes = exists & (position >= sinks) & (position <= now - window)
            rank = tl.load(priority + where * slots + other, mask=competes, other=infinity)
            lowest = tl.min(rank, 0)
            age = tl.where(competes & (rank == lowest), position, last)
            first = tl.min(age, 0)
            candidate = tl.min(tl.where(age == first, other, slots), 0)
            better = (lowest < least) | ((lowest == least) & (first < oldest))
            slot = tl.where(better, candidate, slot)
            least = tl.where(better, lowest, least)
            oldest = tl.where(better, first, oldest)

    at = where * slots + slot
    dim = tl.arange(0, BLOCK_KEY)
    new = tl.load(new_keys + row * key_row + head * key_head + dim, mask=dim < KEY_DIM)
    tl.store(keys + at * KEY_DIM + dim, new, mask=dim < KEY_DIM)
    dim = tl.arange(0, BLOCK_VALUE)
    new = tl.load(new_values + row * value_row + head * value_head + dim, mask=dim < VALUE_DIM)
    tl.store(values + at * VALUE_DIM + dim, new, mask=dim < VALUE_DIM)
    tl.store(positions + at, now.to(tl.int32))
    tl.store(recent + where * window + now % window, slot)


def replace_lowest_triton(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    priority: Tensor,
    recent: Tensor,
    clock: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    sinks: int,
    window: int,
) -> None:
    """Shapes and meaning as in :func:`kvkeep.kernels.place.replace_lowest`; may be captured in a CUDA graph.

    Raises:
        ValueError: where a store, or a new pair within its head, is not contiguous.
    """
    stores = {"keys": keys, "values": values, "positions": positions, "priority": priority, "recent": recent}
    for name, tensor in stores.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous to be written by a kernel, got strides {tensor.stride()}")
    if new_keys.stride(-1) != 1 or new_values.stride(-1) != 1:
        raise ValueError(
            f"a new pair must be contiguous in its head, got strides {new_keys.stride()} and {new_values.stride()}"
        )
    batch, heads, slots, size = keys.shape
    value_size = values.shape[-1]
    _replace[(batch * heads,)](
        *(keys, values, positions, priority, recent, clock, new_keys, new_values),
        *(*new_keys.stride()[:2], *new_values.stride()[:2]),
        *(heads, slots, sinks, window),
        KEY_DIM=size,
        VALUE_DIM=value_size,
        BLOCK_KEY=triton.next_power_of_2(size),
        BLOCK_VALUE=triton.next_power_of_2(value_size),
        BLOCK=min(triton.next_power_of_2(slots), MOST_SLOTS_AT_ONCE),
    )
    clock.add_(1)  # after the kernel: all heads of a row read it

"""Triton form of :func:`kvkeep.kernels.decode.decode_attention`: slots in pieces, then one pass over the pieces.

One row has few KV heads and a GPU many processors, so the slots of a head are cut into pieces that work side by side
(as in Flash-Decoding). A piece reads its keys and values once and leaves its logits where the probabilities will be;
the second pass divides them by the sum over all pieces. Work and memory are linear in the slots.

Importing this file needs Triton.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS_PER_PROCESSOR = 2
BLOCK_BYTES = 16384  # of keys that are worked on at once: more, in float32, asks for too much shared memory
LEAST = torch.finfo(torch.float32).min  # the logit of an empty slot, as in the reference


@triton.jit
def _multiply(a, b, total, AS_BITS: tl.constexpr):
    """total + a @ b in float32. Triton's interpreter has no products of bfloat16 (it multiplies their bits)."""
    if AS_BITS:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _attend(
    query,  # [B, H, G, D]
    key,  # [B, H, N, D]
    value,  # [B, H, N, Dv]
    live,  # bool [B, H, N]
    logits,  # float32 [B, H, G, N]
    peaks,  # float32 [B, H, pieces, G]
    sums,  # float32 [B, H, pieces, G]
    parts,  # float32 [B, H, pieces, G, Dv]
    scaling,
    heads,
    slots,
    piece_size,
    query_row,
    query_head,
    query_member,
    key_row,
    key_head,
    key_slot,
    value_row,
    value_head,
    value_slot,
    live_row,
    live_head,
    live_slot,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    MASKED: tl.constexpr,
    STATISTICS: tl.constexpr,
    EMPTY: tl.constexpr,
    AS_BITS: tl.constexpr,
):
    where = tl.program_id(0).to(tl.int64)
    row = where // heads
    head = where % heads
    piece = tl.program_id(1)
    member = tl.arange(0, BLOCK_GROUP)
    dim = tl.arange(0, BLOCK_KEY)
    value_dim = tl.arange(0, BLOCK_VALUE)
    wanted = (member < GROUP)[:, None] & (dim < KEY_DIM)[None, :]
    q = tl.load(
        query + row * query_row + head * query_head + member[:, None] * query_member + dim[None, :],
        mask=wanted,
        other=0.0,
    )
    peak = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    part = tl.zeros([BLOCK_GROUP, BLOCK_VALUE], tl.float32)
    first = piece * piece_size
    for start in range(first, tl.minimum(first + piece_size, slots), BLOCK_SLOTS):
        slot = (start + tl.arange(0, BLOCK_SLOTS)).to(tl.int64)
        exists = slot < slots
        k = tl.load(
            key + row * key_row + head * key_head + slot[None, :] * key_slot + dim[:, None],
            mask=exists[None, :] & (dim < KEY_DIM)[:, None],
            other=0.0,
        )
        logit = _multiply(q, k, tl.zeros([BLOCK_GROUP, BLOCK_SLOTS], tl.float32), AS_BITS) * scaling
        if MASKED:
            seen = tl.load(live + row * live_row + head * live_head + slot * live_slot, mask=exists, other=0)
            logit = tl.where(seen[None, :] != 0, logit, EMPTY)
        if STATISTICS:
            tl.store(
                logits + (where * GROUP + member[:, None]) * slots + slot[None, :],
                logit,
                mask=(member < GROUP)[:, None] & exists[None, :],
            )
        logit = tl.where(exists[None, :], logit, float("-inf"))
        higher = tl.maximum(peak, tl.max(logit, 1))
        weight = tl.exp(logit - higher[:, None])
        shrink = tl.exp(peak - higher)
        v = tl.load(
            value + row * value_row + head * value_head + slot[:, None] * value_slot + value_dim[None, :],
            mask=exists[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(weight, 1)
        part = _multiply(weight.to(v.dtype), v, part * shrink[:, None], AS_BITS)
        peak = higher
    at = (where * tl.num_programs(1) + piece) * GROUP + member
    tl.store(peaks + at, peak, mask=member < GROUP)
    tl.store(sums + at, total, mask=member < GROUP)
    tl.store(
        parts + at[:, None] * VALUE_DIM + value_dim[None, :],
        part,
        mask=(member < GROUP)[:, None] & (value_dim < VALUE_DIM)[None, :],
    )


@triton.jit
def _join(
    logits,  # float32 [B, H, G, N], becomes the probabilities
    peaks,  # float32 [B, H, pieces, G]
    sums,
    parts,  # float32 [B, H, pieces, G, Dv]
    output,  # [B, H, G, Dv]
    slots,
    pieces,
    piece_size,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    STATISTICS: tl.constexpr,
):
    where = tl.program_id(0).to(tl.int64)
    member = tl.arange(0, BLOCK_GROUP)
    peak = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    for piece in range(pieces):
        at = (where * pieces + piece) * GROUP + member
        peak = tl.maximum(peak, tl.load(peaks + at, mask=member < GROUP, other=0.0))
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    for piece in range(pieces):
        at = (where * pieces + piece) * GROUP + member
        shrink = tl.exp(tl.load(peaks + at, mask=member < GROUP, other=0.0) - peak)
        total += tl.load(sums + at, mask=member < GROUP, other=1.0) * shrink
    if tl.program_id(1) == 0:  # one of the programs of a head writes its output
        value_dim = tl.arange(0, BLOCK_VALUE)
        wanted = (member < GROUP)[:, None] & (value_dim < VALUE_DIM)[None, :]
        joined = tl.zeros([BLOCK_GROUP, BLOCK_VALUE], tl.float32)
        for piece in range(pieces):
            at = (where * pieces + piece) * GROUP + member
            shrink = tl.exp(tl.load(peaks + at, mask=member < GROUP, other=0.0) - peak)
            part = tl.load(parts + at[:, None] * VALUE_DIM + value_dim[None, :], mask=wanted, other=0.0)
            joined += part * shrink[:, None]
        at = (where * GROUP + member[:, None]) * VALUE_DIM + value_dim[None, :]
        tl.store(output + at, (joined / total[:, None]).to(output.dtype.element_ty), mask=wanted)
    if STATISTICS:
        first = tl.program_id(1) * piece_size
        for start in range(first, tl.minimum(first + piece_size, slots), BLOCK_SLOTS):
            slot = start + tl.arange(0, BLOCK_SLOTS)
            mask = (member < GROUP)[:, None] & (slot < slots)[None, :]
            place = logits + (where * GROUP + member[:, None]) * slots + slot[None, :]
            logit = tl.load(place, mask=mask, other=float("-inf"))
            tl.store(place, tl.exp(logit - peak[:, None]) / total[:, None], mask=mask)


def decode_attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    live: Tensor | None = None,
    statistics: bool = True,
    pieces: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Shapes and meaning as in :func:`kvkeep.kernels.decode.decode_attention`; may be captured in a CUDA graph.

    ``pieces`` is into how many the slots of a head are cut at most; None for as many as keep the device busy.

    Raises:
        ValueError: where the last axis of queries, keys or values is not contiguous.
    """
    batch, heads, group, size = query.shape
    slots, value_size = value.shape[2:]
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"the last axis of {name} must be contiguous, got strides {tensor.stride()}")
    block_key = max(16, triton.next_power_of_2(size))  # 16 is the smallest product there is
    block = min(128, max(16, BLOCK_BYTES // (block_key * key.element_size())))
    if pieces is None:
        pieces = -(-PROGRAMS_PER_PROCESSOR * _processors(query.device) // (batch * heads))
    piece_size = block * -(-slots // (block * pieces))  # whole blocks
    pieces = -(-slots // piece_size)

    numbers = functools.partial(torch.empty, dtype=torch.float32, device=query.device)
    logits = numbers(batch, heads, group, slots if statistics else 0)
    peaks, sums = numbers(2, batch, heads, pieces, group)
    parts = numbers(batch, heads, pieces, group, value_size)
    output = value.new_empty(batch, heads, group, value_size)
    mask = query if live is None else live.expand(batch, heads, slots).view(torch.uint8)  # a pointer nobody reads, or
    common = {
        "GROUP": group,
        "VALUE_DIM": value_size,
        "BLOCK_GROUP": max(16, triton.next_power_of_2(group)),
        "BLOCK_VALUE": max(16, triton.next_power_of_2(value_size)),
        "BLOCK_SLOTS": block,
        "STATISTICS": statistics,
    }
    _attend[(batch * heads, pieces)](
        *(query, key, value, mask, logits, peaks, sums, parts, scaling, heads, slots, piece_size),
        *(*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *mask.stride()[:3]),
        **common,
        KEY_DIM=size,
        BLOCK_KEY=block_key,
        MASKED=live is not None,
        EMPTY=LEAST,
        AS_BITS=triton.knobs.runtime.interpret,
    )
    _join[(batch * heads, pieces)](logits, peaks, sums, parts, output, slots, pieces, piece_size, **common)
    return output, logits if statistics else None


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count

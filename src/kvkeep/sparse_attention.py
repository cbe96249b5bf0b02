"""Attention over the tokens that are alive: row blocks that gather them per head, and one query over the slots.

Tensors only. A block of queries sees the tokens still alive at its first query plus the block itself, so work and
memory are linear in the length of the sequence (KVpop, arXiv 2607.05061, appendix C: the mask is
``t <= q and q < evicted_at[t]``). Nothing here is S x S.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvkeep.kernels.choice import takes_triton
from kvkeep.slots import gather_slots

HALVES = (torch.bfloat16, torch.float16)
ROW_BLOCK = 128  # queries per block: small enough that a block gathers little besides what is held


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention with the probabilities, on the packed layout that keeps KV heads unrepeated.

    Args:
        query: ``[B, Hq, n, D]``; key: ``[B, H, m, D]``; value: ``[B, H, m, Dv]``.
        mask: bool, four axes that broadcast to ``[B, H, n, m]``, True where a query may see a key; None = everywhere.
        scaling: factor on the logits.

    Returns:
        output ``[B, Hq, n, Dv]`` and probabilities ``[B, H, G, n, m]``, the latter in float32 or the input's dtype,
        whichever is wider.
    """
    kv_heads, length = key.shape[1:3]
    output, probabilities = packed_attention(query, key.flatten(0, 1), value.flatten(0, 1), scaling, mask)
    return output, probabilities.view(query.shape[0], kv_heads, -1, query.shape[2], length)


def masked_output(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """The output of :func:`masked_attention` alone, which is cheaper in half precision."""
    return packed_output(query, key.flatten(0, 1), value.flatten(0, 1), scaling, mask)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`masked_attention` where rows and KV heads are one axis already, as a decode step keeps them.

    Args:
        query: ``[B, Hq, n, D]``; key: ``[B * H, m, D]``; value: ``[B * H, m, Dv]``.
        scaling: factor on the logits.
        mask: as there, or None.

    Returns:
        output ``[B, Hq, n, Dv]`` and probabilities ``[B * H, G * n, m]``.
    """
    if query.shape[2] == 1 and takes_triton(query, key, value):
        return _decode(query, key, value, scaling, mask, statistics=True)
    return packed_attention_reference(query, key, value, scaling, mask)


def packed_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`packed_attention` in torch, on any device."""
    logits = packed_logits(query, key, scaling, mask)
    half = logits.dtype in HALVES
    probabilities = (logits.float() if half else logits).softmax(-1)
    weights = probabilities.to(value.dtype) if half else probabilities
    return torch.bmm(weights, value).view(*query.shape[:3], -1), probabilities


def packed_output(query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None = None) -> Tensor:
    """The output of :func:`packed_attention` alone.

    Of half precision torch's softmax is computed in float32 too, and rounded once. Where a gradient is recorded it is
    not asked to, since the rounded one would be what gradients are made of.
    """
    if query.shape[2] == 1 and takes_triton(query, key, value):
        return _decode(query, key, value, scaling, mask, statistics=False)[0]
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return packed_attention(query, key, value, scaling, mask)[0]
    weights = packed_logits(query, key, scaling, mask).softmax(-1)
    return torch.bmm(weights, value).view(*query.shape[:3], -1)


def _decode(query, key, value, scaling: float, mask: Tensor | None, statistics: bool) -> tuple[Tensor, Tensor | None]:
    """One query by the kernel; shapes as in :func:`packed_attention`."""
    from kvkeep.kernels.decode import decode_attention  # here: its reference is in this file

    batch = query.shape[0]
    slots = (tensor.unflatten(0, (batch, -1)) for tensor in (key, value))  # [B, H, m, D] and [B, H, m, Dv]
    grouped = query.unflatten(1, (key.shape[0] // batch, -1)).squeeze(3)  # [B, H, G, D]
    output, probabilities = decode_attention(
        grouped, *slots, scaling, None if mask is None else mask[:, :, 0], statistics
    )
    return output.flatten(1, 2).unsqueeze(2), None if probabilities is None else probabilities.flatten(0, 1)


def packed_logits(query: Tensor, key: Tensor, scaling: float, mask: Tensor | None) -> Tensor:
    """``[B * H, G * n, m]`` in the dtype of the inputs, far below any other where ``mask`` is False."""
    batch, _, count, size = query.shape
    packed = (query * scaling).reshape(key.shape[0], -1, size)  # [B * H, G * n, D]
    if key.dtype in HALVES and key.device.type == "cpu":
        key = key.contiguous()  # of a view over some of the slots: torch's product of it costs three times the copy's
    logits = torch.bmm(packed, key.mT)
    if mask is None:
        return logits
    hidden = logits.new_full((), torch.finfo(logits.dtype).min / 2)  # a sum with it stays finite
    bias = torch.where(mask, torch.zeros_like(hidden), hidden).unsqueeze(2)  # added: faster than filled in by a mask
    return logits.view(batch, key.shape[0] // batch, -1, count, key.shape[1]).add_(bias).view(logits.shape)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float, live: Tensor | None = None) -> Tensor:
    """Dense causal attention of the newest n queries over m >= n keys.

    Shapes as in :func:`masked_attention`; ``live`` bool ``[B, 1, m]`` marks the keys that are no padding. Returns
    ``[B, Hq, n, Dv]``. With n == m and no padding it is the call that a stock model makes, bit for bit; otherwise it
    goes by row blocks.
    """
    count, length = query.shape[2], key.shape[2]
    if count == length and live is None:
        grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=count > 1, enable_gqa=grouped)
    blocks = []
    offset = length - count
    for start in range(0, count, ROW_BLOCK):
        stop = min(start + ROW_BLOCK, count)
        seen = offset + stop
        rows = torch.arange(offset + start, seen, device=query.device)
        mask = (torch.arange(seen, device=query.device) <= rows[:, None])[None, None]
        if live is not None:
            mask = mask & live[:, :, None, :seen]
        blocks.append(masked_output(query[:, :, start:stop], key[:, :, :seen], value[:, :, :seen], mask, scaling))
    return torch.cat(blocks, 2)


def live_attention(
    query: Tensor, key: Tensor, value: Tensor, evicted_at: Tensor, scaling: float, block: int = ROW_BLOCK
) -> Tensor:
    """Attention of the newest n queries over the tokens alive at each of them, linear in the length.

    Args:
        query: ``[B, Hq, n, D]``, the last n of the sequence.
        key, value: ``[B, H, m, D]``, m >= n.
        evicted_at: int ``[B, H, m]``, the query index (in 0 .. m) at which each token is gone.
        scaling: factor on the logits.
        block: queries per row block.

    Returns:
        ``[B, Hq, n, Dv]``; differentiable in query, key and value.
    """
    count, length = query.shape[2], key.shape[2]
    offset = length - count
    if bool((evicted_at >= length).all()):  # nothing is evicted: exactly dense, and cheaper
        return causal_attention(query, key, value, scaling)
    token = torch.arange(length, dtype=evicted_at.dtype, device=query.device)
    alive = token[:offset].expand(*evicted_at.shape[:2], -1)  # tokens that may still be seen, per head
    key, value = key.contiguous(), value.contiguous()  # rows are gathered from them again and again
    outputs = []
    for start in range(offset, length, block):
        stop = min(start + block, length)
        alive, mask = live_block(alive, evicted_at, token, start, stop)
        outputs.append(
            masked_output(
                query[:, :, start - offset : stop - offset],
                gather_slots(key, alive),
                gather_slots(value, alive),
                mask,
                scaling,
            )
        )
    return torch.cat(outputs, 2)


def live_block(alive: Tensor, evicted_at: Tensor, token: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Tokens that queries ``start .. stop - 1`` may see, ``[B, H, n]``, and which each does, ``[B, H, rows, n]``."""
    alive = gather_live_rows(alive, evicted_at, start)
    own = token[start:stop]
    alive = torch.cat([alive, own.expand(*alive.shape[:2], -1)], -1)
    mask = own[:, None] < evicted_at.gather(2, alive.long())[:, :, None]
    mask[..., -len(own) :] &= own <= own[:, None]  # all others are older
    return alive, mask


def gather_live_rows(alive: Tensor, evicted_at: Tensor, query: int) -> Tensor:
    """Shorten the per-head list of tokens ``[B, H, n]`` to those still alive at ``query``.

    Heads of a fixed budget hold equally many, so nothing is wasted; where they differ the list is as long as the
    fullest head's and the surplus is masked by its lifetime.
    """
    if alive.shape[-1] == 0:
        return alive
    dead = evicted_at.gather(2, alive.long()) <= query
    longest = alive.shape[-1] - int(dead.sum(-1).min())
    return alive.gather(2, dead.to(torch.uint8).argsort(dim=-1, stable=True)[..., :longest])


@torch.no_grad()
def live_lse(query: Tensor, key: Tensor, evicted_at: Tensor, scaling: float, block: int = ROW_BLOCK) -> Tensor:
    """Log of the sum of exponentials over the tokens alive at each query: the normaliser of :func:`live_attention`.

    Args:
        query: ``[B, Hq, S, D]``; key: ``[B, H, S, D]``; evicted_at: int ``[B, H, S]``; scaling: on the logits.
        block: queries per row block.

    Returns:
        ``[B, Hq, S]`` in float32 or the input's dtype, whichever is wider.
    """
    batch, kv_heads, length = key.shape[:3]
    token = torch.arange(length, dtype=evicted_at.dtype, device=query.device)
    alive = token[:0].expand(batch, kv_heads, -1)
    blocks = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        alive, mask = live_block(alive, evicted_at, token, start, stop)
        grouped = query[:, :, start:stop].unflatten(1, (kv_heads, -1))  # [B, H, G, rows, D]
        logits = torch.einsum("bhgqd,bhkd->bhgqk", grouped, gather_slots(key, alive)) * scaling
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        blocks.append(logits.masked_fill(~mask.unsqueeze(2), -torch.inf).logsumexp(-1).flatten(1, 2))
    return torch.cat(blocks, 2)

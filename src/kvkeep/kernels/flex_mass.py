"""The attention that keys receive after their window by two passes of FlexAttention, for CUDA.

Row blocks (:mod:`kvkeep.attention_mass`) write every probability to memory and read it again. Here none is written: the
first pass gives the log of the normaliser of every query, LSE_d; in the second keys ask and queries answer,
``log m_t = LSE over d >= t + w of (l(d, t) - LSE_d)`` (KVpop, arXiv 2607.05061, appendix B.2).

On CUDA FlexAttention is compiled, once a geometry and dtype; lengths are dynamic. On the CPU it runs as written, over
an S x S matrix: tests only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from kvkeep.kernels.choice import SMALLEST_HEAD

BLOCK = 128  # queries and keys of a block that is skipped, masked or seen whole


def mass_after_window(query: Tensor, key: Tensor, window: int, scaling: float, lse: Tensor | None = None) -> Tensor:
    """The attention that each key t receives from the queries d >= t + window, per query head.

    Args:
        query: ``[B, Hq, S, D]``; key: ``[B, H, S, D]``, both in float32, bfloat16 or float16.
        window: w >= 1 tokens.
        scaling: of the logits.
        lse: float32 ``[B, Hq, S]``, natural logs, to normalise by; None for those of causal attention.

    Returns:
        float32 ``[B, Hq, S]``, 0 for the last w keys.
    """
    lse = causal_lse(query, key, scaling) if lse is None else lse
    return log_mass_after_window(query, key, lse, window, scaling).exp()


def causal_lse(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Log of the sum of exponentials of every query's causal logits.

    Args:
        query: ``[B, Hq, S, D]``; key: ``[B, H, S, D]``; scaling: of the logits.

    Returns:
        float32 ``[B, Hq, S]``, natural logs.
    """
    return _lse(query, key, causal_blocks(query.shape[2], query.device), None, scaling)


def log_mass_after_window(query: Tensor, key: Tensor, lse: Tensor, window: int, scaling: float) -> Tensor:
    """Log of the attention that each key t receives from the queries d >= t + window.

    Args:
        query: ``[B, Hq, S, D]``; key: ``[B, H, S, D]``; lse: float32 ``[B, Hq, S]``, of :func:`causal_lse` or of a
            sparse attention.
        window: w >= 1 tokens.
        scaling: of the logits.

    Returns:
        float32 ``[B, Hq, S]``; the last w keys, which no query is after, hold -inf.
    """

    def normalised(logit, batch, head, t, d):
        return logit - lse[batch, head, d]

    blocks = blocks_after_window(query.shape[2], window, query.device)
    asking = key.repeat_interleave(query.shape[1] // key.shape[1], 1)  # as many heads as answer
    log_mass = _lse(asking, query, blocks, normalised, scaling)
    log_mass[..., max(query.shape[2] - window, 0) :] = -torch.inf
    return log_mass


def causal_blocks(length: int, device: torch.device) -> BlockMask:
    """Which keys t every query d sees: t <= d."""

    def seen(batch, head, d, t):
        return d >= t

    asks, answers = _starts(length, device)
    return _block_mask(asks + BLOCK > answers, asks >= answers + BLOCK - 1, seen, length)


def blocks_after_window(length: int, window: int, device: torch.device) -> BlockMask:
    """Which queries d every key t sees: d >= t + window."""

    def seen(batch, head, t, d):
        return d >= t + window

    asks, answers = _starts(length, device)
    newest = (answers + BLOCK).clamp(max=length) - 1
    return _block_mask(newest >= asks + window, answers >= asks + BLOCK - 1 + window, seen, length)


def _starts(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the blocks of those who ask begin, ``[n, 1]``, and of those who answer, ``[n]``."""
    start = torch.arange(0, length, BLOCK, device=device)
    return start[:, None], start


def _block_mask(some: Tensor, whole: Tensor, seen: Callable, length: int) -> BlockMask:
    """From whether some, and all, of every block is seen, bool ``[n, n]``: a number per block.

    Torch's own construction goes through an S x S matrix.
    """
    filled = torch.arange(1, len(whole) + 1, device=whole.device) * BLOCK <= length
    whole = whole & filled & filled[:, None]  # a block that the sequence does not fill is masked
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(length, length)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool ``[n, n]`` -> how many of a row are True, int32 ``[1, 1, n]``, and those first, int32 ``[1, 1, n, n]``."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


def _lse(asking: Tensor, answering: Tensor, blocks: BlockMask, score: Callable | None, scaling: float) -> Tensor:
    """The log-sum-exp that FlexAttention leaves beside its output: ``[B, Ha, S, D]`` -> float32 ``[B, Ha, S]``."""
    attend = _compiled() if asking.device.type == "cuda" else flex_attention
    _, aux = attend(
        asking,
        answering,
        answering.new_zeros(*answering.shape[:3], SMALLEST_HEAD),  # values that nobody wants
        score_mod=score,
        block_mask=blocks,
        scale=scaling,
        enable_gqa=asking.shape[1] != answering.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return aux.lse


@functools.cache
def _compiled() -> Callable:
    return torch.compile(flex_attention, dynamic=True)

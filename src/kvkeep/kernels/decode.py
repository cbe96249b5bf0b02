"""Attention of one query over the slots, with the probabilities that policies watch."""

from __future__ import annotations

from torch import Tensor

from kvkeep.kernels.choice import takes_triton
from kvkeep.sparse_attention import packed_attention_reference


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, live: Tensor | None = None, statistics: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention of the newest query of every row on the packed layout, KV heads unrepeated.

    The kernel takes it where :func:`kvkeep.kernels.choice.takes_triton` says so, :func:`decode_attention_reference`
    otherwise. The kernel keeps logits in float32, the reference rounds them to the dtype of the keys first.

    Args:
        query: ``[B, H, G, D]``, the G query heads of each KV head.
        key: ``[B, H, N, D]``; value: ``[B, H, N, Dv]``; views of slots will do, without a copy.
        scaling: factor on the logits.
        live: bool, three axes that broadcast to ``[B, H, N]``, True where a slot holds a token; None = everywhere.
        statistics: whether the probabilities are wanted.

    Returns:
        output ``[B, H, G, Dv]`` in the value's dtype, and probabilities ``[B, H, G, N]`` in float32 or the input's
        dtype, whichever is wider, or None.
    """
    if takes_triton(query, key, value):
        from kvkeep.kernels.triton_decode import decode_attention_triton  # here: needs Triton

        return decode_attention_triton(query, key, value, scaling, live, statistics)
    return decode_attention_reference(query, key, value, scaling, live, statistics)


def decode_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, live: Tensor | None = None, statistics: bool = True
) -> tuple[Tensor, Tensor | None]:
    """:func:`decode_attention` in torch, on any device."""
    mask = None if live is None else live.unsqueeze(2)  # [B, H, 1, N]
    packed = query.flatten(1, 2).unsqueeze(2), key.flatten(0, 1), value.flatten(0, 1)
    output, probabilities = packed_attention_reference(*packed, scaling, mask)
    return output.view(*query.shape[:3], -1), probabilities.view(*query.shape[:3], -1) if statistics else None

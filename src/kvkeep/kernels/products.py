"""Matrix products of numbers rounded to bfloat16, added up and returned in float32.

Of numbers that are bfloat16 already such a product loses nothing: the product of two of them is exact in float32, and
the sums are those of any float32 product. ``a @ b`` of bfloat16 tensors would round the result too, and a logit of 20
by up to 0.06.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

PRECISIONS = ("auto", "wide", "bfloat16")


def rounds(query: Tensor, key: Tensor, precision: str) -> bool:
    """Whether products of queries and keys are :func:`bfloat16_product`.

    ``precision`` is one of ``PRECISIONS``, see :func:`kvkeep.attention_mass.future_attention`.

    Raises:
        ValueError: for an unknown precision, and for "bfloat16" in float64.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if precision == "bfloat16" and query.dtype == torch.float64:
        raise ValueError('precision "bfloat16" adds up in float32, got queries in float64: use "wide"')
    if precision == "auto":
        return query.device.type == "cuda" and query.dtype == key.dtype == torch.bfloat16
    return precision == "bfloat16"


def bfloat16_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in float32 of what is left of ``a`` and ``b`` when rounded to bfloat16.

    CUDA multiplies in bfloat16. On the CPU oneDNN is allowed to round, and decides by the processor: with AVX512_BF16
    it was seen not to, with the product of float32 and no error. Other devices round and multiply in float32.

    Args:
        a: float32 ``[..., n, D]``; b: float32 ``[..., D, m]``, of equal leading axes.

    Returns:
        float32 ``[..., n, m]``.
    """
    if a.device.type == "cpu":
        with _rounding_products():
            return a @ b
    if a.device.type == "cuda":
        halves = (factor.bfloat16().flatten(0, -3) for factor in (a, b))
        return torch.bmm(*halves, out_dtype=torch.float32).unflatten(0, a.shape[:-2])
    return bfloat16_product_reference(a, b)


def bfloat16_product_reference(a: Tensor, b: Tensor) -> Tensor:
    """:func:`bfloat16_product` on any device: rounded always, multiplied in float32."""
    return a.bfloat16().float() @ b.bfloat16().float()


@contextmanager
def _rounding_products() -> Iterator[None]:
    """Inside, oneDNN may round the factors of float32 products to bfloat16, in all threads: why "auto" does not."""
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before

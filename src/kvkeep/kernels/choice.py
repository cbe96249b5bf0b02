"""Whether kernels for GPUs take a call: the answers that every function with a kernel goes by."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

NUMBERS = (torch.float32, torch.bfloat16, torch.float16)
MASS_BACKENDS = ("auto", "rows", "flex")
SMALLEST_HEAD = 16  # that a compiled FlexAttention takes


def takes_triton(*tensors: Tensor) -> bool:
    """Whether a kernel takes these floating point tensors; torch's reference does where this is False.

    True on CUDA with Triton importable, in float32, bfloat16 and float16. False on every other device, in float64,
    where a gradient is recorded (kernels have none), and inside ``torch.compile``, which writes kernels of its own.
    """
    return (
        all(tensor.device.type == "cuda" and tensor.dtype in NUMBERS for tensor in tensors)
        and not is_dynamo_compiling()
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        and has_triton()
    )


def takes_flex(query: Tensor, backend: str) -> bool:
    """Whether FlexAttention adds up attention mass; ``backend`` as in :func:`kvkeep.attention_mass.future_attention`.

    Raises:
        ValueError: for an unknown backend, and for "flex" in float64.
    """
    if backend not in MASS_BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(MASS_BACKENDS)}, got {backend!r}")
    if backend == "flex" and query.dtype == torch.float64:
        raise ValueError('backend "flex" works in float32, got queries in float64: use "rows"')
    if backend != "auto":
        return backend == "flex"
    on_cuda = query.device.type == "cuda" and query.dtype in NUMBERS
    return on_cuda and query.shape[-1] >= SMALLEST_HEAD and has_triton()


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None

"""Whether Triton's kernels take a call: the one answer that every function of this folder goes by."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

NUMBERS = (torch.float32, torch.bfloat16, torch.float16)


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


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None

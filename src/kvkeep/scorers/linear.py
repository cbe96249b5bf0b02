"""What scoring networks are made of: linear maps of every head, drawn weights, float32 whatever is around."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


def full_precision(device: torch.device) -> AbstractContextManager:
    """Shields what is inside from an autocast around it."""
    available = torch.amp.is_autocast_available(device.type)
    around = available and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if around else nullcontext()


def per_head(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map of its own in every head: ``[B, H, n, I]``, ``[H, I, O]``, ``[H, O]`` -> ``[B, H, n, O]``."""
    batch, heads, count, size = inputs.shape
    rows = inputs.transpose(0, 1).reshape(heads, batch * count, size)
    weight = weight.to(inputs.dtype)
    mapped = torch.bmm(rows, weight) if bias is None else torch.baddbmm(bias.to(inputs.dtype)[:, None], rows, weight)
    return mapped.view(heads, batch, count, -1).transpose(0, 1)


def drawn(generator: torch.Generator, *shape: int, std: float) -> nn.Parameter:
    """A parameter drawn from a normal distribution, on the CPU so that a seed means the same everywhere."""
    return nn.Parameter(torch.randn(*shape, generator=generator) * std)

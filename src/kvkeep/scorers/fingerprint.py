"""A cheap, stable name for a model's weights, so that a scorer knows the model it was trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

SAMPLES = 64  # values read of every tensor


def model_fingerprint(model: nn.Module | Mapping[str, Tensor]) -> str:
    """16 hexadecimal digits over the shape and 64 evenly spaced values of every weight.

    * Values are rounded to bfloat16 first, so the same weights in bfloat16, float32 or float64 have one fingerprint.
      (A float16 copy of float32 weights has another: it was rounded twice.)
    * Names do not count and equal tensors count once, so neither do ties, wrappers and prefixes.
    * It tells apart models that were trained apart; it does not prove that nobody tampered with a weight.

    Args:
        model: a module, whose parameters count, or tensors by name.

    Raises:
        ValueError: for weights that are not there (meta tensors), or none at all.

    Example:
        >>> model_fingerprint({"weight": torch.zeros(2, 3)})
        '161f95bf6c819588'
    """
    tensors = dict(model.named_parameters()) if isinstance(model, nn.Module) else model
    if not tensors:
        raise ValueError("a model without weights has no fingerprint")
    parts = set()
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"weight {name!r} is on the meta device: load the model before taking its fingerprint")
        flat = tensor.detach().reshape(-1)
        places = torch.linspace(0, max(flat.numel() - 1, 0), min(SAMPLES, flat.numel()), dtype=torch.float64)
        sample = flat[places.round().long().to(flat.device)].float().to(torch.bfloat16)
        parts.add(str(tuple(tensor.shape)).encode() + sample.cpu().view(torch.int16).numpy().astype("<i2").tobytes())
    return hashlib.sha256(b"".join(sorted(parts))).hexdigest()[:16]

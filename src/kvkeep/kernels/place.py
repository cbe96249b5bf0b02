"""Where a new pair goes: over the token of lowest priority, or into the next free slot. One token for every row.

Slots and ties as in :mod:`kvkeep.slots`: rows are right-aligned, and of equals the oldest goes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kvkeep.kernels.choice import takes_triton


def replace_lowest(
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
) -> bool:
    """Write the token at position ``clock`` of every row, where a slot is free or else over the lowest priority.

    The tokens at positions ``sinks .. clock - window`` compete. Everything is written in place, and ``clock`` moves on.

    Args:
        keys, values: ``[B, H, N, D]``, the slots.
        positions: int32 ``[B, H, N]``.
        priority: ``[B, H, N]`` float32 or float64; finite for all that compete.
        recent: int64 ``[B, H, window]``, the slot of the token at position p for the newest p, at ``p % window``.
        clock: int64 ``[B]``, tokens each row has seen; rows with less than N hold them all.
        new_keys, new_values: ``[B, H, 1, D]``.
        sinks, window: of the budget.

    Returns:
        False where a new key or value is not finite; nothing was written then. On an accelerator and inside
        ``torch.compile`` always True, since the answer would have to be waited for.
    """
    store = keys, values, positions, priority, recent, clock
    if takes_triton(keys, values):
        from kvkeep.kernels.triton_place import replace_lowest_triton  # here: needs Triton

        replace_lowest_triton(*store, new_keys, new_values, sinks, window)
        return True
    if is_dynamo_compiling() or keys.device.type != "cpu":
        replace_lowest_reference(*store, new_keys, new_values, sinks, window)
        return True
    return compiled("places.replace_lowest")(*map(raw, store), raw(new_keys), raw(new_values), sinks, window)


def replace_lowest_reference(
    keys, values, positions, priority, recent, clock, new_keys, new_values, sinks, window
) -> None:
    """:func:`replace_lowest` in torch, without waiting for the device."""
    capacity = keys.shape[2]
    now = clock[:, None, None]  # [B, 1, 1]
    competes = (positions >= sinks) & (positions <= now - window)
    rank = torch.where(competes, priority, torch.inf)
    oldest = torch.where(rank == rank.amin(-1, keepdim=True), positions, torch.iinfo(positions.dtype).max)
    slot = torch.where(now < capacity, capacity - 1 - now, oldest.argmin(-1, keepdim=True))  # [B, H, 1]
    for tensor, new in ((keys, new_keys), (values, new_values)):
        tensor.scatter_(2, slot[..., None].expand(-1, -1, -1, tensor.shape[-1]), new)
    positions.scatter_(2, slot, now.to(positions.dtype).expand_as(slot))
    recent.scatter_(2, (now % window).expand_as(slot), slot)
    clock.add_(1)


class Loop(NamedTuple):
    """One of :mod:`kvkeep.kernels.loops` as "file.name", and what it takes after the arguments they have in common.

    ``ahead`` says that it also wants to know how far the tokens in the window have been scored.
    """

    name: str
    arguments: tuple = ()
    ahead: bool = False


@functools.cache
def compiled(name: str) -> Callable:
    """One of :mod:`kvkeep.kernels.loops` as "file.name"."""
    file, loop = name.split(".")
    return getattr(import_module(f"kvkeep.kernels.loops.{file}"), loop)  # here: imports numba


BITS = {torch.bfloat16: torch.int16, torch.float16: torch.uint16}  # what numpy has no type for, or numba no arithmetic


def raw(tensor: Tensor) -> np.ndarray:
    """A tensor on the CPU as an array over the same memory, half precision as its bits."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    bits = BITS.get(tensor.dtype)
    return (tensor if bits is None else tensor.view(bits)).numpy()

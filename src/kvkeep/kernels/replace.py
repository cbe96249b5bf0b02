"""Where a new pair goes: over the token of lowest priority, or into the next free slot. One token for every row.

Slots and ties as in :mod:`kvkeep.slots`: rows are right-aligned, and of equals the oldest goes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.kernels.choice import takes_triton
from kvkeep.slots import lowest, scatter_slots


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
) -> None:
    """Write the token at position ``clock`` of every row, where a slot is free or else over the lowest priority.

    The tokens at positions ``sinks .. clock - window`` compete. Everything is written in place, and ``clock`` moves on.
    Nothing waits for the device. The kernel takes it where :func:`kvkeep.kernels.choice.takes_triton` says so of keys
    and values, :func:`replace_lowest_reference` otherwise.

    Args:
        keys, values: ``[B, H, N, D]`` and ``[B, H, N, Dv]``, the slots.
        positions: int32 ``[B, H, N]``, -1 where a slot is empty.
        priority: ``[B, H, N]`` float32 or float64, higher stays; finite for all that compete.
        recent: int64 ``[B, H, window]``, the slot of the token at position p for the newest p, at ``p % window``.
        clock: int64 ``[B]``, tokens each row has seen; rows with less than N hold them all.
        new_keys, new_values: ``[B, H, 1, D]`` and ``[B, H, 1, Dv]``.
        sinks, window: of the budget.
    """
    store = keys, values, positions, priority, recent, clock
    if takes_triton(keys, values):
        from kvkeep.kernels.triton_place import replace_lowest_triton  # here: needs Triton

        replace_lowest_triton(*store, new_keys, new_values, sinks, window)
    else:
        replace_lowest_reference(*store, new_keys, new_values, sinks, window)


def replace_lowest_reference(
    keys, values, positions, priority, recent, clock, new_keys, new_values, sinks, window
) -> None:
    """:func:`replace_lowest` in torch, on any device."""
    capacity = keys.shape[2]
    now = clock[:, None, None]  # [B, 1, 1]
    competes = (positions >= sinks) & (positions <= now - window)
    slot = torch.where(now < capacity, capacity - 1 - now, lowest(priority, positions, competes, 1))  # [B, H, 1]
    scatter_slots(keys, slot, new_keys)
    scatter_slots(values, slot, new_values)
    positions.scatter_(2, slot, now.to(positions.dtype).expand_as(slot))
    recent.scatter_(2, (now % window).expand_as(slot), slot)
    clock.add_(1)

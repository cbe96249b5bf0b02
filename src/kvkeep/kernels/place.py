"""Where a new pair goes: over the token of lowest priority, or into the next free slot. One token for every row.

Torch spends ten small calls on this, each a microsecond or two of bookkeeping, in every layer at every token; a
compiled loop is one call. It also tells whether the pair is finite, for nothing, before anything is written.

Slots and ties as in :mod:`kvkeep.slots`: rows are right-aligned, and of equals the oldest goes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

# How the bits of a number are read, and those of its exponent: all set where it is NaN or infinite.
BITS = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
}


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
    slots = keys, values, positions, priority, recent, clock
    if torch.compiler.is_compiling() or keys.device.type not in ("cpu", "cuda"):
        replace_lowest_reference(*slots, new_keys, new_values, sinks, window)
        return True
    if keys.device.type == "cuda":
        from kvkeep.kernels.triton_place import replace_lowest_triton  # here: needs Triton

        replace_lowest_triton(*slots, new_keys, new_values, sinks, window)
        return True
    key_bits, key_exponent = bits(keys)
    value_bits, value_exponent = bits(values)
    return compiled(_replace_lowest)(
        key_bits,
        value_bits,
        *(tensor.numpy() for tensor in slots[2:]),
        bits(new_keys)[0],
        bits(new_values)[0],
        key_exponent,
        value_exponent,
        sinks,
        window,
    )


def replace_lowest_reference(
    keys, values, positions, priority, recent, clock, new_keys, new_values, sinks, window
) -> None:
    """:func:`replace_lowest` in torch, without waiting for the device."""
    batch, heads, capacity, _ = keys.shape
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


def bits(tensor: Tensor) -> tuple:
    """The numbers as an array of integers that shares their memory, and the bits of an exponent that is all ones."""
    kind, exponent = BITS[tensor.dtype]
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.view(kind).numpy(), exponent


@functools.cache
def compiled(loop: Callable) -> Callable:
    """A loop compiled for the CPU at its first call; later processes find it on the disk."""
    import numba  # here, because importing it costs more than everything else on this floor

    return numba.njit(nogil=True, cache=True)(loop)


# ---------------------------------------------------------------------------------------------------------------------
# Plain Python for numba


def _replace_lowest(
    keys, values, positions, priority, recent, clock, new_keys, new_values, key_exponent, value_exponent, sinks, window
):
    batch, heads, capacity, _ = keys.shape
    for bit in new_keys.flat:
        if bit & key_exponent == key_exponent:
            return False
    for bit in new_values.flat:
        if bit & value_exponent == value_exponent:
            return False
    for row in range(batch):
        now = clock[row]
        clock[row] = now + 1
        for head in range(heads):
            slot = capacity - 1 - now
            if now >= capacity:
                slot = -1
                for other in range(capacity):
                    position = positions[row, head, other]
                    if position < sinks or position > now - window:
                        continue
                    if (
                        slot < 0
                        or priority[row, head, other] < priority[row, head, slot]
                        or (
                            priority[row, head, other] == priority[row, head, slot]
                            and position < positions[row, head, slot]
                        )
                    ):
                        slot = other
            for i in range(keys.shape[3]):
                keys[row, head, slot, i] = new_keys[row, head, 0, i]
            for i in range(values.shape[3]):
                values[row, head, slot, i] = new_values[row, head, 0, i]
            positions[row, head, slot] = now
            recent[row, head, now % window] = slot
    return True

"""Where pairs go: over a loser, into a free slot, and into the holes that an eviction leaves."""

from __future__ import annotations

import numpy as np

from kvkeep.kernels.loops.numbers import all_finite, loop


@loop
def loser(positions, priority, row, head, now, sinks, window):
    """The slot of a head whose token goes: the lowest priority of those that compete, the oldest of equals."""
    slot, least, oldest = -1, priority[row, head, 0], positions[row, head, 0]
    for other in range(positions.shape[2]):
        position, rank = positions[row, head, other], priority[row, head, other]
        if position < sinks or position > now - window:
            continue
        if slot < 0 or rank < least or (rank == least and position < oldest):
            slot, least, oldest = other, rank, position
    return slot


@loop
def place(keys, values, positions, priority, recent, new_keys, new_values, row, head, now, sinks, window):
    """Write the new pair of a head into a free slot, or over the loser."""
    slot = keys.shape[2] - 1 - now
    if slot < 0:
        slot = loser(positions, priority, row, head, now, sinks, window)
    for i in range(keys.shape[3]):
        keys[row, head, slot, i] = new_keys[row, head, 0, i]
    for i in range(values.shape[3]):
        values[row, head, slot, i] = new_values[row, head, 0, i]
    positions[row, head, slot] = now
    recent[row, head, now % window] = slot


@loop
def replace_lowest(keys, values, positions, priority, recent, clock, new_keys, new_values, sinks, window):
    """See :func:`kvkeep.kernels.place.replace_lowest`."""
    if not (all_finite(new_keys) and all_finite(new_values)):
        return False
    for row in range(keys.shape[0]):
        now = clock[row]
        for head in range(keys.shape[1]):
            place(keys, values, positions, priority, recent, new_keys, new_values, row, head, now, sinks, window)
        clock[row] = now + 1
    return True


@loop
def append(keys, values, positions, recent, clock, new_keys, new_values, query, free):
    """Write a pair into the slot ``free`` of every row and head, and its query among the newest.

    Args:
        recent: ``[B, H, G, r, D]``, the query at position p at ``p % r``; r may be 0.
        query: ``[B, H * G, 1, D]``.

    Returns:
        False where a new key or value is not finite; nothing was written then.
    """
    if not (all_finite(new_keys) and all_finite(new_values)):
        return False
    for row in range(keys.shape[0]):
        now = clock[row]
        for head in range(keys.shape[1]):
            for i in range(keys.shape[3]):
                keys[row, head, free, i] = new_keys[row, head, 0, i]
            for i in range(values.shape[3]):
                values[row, head, free, i] = new_values[row, head, 0, i]
            positions[row, head, free] = now
            if recent.shape[3]:
                for member in range(recent.shape[2]):
                    for i in range(recent.shape[4]):
                        number = query[row, head * recent.shape[2] + member, 0, i]
                        recent[row, head, member, now % recent.shape[3], i] = number
        clock[row] = now + 1
    return True


@loop
def goes_before(scores, positions, slot, other):
    """Whether the token of one slot goes rather than that of another."""
    if scores[slot] == scores[other]:
        return positions[slot] < positions[other]
    return scores[slot] < scores[other]


@loop
def sink(heap, size, scores, positions):
    """Restore a heap of slots, the last to go on top, after its top was replaced."""
    at = 0
    while 2 * at + 1 < size:
        below = 2 * at + 1
        if below + 1 < size and goes_before(scores, positions, heap[below], heap[below + 1]):
            below += 1
        if goes_before(scores, positions, heap[below], heap[at]):
            break
        heap[at], heap[below] = heap[below], heap[at]
        at = below


@loop
def lowest(scores, positions, candidates, chosen):
    """See :func:`kvkeep.slots.lowest`: writes ``chosen`` ``[B, H, count]``, the first to go first."""
    count = chosen.shape[2]
    for row in range(chosen.shape[0]):
        for head in range(chosen.shape[1]):
            score, position, heap = scores[row, head], positions[row, head], chosen[row, head]
            size = 0
            for slot in range(position.size):
                if not candidates[row, head, slot]:
                    continue
                if size < count:
                    at = size
                    size += 1
                    while at > 0 and goes_before(score, position, heap[(at - 1) // 2], slot):
                        heap[at] = heap[(at - 1) // 2]
                        at = (at - 1) // 2
                    heap[at] = slot
                elif goes_before(score, position, slot, heap[0]):
                    heap[0] = slot
                    sink(heap, count, score, position)
            for last in range(size - 1, 0, -1):
                heap[0], heap[last] = heap[last], heap[0]
                sink(heap, last, score, position)


@loop
def pair_holes(victims, width):
    """Survivors among the first n of ``width`` slots and the holes behind them, for n victims a head ``[B, H, n]``.

    Returns:
        int64 ``[B, H, n]`` twice, from where to where; -1 where there is nothing to move.
    """
    batch, heads, count = victims.shape
    sources, targets = np.full((batch, heads, count), -1), np.full((batch, heads, count), -1)
    dropped = np.empty(width, np.bool_)
    for row in range(batch):
        for head in range(heads):
            dropped[:] = False
            for i in range(count):
                dropped[victims[row, head, i]] = True
            moves, hole = 0, width
            for slot in range(count):
                if not dropped[slot]:
                    hole -= 1
                    while not dropped[hole]:
                        hole -= 1
                    sources[row, head, moves], targets[row, head, moves] = slot, hole
                    moves += 1
    return sources, targets


@loop
def move(tensor, sources, targets, first):
    """``tensor[targets] = tensor[sources]`` along the slots of ``[B, H, N, width]``, counted from ``first``."""
    for row in range(tensor.shape[0]):
        for head in range(tensor.shape[1]):
            for i in range(sources.shape[2]):
                source, target = first + sources[row, head, i], first + targets[row, head, i]
                if source < first:
                    break
                for j in range(tensor.shape[3]):
                    tensor[row, head, target, j] = tensor[row, head, source, j]

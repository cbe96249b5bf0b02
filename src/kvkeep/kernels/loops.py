"""Compiled loops for the CPU: what a token costs there is the number of calls, so one loop does all of a step.

Numba compiles a loop when it is first used and keeps it on the disk. Importing this file imports numba, which costs more
than everything else on this floor: import it where a loop is needed.

Keys and values come as torch has them; what numpy has no type for comes as its bits, bfloat16 as int16 and float16 as
uint16 (see :func:`kvkeep.kernels.place.raw`). The loops of a step have their arguments in common:

    keys, values ``[B, H, N, D]``, positions int32 ``[B, H, N]``, priority ``[B, H, N]``, recent ``[B, H, window]``,
    clock ``[B]``, new_keys, new_values ``[B, H, 1, D]``, sinks, window: see :func:`kvkeep.kernels.place.replace_lowest`.
"""

from __future__ import annotations

import functools
import math

import numba
import numpy as np
from numba import types
from numba.extending import overload

loop = functools.partial(numba.njit, nogil=True, cache=True)


def is_finite(value):
    """Of a number, or of the bits of one."""


def widen(source, target):
    """Copy numbers, or the bits of numbers, into a vector of float32 or float64."""


@overload(is_finite)
def _is_finite(value):
    if isinstance(value, types.Float):
        return lambda value: math.isfinite(value)
    exponent = 0x7F80 if value == types.int16 else 0x7C00
    return lambda value: value & exponent != exponent


@overload(widen)
def _widen(source, target):
    if isinstance(source.dtype, types.Float):

        def copy(source, target):
            target[:] = source
    elif source.dtype == types.int16:

        def copy(source, target):
            bits = np.empty(source.size, np.int32)
            for i in range(source.size):
                bits[i] = np.int32(source[i]) << 16
            target[:] = bits.view(np.float32)
    else:

        def copy(source, target):
            for i in range(source.size):
                exponent, fraction = (source[i] >> 10) & 31, source[i] & 1023
                size = fraction * 2.0**-24 if exponent == 0 else (1024 + fraction) * 2.0 ** (int(exponent) - 25)
                target[i] = -size if source[i] >> 15 else size

    return copy


@loop
def all_finite(new):
    """Of new pairs ``[B, H, 1, D]``."""
    for row in range(new.shape[0]):
        for head in range(new.shape[1]):
            for i in range(new.shape[3]):
                if not is_finite(new[row, head, 0, i]):
                    return False
    return True


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


# ---------------------------------------------------------------------------------------------------------------------
# What is counted of the attention of one query, rows at one position: after the statistics ``[B, H, N, ...]`` of all
# slots come probabilities ``[B * H, G, n]`` over the last n of them, and how many queries there are to the next eviction.


@loop
def count_mean(received, probabilities, until):
    """:meth:`kvkeep.policies.h2o.H2O.observe`."""
    _, group, seen = probabilities.shape
    first = received.shape[2] - seen
    for row in range(received.shape[0]):
        for head in range(received.shape[1]):
            own = probabilities[row * received.shape[1] + head]
            for slot in range(seen):
                total = own[0, slot]
                for member in range(1, group):
                    total += own[member, slot]
                received[row, head, first + slot] += total / group


@loop
def count_sums(sums, watched, ranges, probabilities, until):
    """:meth:`kvkeep.scorers.features.FeatureSpec.observe`.

    Args:
        sums: arrays ``[B, H, N, G]``; each counts while ``until`` is in its range, int64 ``[sums, 2]``, ends included.
        watched: ``[B, H, N]``, how often a slot was seen; N may be 0.
    """
    _, group, seen = probabilities.shape
    number = 0
    for total in sums:
        if ranges[number, 0] <= until <= ranges[number, 1]:
            first = total.shape[2] - seen
            for row in range(total.shape[0]):
                for head in range(total.shape[1]):
                    own = probabilities[row * total.shape[1] + head]
                    for slot in range(seen):
                        for member in range(group):
                            total[row, head, first + slot, member] += own[member, slot]
        number += 1
    if watched.shape[2]:
        first = watched.shape[2] - seen
        for row in range(watched.shape[0]):
            for head in range(watched.shape[1]):
                for slot in range(seen):
                    watched[row, head, first + slot] += 1


# ---------------------------------------------------------------------------------------------------------------------
# Steps that first give the leaving token its priority. Inside, a token is a vector of the dtype of priorities.


@loop
def replace_lowest_at_random(
    keys, values, positions, priority, recent, clock, new_keys, new_values, sinks, window, streams
):
    """A step of the policy ``random``; streams: int64 ``[H]``, see :meth:`kvkeep.policies.random.Random.streams`."""
    if not (all_finite(new_keys) and all_finite(new_values)):
        return False
    for row in range(keys.shape[0]):
        now = clock[row]
        for head in range(keys.shape[1]):
            if now >= window:
                priority[row, head, recent[row, head, now % window]] = draw(streams[head] + now - window)
            place(keys, values, positions, priority, recent, new_keys, new_values, row, head, now, sinks, window)
        clock[row] = now + 1
    return True


@loop
def draw(state):
    """:func:`kvkeep.policies.random.uniform` of one int64."""
    bits = np.uint64(state) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits = bits ^ (bits >> np.uint64(31))
    return np.float32(bits & np.uint64(0xFFFFFF)) / np.float32(2**24)


@loop
def standardise(key, value, own, token):
    """Read a pair into a token; ``own`` begins with the mean and the deviation of every input."""
    widen(key, token[: key.size])
    widen(value, token[key.size :])
    for i in range(token.size):
        token[i] = (token[i] - own[i]) / own[token.size + i]


@loop
def dense(inputs, weights, outputs):
    """``outputs += inputs @ weights``, weights a vector of ``[inputs, outputs]``."""
    width = outputs.size
    for i in range(inputs.size):
        for j in range(width):
            outputs[j] += inputs[i] * weights[i * width + j]


@loop
def softmax(logits):
    logits[:] = np.exp(logits - logits.max())
    logits[:] = logits / logits.sum()


@loop
def readout(inputs, layer, own):
    """The score ``w2 . silu(W1 x + b1) + b2``, standardised; ``own`` is W1, b1, w2, b2, mean and deviation."""
    at, hidden = inputs.size * layer.size, layer.size
    layer[:] = own[at : at + hidden]
    dense(inputs, own, layer)
    at += hidden
    score = own[at + hidden]
    for i in range(hidden):
        score += layer[i] / (1 + math.exp(-layer[i])) * own[at + i]
    return (score - own[at + hidden + 1]) / own[at + hidden + 2]


@loop
def replace_lowest_by_mlp(
    keys,
    values,
    positions,
    priority,
    recent,
    clock,
    known,
    new_keys,
    new_values,
    sinks,
    window,
    weights,
    hidden,
    decay_step,
    phase,
):
    """A step of the policy ``kvpop_mlp``: :class:`kvkeep.scorers.mlp.MLP`.

    A score depends on its token alone, so a whole window is scored at once, when one that is not leaves it: the weights
    are then read from memory once a window.

    Args:
        known: int64 ``[B]``, the first position whose priority is not known; 0 where none in the window is.
        weights: ``[H, total]``, of :meth:`kvkeep.scorers.mlp.MLP.loop`, the decay last.
        hidden: width.
        decay_step: tokens per step of the decay.
        phase: how many tokens more are scored the first time, so that layers take turns.
    """
    if not (all_finite(new_keys) and all_finite(new_values)):
        return False
    token, layer = np.empty(keys.shape[3] + values.shape[3], priority.dtype), np.empty(hidden, priority.dtype)
    for row in range(keys.shape[0]):
        now = clock[row]
        first = now - window
        last = now if known[row] > 0 else first + 1 + phase % window
        late = first >= max(known[row], 0)
        for head in range(keys.shape[1]):
            own = weights[head]
            for position in range(first, last if late else first):
                slot = recent[row, head, position % window]
                standardise(keys[row, head, slot], values[row, head, slot], own, token)
                score = readout(token, layer, own[2 * token.size :])
                if not math.isfinite(score):
                    return False
                priority[row, head, slot] = score - position // decay_step * own[-1]
            place(keys, values, positions, priority, recent, new_keys, new_values, row, head, now, sinks, window)
        if late:
            known[row] = last
        clock[row] = now + 1
    return True


@loop
def replace_lowest_by_mlstm(
    keys,
    values,
    positions,
    priority,
    recent,
    clock,
    memory,
    stabiliser,
    new_keys,
    new_values,
    sinks,
    window,
    weights,
    features,
    hidden,
    projects,
    ratio,
    least,
    decay_step,
):
    """A step of the policy ``kvpop``: :class:`kvkeep.scorers.mlstm.MLSTM`.

    Args:
        memory: ``[B, H, F, Dv + 1]``; stabiliser: ``[B, H]``; both as :func:`kvkeep.scorers.mlstm.mlstm` has them.
        weights: ``[H, total]``, of :meth:`kvkeep.scorers.mlstm.MLSTM.loop`, the decay last.
        features, hidden: widths.
        projects: whether values are projected before they are stored.
        ratio: whether the normaliser is the ratio; ``least`` its smallest denominator.
        decay_step: tokens per step of the decay.
    """
    if not (all_finite(new_keys) and all_finite(new_values)):
        return False
    inputs, stored, kind = keys.shape[3] + values.shape[3], memory.shape[3] - 1, priority.dtype
    write, value, gates = np.empty(inputs, kind), np.ones(stored + 1, kind), np.empty(2, kind)
    query, key, layer = np.empty(features, kind), np.empty(features, kind), np.empty(hidden, kind)
    both, recalled = np.empty(stored + inputs, kind), np.empty(stored + 1, kind)  # [what is recalled; token]
    read = both[stored:]
    for row in range(keys.shape[0]):
        now = clock[row]
        for head in range(keys.shape[1]):
            slot, own = recent[row, head, now % window], weights[head]
            standardise(new_keys[row, head, 0], new_values[row, head, 0], own, write)
            standardise(keys[row, head, slot], values[row, head, slot], own, read)
            own = own[2 * inputs :]
            query[:] = 0
            dense(read, own, query)
            softmax(query)
            own = own[inputs * features :]
            key[:] = 0
            dense(write, own, key)
            softmax(key)
            own = own[inputs * features :]
            gates[:] = own[2 * inputs : 2 * inputs + 2]
            dense(write, own, gates)
            own = own[2 * inputs + 2 :]
            if projects:
                value[:stored] = 0
                dense(write, own, value[:stored])
                own = own[inputs * stored :]
            else:
                value[:stored] = write[keys.shape[3] :]

            kept = min(gates[1], 0) - math.log1p(math.exp(-abs(gates[1]))) + stabiliser[row, head]
            scale = max(kept, gates[0])
            stabiliser[row, head] = scale
            old, new = math.exp(kept - scale), math.exp(gates[0] - scale)
            recalled[:] = 0
            for i in range(features):
                for j in range(stored + 1):
                    memory[row, head, i, j] = old * memory[row, head, i, j] + new * key[i] * value[j]
                    recalled[j] += query[i] * memory[row, head, i, j]
            denominator = max(recalled[stored], least) if ratio else max(abs(recalled[stored]), math.exp(-scale))
            for i in range(stored):
                both[i] = recalled[i] / denominator

            if now >= window:
                score = readout(both, layer, own)
                if not math.isfinite(score):
                    return False
                priority[row, head, slot] = score - (now - window) // decay_step * own[-1]
            place(keys, values, positions, priority, recent, new_keys, new_values, row, head, now, sinks, window)
        clock[row] = now + 1
    return True

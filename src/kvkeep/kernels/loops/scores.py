"""Steps that first give the leaving token its priority. Inside, a token is a vector of the dtype of priorities."""

from __future__ import annotations

import math

import numpy as np

from kvkeep.kernels.loops.numbers import all_finite, loop, widen
from kvkeep.kernels.loops.places import place


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

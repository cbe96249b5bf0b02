"""What is counted of the attention of one query, rows at one position.

After the statistics ``[B, H, N, ...]`` of all slots come probabilities ``[B * H, G, n]`` over the last n of them, and
how many queries there are to the next eviction, this one included.
"""

from __future__ import annotations

from kvkeep.kernels.loops.numbers import loop


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
    for number, total in enumerate(sums):
        if ranges[number, 0] <= until <= ranges[number, 1]:
            first = total.shape[2] - seen
            for row in range(total.shape[0]):
                for head in range(total.shape[1]):
                    own = probabilities[row * total.shape[1] + head]
                    flat = total[row, head, first:].reshape(seen * group)  # a head's at a time: half the time
                    for member in range(group):
                        for slot in range(seen):
                            flat[slot * group + member] += own[member, slot]
    if watched.shape[2]:
        first = watched.shape[2] - seen
        for row in range(watched.shape[0]):
            for head in range(watched.shape[1]):
                for slot in range(seen):
                    watched[row, head, first + slot] += 1

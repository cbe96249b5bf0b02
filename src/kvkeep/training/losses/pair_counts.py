"""How many pairs violate the margin of a ranking loss, candidate by candidate, without listing the pairs.

Candidate i violates it against j where `alpha[i] < alpha[j]` and `keep[j] < keep[i] + margin`. Every function returns
int64 `lower[r, i]`, the violated pairs in which i has the lower alpha, `higher[r, i]`, those in which it has the higher
one, and `total[r]`, all pairs, violated or not. Nothing here carries a gradient.
"""

import functools

import numpy as np
import torch
from torch import Tensor

BACKENDS = ("auto", "numba", "torch")
TILE = 2**24  # comparisons in memory at once where pairs are compared one by one


@torch.no_grad()
def count_all(keep: Tensor, margin: float, alpha: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """All pairs of `[R, N]` candidates: O(N log N) a row on the CPU ("numba"), O(N^2) in tiles anywhere ("torch").

    Raises:
        ValueError: where the backend is unknown.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "torch" or (backend == "auto" and keep.device.type != "cpu"):
        return _count_tiles(keep, keep + margin, alpha)
    by_alpha, by_keep, reach = argsort(alpha), argsort(keep), keep + margin
    lower, total = _count_above(keep, reach, alpha, by_alpha, by_keep)
    higher, _ = _count_above(-reach, -keep, -alpha, by_alpha.flip(-1), by_keep.flip(-1))  # the same in a mirror
    return lower, higher, total


@torch.no_grad()
def count_cross(keep: Tensor, margin: float, alpha: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of one of the `count` lowest alphas, of equal ones the older, with one of the others. `[R, N]` each.

    Equal alphas on both sides of the cut are no pair. O(N log N) a row, on any device.
    """
    cut = alpha.kthvalue(count, -1, keepdim=True).values
    under, at_cut = alpha < cut, alpha == cut
    evicted_at_cut = at_cut & (at_cut.cumsum(-1) <= count - under.sum(-1, keepdim=True))
    kept_above = alpha > cut
    kept = kept_above | (at_cut & ~evicted_at_cut)

    by_keep = argsort(keep)
    ranked = keep.gather(-1, by_keep)
    below = torch.searchsorted(ranked, ranked + margin)  # [R, N] by rank: how many the candidate violates if all count
    missed = torch.searchsorted(ranked + margin, ranked, right=True)
    lower, higher = torch.zeros_like(by_keep), torch.zeros_like(by_keep)
    total = 0
    for low, high in ((under, kept), (evicted_at_cut, kept_above)):
        low, high = low.gather(-1, by_keep), high.gather(-1, by_keep)
        lower += _prefix_counts(high).gather(-1, below).masked_fill(~low, 0)
        lows = _prefix_counts(low)
        higher += (lows[:, -1:] - lows.gather(-1, missed)).masked_fill(~high, 0)
        total = total + low.sum(-1) * high.sum(-1)
    back = torch.empty_like(by_keep)
    return back.scatter(-1, by_keep, lower), back.scatter(-1, by_keep, higher), total


def argsort(values: Tensor) -> Tensor:
    """Indices that sort the last dimension, equal values in any order. NumPy sorts short rows many times faster."""
    if values.device.type != "cpu":
        return values.argsort(-1)
    return torch.from_numpy(np.argsort(values.detach().numpy(), -1))


def _prefix_counts(marked: Tensor) -> Tensor:
    """bool `[R, N]` -> `[R, N + 1]`: how many are marked before each place."""
    return torch.nn.functional.pad(marked.cumsum(-1), (1, 0))


def _count_tiles(keep: Tensor, reach: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, for some of the higher candidates at a time."""
    lower = torch.zeros(keep.shape, dtype=torch.long, device=keep.device)
    higher = torch.zeros_like(lower)
    total = torch.zeros_like(lower[:, 0])
    tile = max(TILE // max(keep.numel(), 1), 1)
    for start in range(0, keep.shape[-1], tile):
        part = slice(start, start + tile)
        pair = alpha[:, :, None] < alpha[:, None, part]
        violated = pair & (keep[:, None, part] < reach[:, :, None])
        total += pair.sum((-2, -1))
        lower += violated.sum(-1)
        higher[:, part] = violated.sum(-2)
    return lower, higher, total


def _count_above(
    value: Tensor, reach: Tensor, alpha: Tensor, by_alpha: Tensor, by_value: Tensor
) -> tuple[Tensor, Tensor]:
    """For every i the number of j with `alpha[j] > alpha[i]` and `value[j] < reach[i]`, and the pairs of each row."""
    found, total = torch.empty_like(by_alpha), torch.empty_like(by_alpha[:, 0])
    columns = (value, reach, alpha, by_alpha, by_value, found, total)
    _compiled_fenwick()(*(column.contiguous().numpy() for column in columns))
    return found, total


@functools.cache
def _compiled_fenwick():
    import numba  # here, because importing it costs more than everything else in this file

    return numba.njit(nogil=True, cache=True)(_run_fenwick)


def _run_fenwick(value, reach, alpha, by_alpha, by_value, found, total):
    """Fills `found [rows, N]` and `total [rows]`. Plain Python for numba.

    `by_alpha` and `by_value` sort a row, and `by_value` sorts `reach` too. From the highest alpha down, candidates
    enter a Fenwick tree over the ranks of their values, where lower ones count those within their reach.
    """
    rows, length = value.shape
    tree = np.empty(length + 1, np.int64)
    rank = np.empty(length, np.int64)
    below = np.empty(length, np.int64)
    for row in range(rows):
        within = 0
        for place in range(length):
            i = by_value[row, place]
            while within < length and value[row, by_value[row, within]] < reach[row, i]:
                within += 1
            rank[i], below[i] = place, within
        tree[:] = 0
        total[row] = 0
        stop = length
        while stop > 0:
            start = stop - 1
            while start > 0 and alpha[row, by_alpha[row, start - 1]] == alpha[row, by_alpha[row, start]]:
                start -= 1
            total[row] += start * (stop - start)
            for place in range(start, stop):  # all equals ask before any of them enters
                node = below[by_alpha[row, place]]
                held = 0
                while node > 0:
                    held += tree[node]
                    node &= node - 1
                found[row, by_alpha[row, place]] = held
            for place in range(start, stop):
                node = rank[by_alpha[row, place]] + 1
                while node <= length:
                    tree[node] += 1
                    node += node & -node
            stop = start

"""Lifetimes: the whole history of a token under a policy as one integer, the query at which it is gone.

`visible(q, t) = (t <= q) and (q < evicted_at[t])`. Everything here is about *entry semantics* (KVpop, arXiv 2607.05061,
sections 3.2, B.6 and C.1): the window of query q is `(q - w, q]`, the token `q - w` has just left it, and of all tokens
that ever left it the `k` with the highest static priority are held. Ties: the newest token wins.

Knows tensors and budgets; nothing of scores, models or caches. Lifetimes are `[batch, kv_heads, length]`, int32, in
columns of the batch: a survivor has `evicted_at = length`, a left pad 0 (no query ever sees it).
"""

import functools

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad as pad_with_zeros

from kvkeep.budget import Budget

BACKENDS = ("auto", "numba", "torch")


def running_topk(priority: Tensor, budget: Budget, padding: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Lifetimes of all tokens under static priorities, without a mask (KVpop, section 3.2 and appendix C.1).

    At query q the tokens `E(q) = {t : s <= t <= q - w}` compete for k places; a token that loses its place never comes
    back. The first decision falls at `q = s + w + k`; before it every query sees everything.

    Args:
        priority: `[B, H, S]`, higher stays. What sinks and the last `w` tokens have plays no role, but may not be NaN.
            Compared in float32 or in its own dtype, whichever is wider.
        budget: of an entry policy (`interval = 0`).
        padding: `[B]` integers, the left pads of each row. Sinks, window and places then count from the row's own
            first token, so that a padded row has the lifetimes it has alone, moved right by its pads.
        backend: "numba", a heap, O(S log k) per row on the CPU; "torch", O(S log S) per row in log2(S) vectorised
            passes on any device; "auto", the first for CPU tensors and the second for others.

    Returns:
        int32 `[B, H, S]`, evicted_at: the first query (a column) that no longer sees the token, S if it survives.

    Raises:
        ValueError: where a priority is NaN or not of three dimensions, the budget has an interval, the padding does
            not fit, or the backend is unknown or cannot reach the tensor's device.

    Example:
        >>> priority = torch.tensor([[[9, 9, 0.3, 0.8, 0.1, 0.5, 0.9, 0.2, 0.7, 0.4]]])
        >>> running_topk(priority, Budget(sinks=2, window=2, topk=2)).tolist()
        [[[10, 10, 7, 10, 6, 8, 10, 9, 10, 10]]]
    """
    if priority.dim() != 3:
        raise ValueError(f"priority must be [batch, kv_heads, length], got shape {tuple(priority.shape)}")
    if budget.interval != 0:
        raise ValueError(f"a running top-k needs the budget of an entry policy, interval 0, got {budget}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto":
        backend = "numba" if priority.device.type == "cpu" else "torch"
    if backend == "numba" and priority.device.type != "cpu":
        raise ValueError(f'backend "numba" runs on CPU tensors, got one on {priority.device}')

    batch, heads, length = priority.shape
    padding = check_padding(padding, batch, length, priority.device)
    rows = _comparable(priority, padding).reshape(batch * heads, length)
    if padding is not None:
        padding = padding.repeat_interleave(heads)  # [B * H]
    lifetimes = _heap_lifetimes if backend == "numba" else _sorted_lifetimes
    return lifetimes(rows, padding, budget).view(batch, heads, length)


def check_padding(padding: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor | None:
    """Left pads as int64 `[batch]` on `device`; None where there are none.

    Raises:
        ValueError: where they are not one integer between 0 and `length` per row.
    """
    if padding is None:
        return None
    padding = torch.as_tensor(padding, device=device)
    if padding.is_floating_point() or padding.dtype == torch.bool or padding.shape != (batch,):
        raise ValueError(
            f"padding must be one integer for each of {batch} rows, got {padding.dtype} of shape {tuple(padding.shape)}"
        )
    if batch and not 0 <= int(padding.min()) <= int(padding.max()) <= length:
        raise ValueError(f"padding must lie between 0 and the length {length}, got {padding.tolist()}")
    return padding.long()


def _comparable(priority: Tensor, padding: Tensor | None) -> Tensor:
    """Priorities wide enough to compare, pads set to 0, free of NaN and of negative zeros (which could sort apart)."""
    wide = torch.promote_types(priority.dtype, torch.float32 if priority.is_floating_point() else torch.float64)
    priority = priority.detach().to(wide)
    if padding is not None:
        column = torch.arange(priority.shape[-1], device=priority.device)
        priority = priority.masked_fill((column < padding[:, None])[:, None], 0.0)
    nan = priority.isnan()
    if nan.any():
        row, head, token = nan.nonzero()[0].tolist()
        raise ValueError(f"{int(nan.sum())} priorities are NaN, the first in row {row}, head {head}, token {token}")
    return priority + 0.0


# ---------------------------------------------------------------------------------------------------------------------
# CPU: one heap per row


def _heap_lifetimes(priority: Tensor, padding: Tensor | None, budget: Budget) -> Tensor:
    rows, length = priority.shape
    pads = np.zeros(rows, np.int64) if padding is None else padding.numpy()
    evicted_at = np.empty((rows, length), np.int32)
    _compiled_heap()(priority.contiguous().numpy(), pads, budget.sinks, budget.window, budget.topk, evicted_at)
    return torch.from_numpy(evicted_at)


@functools.cache
def _compiled_heap():
    import numba  # here, because importing it costs more than everything else in this file

    return numba.njit(nogil=True, cache=True)(_run_heap)


def _run_heap(priority, padding, sinks, window, topk, evicted_at):
    """Fills `evicted_at`: per row a heap of the k best tokens so far, the next to go (lowest, then oldest) on top.

    Plain Python for numba: `priority [rows, S]`, `padding [rows]`, `evicted_at [rows, S]`. A token is a column.
    """
    rows, length = priority.shape
    places = min(topk, length)
    rank = np.empty(places, priority.dtype)  # heap of (priority, token), as two arrays
    token = np.empty(places, np.int64)
    for row in range(rows):
        evicted_at[row, : padding[row]] = 0
        evicted_at[row, padding[row] :] = length
        held = 0
        for new in range(padding[row] + sinks, length - window):  # `new` leaves the window at query new + window
            value = priority[row, new]
            if held < topk:  # sift up from the first free place
                hole = held
                held += 1
                while hole > 0 and value < rank[(hole - 1) // 2]:  # on equality the older one stays above
                    rank[hole], token[hole] = rank[(hole - 1) // 2], token[(hole - 1) // 2]
                    hole = (hole - 1) // 2
            elif value < rank[0]:
                evicted_at[row, new] = new + window
                continue
            else:  # the newest wins a tie: replace the top and sift down
                evicted_at[row, token[0]] = new + window
                hole = 0
                while 2 * hole + 1 < held:
                    child = 2 * hole + 1
                    if child + 1 < held and (
                        rank[child + 1] < rank[child]
                        or (rank[child + 1] == rank[child] and token[child + 1] < token[child])
                    ):
                        child += 1
                    if value < rank[child]:
                        break
                    rank[hole], token[hole] = rank[child], token[child]  # on equality the older one rises
                    hole = child
            rank[hole], token[hole] = value, new


# ---------------------------------------------------------------------------------------------------------------------
# Any device: sort by rank, then a prefix quantile


def _sorted_lifetimes(priority: Tensor, padding: Tensor | None, budget: Budget) -> Tensor:
    """The query at which token t dies is `w + max(t, j)`, j the k-th smallest index among the tokens ranked above it.

    For t is out as soon as it has left the window and k better tokens have left it too. Pads move to the end of the
    row, where they arrive after its last query and reach nobody.
    """
    rows, length = priority.shape
    column = torch.arange(length, device=priority.device)
    if padding is not None:
        priority = priority.gather(-1, (column + padding[:, None]) % length)
    lifetimes = torch.full((rows, length), length, device=priority.device)
    rivals = priority[:, budget.sinks : max(length - budget.window, 0)]  # [rows, n]: leave the window in this row
    n = rivals.shape[-1]
    if n > budget.topk:
        newest_first = rivals.flip(-1).sort(dim=-1, descending=True, stable=True).indices
        by_rank = n - 1 - newest_first  # [rows, n]: by_rank[r] is the token of rank r
        losers = by_rank[:, budget.topk :]
        last_to_beat = _prefix_kth_smallest(by_rank, budget.topk)
        gone = budget.sinks + budget.window + torch.maximum(losers, last_to_beat)
        lifetimes.scatter_(-1, budget.sinks + losers, gone)
    if padding is not None:
        lifetimes = lifetimes.gather(-1, (column - padding[:, None]) % length) + padding[:, None]
        lifetimes = lifetimes.clamp(max=length).masked_fill(column < padding[:, None], 0)
    return lifetimes.int()


def _prefix_kth_smallest(permutation: Tensor, k: int) -> Tensor:
    """For every r in [k, n): the k-th smallest of `permutation[:, :r]`. `[rows, n]` -> `[rows, n - k]`.

    A wavelet tree, level by level from the highest bit. A level keeps the values grouped into nodes by their higher
    bits, each node in the order of `permutation`. Because the values are exactly 0..n-1, the node that holds the
    values from v on also begins at place v, and v / 2 of the values before it have the bit of this level unset.
    """
    rows, n = permutation.shape
    values = permutation
    place = torch.arange(n, device=values.device)
    node = torch.zeros(rows, n - k, dtype=torch.long, device=values.device)  # where the answer's node begins
    inside = place[k:].expand(rows, -1)  # how much of the prefix lies in that node
    skip = torch.full_like(node, k - 1)  # how many of those are smaller than the answer
    for bit in reversed(range((n - 1).bit_length())):
        half = 1 << bit
        is_low = (values & half) == 0
        low_before = pad_with_zeros(is_low.cumsum(-1), (1, 0))  # [rows, n + 1]
        low = low_before.gather(-1, node + inside) - node // 2
        in_high = low <= skip
        node = torch.where(in_high, node + half, node)
        inside = torch.where(in_high, inside - low, low)
        skip = torch.where(in_high, skip - low, skip)
        start = values & -(2 * half)
        low_place = start + low_before[:, :-1] - start // 2
        new_place = torch.where(is_low, low_place, start + half + place - low_place)
        values = torch.empty_like(values).scatter_(-1, new_place, values)
    return node


# ---------------------------------------------------------------------------------------------------------------------
# What lifetimes say


def visible(evicted_at: Tensor) -> Tensor:
    """Which key each query sees: `[B, H, S]` -> bool `[B, H, S (queries), S (keys)]`. S x S: tests and pictures only.

    The mask of KVpop, appendix C.1: `t <= q and q < evicted_at[t]`.

    Example:
        >>> visible(torch.tensor([[[3, 2, 3]]])).int().tolist()
        [[[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]]
    """
    position = torch.arange(evicted_at.shape[-1], device=evicted_at.device)
    query = position[:, None]
    return (position <= query) & (query < evicted_at[..., None, :])


def recall(teacher_priority: Tensor, student_priority: Tensor, budget: Budget, padding: Tensor | None = None) -> Tensor:
    """How much of the teacher's top-k the student holds: mean over q >= rest of `|topk_T(E(q)) & topk_S(E(q))| / k`.

    The retention recall of KVpop (arXiv 2607.05061, figure 7). Always read it beside `chance_recall`.

    Args:
        teacher_priority: `[B, H, S]`, for instance from the future attention.
        student_priority: `[B, H, S]`.
        budget: of an entry policy.
        padding: `[B]` left pads.

    Returns:
        float `[B, H]`, between 0 and 1.

    Raises:
        ValueError: where the shapes differ, a row has no query at or after `rest`, or as `running_topk`.

    Example:
        >>> teacher = torch.tensor([[[0.1, 0.9, 0.8, 0.2, 0.7, 0.3]]])
        >>> student = torch.tensor([[[0.5, 0.6, 0.9, 0.1, 0.2, 0.4]]])
        >>> recall(teacher, student, Budget(sinks=0, window=1, topk=3))
        tensor([[0.6667]])
    """
    if teacher_priority.shape != student_priority.shape:
        raise ValueError(
            f"teacher and student differ in shape: {tuple(teacher_priority.shape)} and {tuple(student_priority.shape)}"
        )
    teacher = running_topk(teacher_priority, budget, padding)
    return lifetime_recall(teacher, running_topk(student_priority, budget, padding), budget, padding)


def lifetime_recall(
    teacher_evicted_at: Tensor, student_evicted_at: Tensor, budget: Budget, padding: Tensor | None = None
) -> Tensor:
    """`recall` from two lifetimes `[B, H, S]`, in O(S): token t is in both top-k sets while it is out of the window and
    in neither evicted.

    The budget may have an interval: the queries that count are then those at which the student evicts, with what it
    holds after that, and the teacher's lifetimes are those of `budget.as_entry`.

    Returns:
        float `[B, H]`.

    Raises:
        ValueError: where a row has no query at which something is evicted.
    """
    batch, _, length = teacher_evicted_at.shape
    device = teacher_evicted_at.device
    pads = torch.zeros(batch, dtype=torch.long, device=device) if padding is None else padding
    pads = check_padding(pads, batch, length, device)[:, None, None]  # [B, 1, 1]
    step = max(budget.interval, 1)

    def evictions(before: Tensor) -> Tensor:
        """How many of the row's queries below `before`, a column, evict."""
        return ((before - pads - budget.slots + step - 1) // step).clamp(min=0)

    if batch and int((length - pads).min()) <= budget.slots:
        raise ValueError(
            f"recall needs more tokens than the {budget.slots} held at most, got {int((length - pads).min())}"
        )
    column = torch.arange(length, device=device)
    gone = torch.minimum(teacher_evicted_at, student_evicted_at)
    shared = (evictions(gone) - evictions(column + budget.as_entry.window)).clamp(min=0)
    shared = shared.masked_fill(column < pads + budget.sinks, 0)  # sinks are held, but in no top-k
    return shared.sum(-1) / (budget.topk * evictions(torch.full_like(pads, length))[..., 0])


def chance_recall(length: int, budget: Budget) -> float:
    """`recall` of a student that keeps a random k of all tokens out of the window: the mean of `k / |E(q)|`.

    Over the queries q that evict, as in `lifetime_recall`.

    Raises:
        ValueError: where `length` is not above `budget.slots`.

    Example:
        >>> round(chance_recall(6, Budget(sinks=0, window=1, topk=3)), 3)  # 3 of 4 tokens, then 3 of 5
        0.675
    """
    if length <= budget.slots:
        raise ValueError(f"recall needs more tokens than the {budget.slots} held at most, got {length}")
    entry = budget.as_entry
    shares = [budget.topk / (q - entry.window - entry.sinks + 1) for q in budget.eviction_queries(length)]
    return sum(shares) / len(shares)


def realised_compression(evicted_at: Tensor, padding: Tensor | None = None) -> Tensor:
    """The share of causal (query, key) pairs that a policy's evictions save: 0 for a full cache.

    Args:
        evicted_at: `[B, H, S]`.
        padding: `[B]` left pads, which count neither as held nor as saved.

    Returns:
        float `[B, H]`. Unlike KVpop's compression rate `1 - rest / S` it counts the growing start of a sequence.

    Example:
        >>> realised_compression(torch.tensor([[[4, 2, 4, 4]]]))  # 8 of 10 pairs remain
        tensor([[0.2000]])
    """
    batch, _, length = evicted_at.shape
    pads = torch.zeros(batch, dtype=torch.long, device=evicted_at.device) if padding is None else padding
    own = length - check_padding(pads, batch, length, evicted_at.device)[:, None]  # [B, 1]
    held = (evicted_at - torch.arange(length, device=evicted_at.device)).clamp(min=0).sum(-1)
    return 1 - held / (own * (own + 1) // 2).clamp(min=1)


def static_priority(
    score: Tensor,
    log_gamma: float | Tensor,
    step: int,
    padding: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """A score with temporal decay, as one number that never changes: `score - floor(t / step) * log_gamma`.

    KVpop (arXiv 2607.05061, section 3) decays the score of a token by `floor((q - t) / step) * log_gamma` at query q.
    Ranking by that lets tokens re-enter, which no cache can do; this is the same decay in blocks of `step` queries,
    less the term that all tokens share. Differentiable in `score` and `log_gamma`.

    Args:
        score: `[B, H, S]`, higher stays.
        log_gamma: log of the decay per step, normally <= 0: a number, or a tensor `[]`, `[H]` or `[B, H]`.
        step: tokens per decay step.
        padding: `[B]` left pads; t counts from the row's own first token.
        positions: integers that broadcast to `score`, t itself, where `score` is not a whole sequence (decoding).

    Returns:
        `[B, H, S]`, in float32 or the dtype of `score`, whichever is wider.

    Raises:
        ValueError: where `step` is below 1, `log_gamma` fits neither shape, or padding and positions are both given.

    Example:
        >>> static_priority(torch.zeros(1, 1, 5), -0.5, step=2)
        tensor([[[0.0000, 0.0000, 0.5000, 0.5000, 1.0000]]])
    """
    if step < 1:
        raise ValueError(f"step must be at least 1, got {step}")
    batch, heads, length = score.shape
    score = score.to(torch.promote_types(score.dtype, torch.float32))
    if not isinstance(log_gamma, Tensor) or log_gamma.dtype != score.dtype or log_gamma.device != score.device:
        log_gamma = torch.as_tensor(log_gamma, dtype=score.dtype, device=score.device)
    if log_gamma.shape not in ((), (heads,), (batch, heads)):
        raise ValueError(
            f"log_gamma must be a number, [{heads}] or [{batch}, {heads}] for scores of shape {tuple(score.shape)}, "
            f"got shape {tuple(log_gamma.shape)}"
        )
    if positions is None:
        positions = torch.arange(length, device=score.device)
        if padding is not None:
            padding = check_padding(padding, batch, length, score.device)
            positions = (positions - padding[:, None])[:, None]  # [B, 1, S]
    elif padding is not None:
        raise ValueError("give padding or positions, not both: positions are already counted from the row's own start")
    return score - (positions // step).to(score.dtype) * log_gamma[..., None]

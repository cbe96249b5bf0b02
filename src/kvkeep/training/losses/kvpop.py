"""KVpop's boundary loss (arXiv 2607.05061, section 3.2 and appendices B.4 to B.6), and a plain regression.

At query q the token `t_new = q - w` has just left the window and either takes one of the k long-range places or is
gone. The teacher, who ranks by future attention, says which; the student's score of `t_new` is pushed to the right side
of the token at the teacher's cutoff. Only static priorities are compared (`lifetimes.static_priority`), so teacher and
student decay alike.

Who stands at the cutoff follows from the teacher's lifetimes alone: from the first decision on, every query evicts
exactly one token, so a single running top-k tells all pairs and nothing here loops over tokens.

Nothing is clamped, gamma included: with labels that share the student's gamma a decay without bound makes "keep the
newest" right for both, so whoever learns gamma bounds it and watches `keep_rate`.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, smooth_l1_loss

from kvkeep.budget import Budget
from kvkeep.lifetimes import check_padding, running_topk, static_priority

RATE_BOUND = 1e-4  # keep rates stay this far from 0 and 1, so that a balancing weight is finite without a clip


class BoundaryPairs(NamedTuple):
    """Who is compared with whom, for Q queries: all tensors `[B, H, Q]`."""

    t_new: Tensor  # int64, the token that has just left the window (a column)
    t_bnd: Tensor  # int64, the token at the teacher's cutoff (a column)
    y: Tensor  # int8, +1 where the teacher keeps t_new, else -1
    valid: Tensor  # bool, False where the query makes no decision in its row; the rest is then meaningless
    margin: Tensor  # float >= 0, by how much the teacher prefers the better of the two, decayed


def boundary(
    score: Tensor,
    target: Tensor,
    budget: Budget,
    log_gamma: float | Tensor,
    step: int,
    tau: float = 1.0,
    boundary: str = "kth",
    margin: float | None = 1.0,
    balance: tuple[float, float] | None = (0.5, 4.0),
    queries: int | Tensor | None = None,
    *,
    degenerate: str = "keep",
    rate: Tensor | None = None,
    min_future: int = 1,
    padding: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Mean over rows, heads and queries of `weight * softplus(-y (pi[t_new] - pi[t_bnd]) / tau)`.

    `pi` are the student's priorities, `y` and `t_bnd` the teacher's (`boundary_pairs`). Scores and, if it requires a
    gradient, `log_gamma` learn; the target never does, and the teacher decays with `log_gamma.detach()`.

    Args:
        score: `[B, H, S]`, the student's, higher stays. Scores of the last w tokens are never read.
        target: `[B, H, S]`, the teacher's, usually the log of the future attention.
        budget: of an entry policy.
        log_gamma: log of the decay per step: a number, `[]`, `[H]` or `[B, H]`.
        step: tokens per decay step.
        tau: temperature, in the unit of the score.
        boundary: "kth", the lowest-ranked member of the teacher's top-k of all E(q), as the paper has it; or
            "incumbent", the k-th best of E(q) without t_new, the token that t_new has to displace. They differ only
            where y = +1. Where t_new itself is the k-th, "kth" compares it with itself: a constant, no gradient.
        margin: tau_m of the weight `1 - exp(-|margin| / tau_m)`, our choice for the map that appendix B.4 leaves open;
            it is 0 for a token compared with itself. None for no such weight.
        balance: the bounds of `1 / (2 rho)` for y = +1 and `1 / (2 (1 - rho))` for y = -1, rho the head's keep rate
            (B.5). None for no such weight.
        queries: how many to draw without replacement, the same for all rows and heads (B.6); or the queries
            themselves, `[Q]`; or None for all of them.
        degenerate: "keep" counts a token compared with itself in the mean, "drop" leaves it out of the mean and of the
            keep rates.
        rate: `[H]`, a keep rate to balance with instead of this batch's, for instance a running mean.
        min_future: queries whose t_new is judged by fewer later queries than this are not drawn.
        padding: `[B]` left pads.
        generator: for drawing queries.

    Returns:
        A scalar >= 0. Without any decision it is 0 and `backward` still works.

    Raises:
        ValueError: as `boundary_pairs`, where the shapes differ, or where `tau`, `margin` or `balance` is no scale.

    Example:
        >>> score, target = torch.zeros(1, 1, 9), torch.arange(9.0)[None, None]
        >>> boundary(score, target, Budget(1, 1, 2), 0.0, 1, boundary="incumbent", margin=None)  # keeps all: log 2 / 2
        tensor(0.3466)
    """
    if score.shape != target.shape:
        raise ValueError(f"score and target differ in shape: {tuple(score.shape)} and {tuple(target.shape)}")
    if tau <= 0 or (margin is not None and margin <= 0):
        raise ValueError(f"tau and margin must be above 0, got {tau} and {margin}")
    if balance is not None and not 0 <= balance[0] <= balance[1]:
        raise ValueError(f"balance must be two bounds, the lower first, got {balance}")
    if degenerate not in ("keep", "drop"):
        raise ValueError(f'degenerate must be "keep" or "drop", got {degenerate!r}')
    pairs = boundary_pairs(target, budget, log_gamma, step, boundary, queries, min_future, padding, generator)
    counts = pairs.valid if degenerate == "keep" else pairs.valid & (pairs.t_new != pairs.t_bnd)
    priority = static_priority(score, log_gamma, step, padding)
    difference = priority.gather(-1, pairs.t_new) - priority.gather(-1, pairs.t_bnd)
    loss = -logsigmoid(pairs.y * difference.masked_fill(~counts, 0.0) / tau)
    weight = counts.to(loss.dtype)
    if margin is not None:
        weight = weight * -torch.expm1(-pairs.margin / margin)
    if balance is not None:
        rate = keep_rate(pairs.y, counts, loss.dtype) if rate is None else rate.to(loss.dtype)
        weight = weight * _balancing(pairs.y, rate, balance)
    return (weight * loss).sum() / counts.sum().clamp(min=1)


@torch.no_grad()
def boundary_pairs(
    target: Tensor,
    budget: Budget,
    log_gamma: float | Tensor,
    step: int,
    boundary: str = "kth",
    queries: int | Tensor | None = None,
    min_future: int = 1,
    padding: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> BoundaryPairs:
    """The teacher's decisions: for each query whether it keeps the token that leaves the window, and its rival.

    Args: as `boundary`.

    Raises:
        ValueError: where `boundary` is unknown, a query lies outside the sequence, a sample size is below 1, there is
            no token, or as `lifetimes.running_topk`.

    Example:
        >>> pairs = boundary_pairs(torch.tensor([[[3.0, 1.0, 2.0, 0.0]]]), Budget(0, 1, 1), 0.0, 1, "incumbent")
        >>> pairs.t_new.tolist(), pairs.t_bnd.tolist(), pairs.y.tolist()
        ([[[1, 2]]], [[[0, 0]]], [[[-1, -1]]])
    """
    if boundary not in ("kth", "incumbent"):
        raise ValueError(f'boundary must be "kth" or "incumbent", got {boundary!r}')
    priority = static_priority(target, log_gamma, step, padding)
    batch, heads, length = priority.shape
    if length == 0:
        raise ValueError(f"a sequence needs at least one token, got a target of shape {tuple(target.shape)}")
    padding = check_padding(padding, batch, length, priority.device)
    first = torch.zeros(batch, 1, 1, dtype=torch.long, device=priority.device) + budget.rest  # [B, 1, 1]
    if padding is not None:
        first = first + padding[:, None, None]
    incumbent, kept = _cutoff(priority, budget, padding)
    query = _chosen_queries(queries, int(first.min()) if batch else length, length, min_future, generator)
    query = query.to(priority.device)
    valid = (query >= first).expand(batch, heads, -1)
    t_new = (query - budget.window).clamp(min=0).expand(batch, heads, -1)
    t_bnd = incumbent[..., query + (boundary == "kth")]  # the k-th of E(q) is who the next newcomer has to displace
    y = kept[..., query].to(torch.int8) * 2 - 1
    new, bnd = priority.gather(-1, t_new), priority.gather(-1, t_bnd)
    margin = torch.where(valid & (new != bnd), (new - bnd).abs(), 0.0)  # infinite priorities have margin 0 when equal
    return BoundaryPairs(t_new, t_bnd, y, valid, margin)


def _cutoff(priority: Tensor, budget: Budget, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """The token at the cutoff before each query's newcomer, `[B, H, S + 1]`, and whether the newcomer stays.

    At entry q stands the k-th best of E(q) without `q - w`; entry S is the k-th best of E(S - 1). It is the next token
    that a kept newcomer will displace: the one evicted at the first query from q on that keeps its newcomer, or the
    lowest-ranked survivor if there is none. Entries before a row's first decision mean nothing.
    """
    length = priority.shape[-1]
    column = torch.arange(length, device=priority.device)
    evicted_at = running_topk(priority, budget, padding).long()
    gone = torch.zeros(*priority.shape[:-1], length + 1, dtype=torch.long, device=priority.device)
    gone.scatter_(-1, evicted_at, column.expand_as(evicted_at))  # [B, H, S + 1]: the token evicted at each query

    starts = budget.sinks if padding is None else (budget.sinks + padding)[:, None, None]
    survives = (evicted_at == length) & (column >= starts) & (column < length - budget.window)
    lowest = priority.masked_fill(~survives, torch.inf).amin(-1, keepdim=True)
    gone[..., length:] = (survives & (priority <= lowest)).int().argmax(-1, keepdim=True)  # of equal ones the oldest

    kept = gone[..., :length] != column - budget.window
    next_kept = torch.where(kept, column, length).flip(-1).cummin(-1).values.flip(-1)
    return torch.cat([gone.gather(-1, next_kept), gone[..., length:]], -1), kept


def _chosen_queries(
    queries: int | Tensor | None, first: int, length: int, min_future: int, generator: torch.Generator | None
) -> Tensor:
    """The columns of the queries to learn from, `[Q]`."""
    if isinstance(queries, Tensor):
        outside = queries.dim() != 1 or queries.is_floating_point() or queries.dtype == torch.bool
        if outside or (len(queries) and not 0 <= int(queries.min()) <= int(queries.max()) < length):
            raise ValueError(f"queries must be integers in [0, {length}), one dimension, got {queries}")
        return queries.long()
    pool = torch.arange(first, max(first, length - max(min_future, 1) + 1))  # query q is followed by S - q, itself one
    if queries is None:
        return pool
    if isinstance(queries, bool) or queries < 1:
        raise ValueError(f"queries must be at least 1, got {queries}")
    device = "cpu" if generator is None else generator.device
    return pool[torch.randperm(len(pool), generator=generator, device=device)[:queries].cpu()]


def keep_rate(y: Tensor, valid: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The share of decisions that keep the newcomer, per head: int `[B, H, Q]`, bool `[B, H, Q]` -> `dtype [H]`.

    A rate near 1 with a learned decay is the collapse that the module's first lines warn of. 0 without decisions.
    """
    kept = ((y > 0) & valid).sum((0, 2), dtype=dtype)
    return kept / valid.sum((0, 2)).clamp(min=1)


def _balancing(y: Tensor, rate: Tensor, bounds: tuple[float, float]) -> Tensor:
    """KVpop, appendix B.5: without the bounds each class of a head has half of the weight."""
    rate = rate.clamp(RATE_BOUND, 1 - RATE_BOUND)[:, None]  # [H, 1]
    return torch.where(y > 0, 0.5 / rate, 0.5 / (1 - rate)).clamp(*bounds)


# ---------------------------------------------------------------------------------------------------------------------
# Regression


def regression(
    score: Tensor,
    target: Tensor,
    budget: Budget,
    mean: Tensor | None = None,
    std: Tensor | None = None,
    beta: float = 1.0,
    padding: Tensor | None = None,
) -> Tensor:
    """Smooth L1 of the score against the target in standard deviations of its head, over tokens that ever compete.

    Not in the paper: the plain alternative to the boundary loss on a frozen backbone. The score it teaches has
    mean 0 and standard deviation 1 per head, the unit in which a decay is calibrated.

    Args:
        score: `[B, H, S]`.
        target: `[B, H, S]`, log of the future attention. Only tokens `s <= t <= S - 1 - w` of a row are read.
        budget: of an entry policy.
        mean, std: `[H]`, of the whole training set (`target_statistics`); None for those of this batch.
        beta: below this error the loss is quadratic.
        padding: `[B]` left pads.

    Returns:
        A scalar >= 0; 0 where no token ever competes, and `backward` still works.

    Raises:
        ValueError: where the shapes differ or only one of `mean` and `std` is given.
    """
    if score.shape != target.shape:
        raise ValueError(f"score and target differ in shape: {tuple(score.shape)} and {tuple(target.shape)}")
    if (mean is None) != (std is None):
        raise ValueError("give mean and std, or neither")
    if mean is None:
        mean, std = target_statistics(target, budget, padding)
    competes = _ever_competes(target, budget, padding)
    wide = torch.promote_types(score.dtype, torch.float32)
    label = (target.detach().to(wide) - mean[:, None]) / std[:, None]
    error = smooth_l1_loss(
        score.to(wide).masked_fill(~competes, 0.0), label.masked_fill(~competes, 0.0), beta=beta, reduction="sum"
    )
    return error / competes.expand_as(score).sum().clamp(min=1)


@torch.no_grad()
def target_statistics(target: Tensor, budget: Budget, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and population standard deviation, each `[H]`, of the targets `[B, H, S]` of all tokens that ever compete.

    A head whose target is constant has standard deviation 1, one without any such token also mean 0.
    """
    target = target.to(torch.promote_types(target.dtype, torch.float32))
    competes = _ever_competes(target, budget, padding)
    count = competes.expand_as(target).sum((0, 2)).clamp(min=1)
    mean = target.masked_fill(~competes, 0.0).sum((0, 2)) / count
    spread = (target - mean[:, None]).masked_fill(~competes, 0.0)
    std = (spread.square().sum((0, 2)) / count).sqrt()
    return mean, torch.where(std > 0, std, 1.0)


def _ever_competes(target: Tensor, budget: Budget, padding: Tensor | None) -> Tensor:
    """bool `[B or 1, 1, S]`: tokens that are no sink and leave the window within the sequence."""
    batch, _, length = target.shape
    padding = check_padding(padding, batch, length, target.device)
    column = torch.arange(length, device=target.device)[None, None]
    starts = budget.sinks if padding is None else (budget.sinks + padding)[:, None, None]
    return (column >= starts) & (column < length - budget.window)

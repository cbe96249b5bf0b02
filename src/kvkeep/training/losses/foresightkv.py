"""ForesightKV (arXiv 2602.03203): a pairwise ranking loss, then reinforcement of sampled evictions.

Supervised: of two candidates the one with less future attention (`alpha`, from golden eviction) should have the lower
keep score. Reinforcement: evictions are drawn without replacement, a rollout is rewarded for the loss spikes that it
avoids where the model was sure, and GRPO moves the scorer. The released code takes the draws for independent ones; here
a draw has its exact probability under the sampler (Plackett-Luce).

A keep score is "higher stays". An eviction logit is its negative: `evict_logits = -keep`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import relu

from kvkeep.evaluation.statistics import low_entropy
from kvkeep.sparse_attention import HALVES
from kvkeep.training.losses.pair_counts import argsort, count_all, count_cross

RATIO_BOUND = 10.0  # of log ratios, as in the released code: far outside any clip, so that nothing overflows


def ranking(
    keep: Tensor,
    alpha: Tensor,
    margin: float = 0.01,
    pairs: str | int = "all",
    *,
    count: int | None = None,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> Tensor:
    """Pairwise hinge: mean of `relu(margin - (keep[j] - keep[i]))` over pairs with `alpha[i] < alpha[j]`.

    The mean over the pairs of a row, then over the rows that have a pair. The paper writes a sum over pairs, its code
    takes these means. Computed from counts of violated pairs, not from pairs: the hinge is linear in the scores as long
    as the same pairs violate the margin, and a pair exactly at the margin does not.

    Args:
        keep: `[..., N]`, one row per eviction and KV head, the candidates in the order of their positions.
        alpha: `[..., N]`, future attention of the same candidates.
        margin: by how much the higher candidate shall win, in the unit of the score.
        pairs: "all", O(N log N) a row; "cross", only (evicted, kept) pairs, those that decide the action, O(N log N);
            or a number, that many pairs a row drawn uniformly from all of them, with replacement.
        count: for "cross", how many are evicted: those with the lowest alpha, of equal ones the older.
        generator: for drawing pairs.
        backend: of "all": "numba" on the CPU; "torch", O(N^2) in tiles on any device; "auto".

    Returns:
        A scalar >= 0; 0 with a zero gradient where no row has a pair.

    Raises:
        ValueError: where shapes differ, alpha has a NaN, an option is unknown, or `count` is missing, out of place or
            not in [1, N].

    Example:
        >>> keep, alpha = torch.tensor([0.30, 0.305, 0.10, 0.50]), torch.tensor([0.4, 0.2, 0.2, 0.7])
        >>> ranking(keep, alpha)  # one of five pairs falls short, by 0.015
        tensor(0.0030)
    """
    if keep.shape != alpha.shape or keep.dim() == 0 or keep.shape[-1] == 0:
        shapes = f"{tuple(keep.shape)} and {tuple(alpha.shape)}"
        raise ValueError(f"keep and alpha must have one shape [..., N], N >= 1, got {shapes}")
    if alpha.isnan().any():
        raise ValueError(f"{int(alpha.isnan().sum())} alphas are NaN")
    if (count is not None) != (pairs == "cross"):
        raise ValueError(f'pairs="cross" needs count, other pairs take none: got pairs={pairs!r}, count={count}')
    keep = keep.to(torch.promote_types(keep.dtype, torch.float32)).reshape(-1, keep.shape[-1])
    alpha = alpha.detach().to(torch.promote_types(alpha.dtype, torch.float32)).reshape(keep.shape)
    if pairs == "all":
        return _hinge_from_counts(keep, margin, *count_all(keep.detach(), margin, alpha, backend))
    if pairs == "cross":
        if not 1 <= count <= keep.shape[-1]:
            raise ValueError(f"count must lie between 1 and the {keep.shape[-1]} candidates, got {count}")
        return _hinge_from_counts(keep, margin, *count_cross(keep.detach(), margin, alpha, count))
    if isinstance(pairs, int) and not isinstance(pairs, bool) and pairs >= 1:
        return _sampled_hinge(keep, margin, alpha, pairs, generator)
    raise ValueError(f'pairs must be "all", "cross" or a number from 1 on, got {pairs!r}')


def _hinge_from_counts(keep: Tensor, margin: float, lower: Tensor, higher: Tensor, total: Tensor) -> Tensor:
    """The loss from the counts of `pair_counts`, which are constants: `[R, N]`, `[R, N]` and `[R]`."""
    centred = keep - keep.detach().mean(-1, keepdim=True)  # no difference changes, but less cancels
    hinge = margin * lower.sum(-1).to(keep.dtype) + ((lower - higher) * centred).sum(-1)
    return (hinge / total.clamp(min=1)).sum() / (total > 0).sum().clamp(min=1)


def _sampled_hinge(
    keep: Tensor, margin: float, alpha: Tensor, number: int, generator: torch.Generator | None
) -> Tensor:
    """`number` pairs a row: pair p of the row is the p-th in the order of its higher, then its lower candidate."""
    by_alpha = argsort(alpha)
    ranked = alpha.gather(-1, by_alpha)
    below = torch.searchsorted(ranked, ranked)  # how many have a strictly lower alpha
    last = below.cumsum(-1)  # pairs whose higher candidate is at most here
    total = last[:, -1:]
    device = keep.device if generator is None else generator.device
    uniform = torch.rand(len(keep), number, dtype=torch.float64, device=device, generator=generator)
    drawn = (uniform.to(keep.device) * total).long().minimum(total - 1).clamp(min=0)
    over = torch.searchsorted(last, drawn, right=True).clamp(max=keep.shape[-1] - 1)
    under = drawn - (last - below).gather(-1, over)
    gap = keep.gather(-1, by_alpha.gather(-1, over)) - keep.gather(-1, by_alpha.gather(-1, under))
    some = total[:, 0] > 0
    return relu(margin - gap).mean(-1).masked_fill(~some, 0.0).sum() / some.sum().clamp(min=1)


# ---------------------------------------------------------------------------------------------------------------------
# Drawing evictions, and their probability


class Draw(NamedTuple):
    """An action, to be stored with its pool: probabilities and ratios exist only over the pool it was drawn from."""

    order: Tensor  # int64 [..., L], the evicted candidates in the order they were drawn
    pool: Tensor  # int64 [..., P], the candidates they were drawn from


@torch.no_grad()
def gumbel_top_k(
    evict_logits: Tensor,
    count: int,
    pool: int | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
) -> Draw:
    """Draws `count` candidates without replacement, weighted by a softmax over the `pool` highest eviction logits.

    The largest of `logits + Gumbel noise`, in log space: a draw from softmax weights would return items whose weight
    has underflowed to zero before others that are merely unlikely. Of equal logits the older enters the pool.

    Args:
        evict_logits: `[..., N]`, higher goes.
        count: how many to evict.
        pool: None for `2 * count` (the paper's); at most N are taken.
        generator: one, read row after row, so that on the CPU a batch may be split in any way; or one for each entry of
            the first dimension, so that several layers and steps may follow each other too.

    Raises:
        ValueError: where there are fewer than `count` candidates or places in the pool, a logit is NaN, or the
            generators are not one per row.
    """
    candidates = evict_logits.shape[-1]
    size = min(2 * count if pool is None else pool, candidates)
    if not 1 <= count <= size:
        raise ValueError(f"cannot draw {count} of a pool of {size} among {candidates} candidates")
    if evict_logits.isnan().any():
        raise ValueError(f"{int(evict_logits.isnan().sum())} eviction logits are NaN")
    logits, members = evict_logits.sort(dim=-1, descending=True, stable=True)
    logits, members = logits[..., :size], members[..., :size]
    chosen = (logits + _gumbel(logits, generator)).topk(count, -1).indices
    return Draw(members.gather(-1, chosen), members)


def _gumbel(like: Tensor, generator: torch.Generator | Sequence[torch.Generator] | None) -> Tensor:
    """Float64 noise of the shape of `like`, uniform numbers being the only ones drawn one by one on the CPU."""
    if isinstance(generator, Sequence):
        if len(generator) != len(like):
            raise ValueError(f"one generator per row: got {len(generator)} for {len(like)} rows")
        return torch.stack([_gumbel(row, own) for row, own in zip(like, generator, strict=True)])
    device = like.device if generator is None else generator.device
    uniform = torch.rand(like.shape, dtype=torch.float64, device=device, generator=generator)
    return -(-uniform.clamp(2.0**-54, 1 - 2.0**-53).log()).log().to(like.device)


def plackett_luce(evict_logits: Tensor, order: Tensor, pool: Tensor | None = None, per_draw: bool = False) -> Tensor:
    """Log-probability of an ordered draw without replacement: `sum_k e[order_k] - logsumexp(e not yet drawn)`.

    Args:
        evict_logits: `[..., N]`.
        order: `[..., L]`, indices of the drawn items, none twice.
        pool: `[..., P]`, indices of the items that could be drawn; None for all N. An item outside has probability 0.
        per_draw: return the L terms instead of their sum.

    Returns:
        `[...]`, or `[..., L]` with `per_draw`. Divided by L the sum is a log-probability per draw, which keeps a
        clipped ratio meaningful where L is large.

    Example:
        >>> plackett_luce(torch.tensor([4.0, 3.0, 2.0, 1.0]).log(), torch.tensor([0, 2])).exp()  # 4/10 * 2/6
        tensor(0.1333)
    """
    logits = _over_pool(evict_logits, pool)
    drawn = logits.gather(-1, order)
    log_prob = (drawn - _log_remaining(logits, order)).masked_fill(drawn <= torch.finfo(logits.dtype).min, -torch.inf)
    return log_prob if per_draw else log_prob.sum(-1)


def plackett_luce_kl(new: Tensor, reference: Tensor, order: Tensor, pool: Tensor | None = None) -> Tensor:
    """At each draw of a recorded order, the exact `KL(new || reference)` over the items not yet drawn.

    Summed over draws it is an unbiased estimate of the KL of the two distributions over orders, never negative, with
    less variance than one from the drawn items alone (Rao-Blackwell).

    Args:
        new, reference: eviction logits `[..., N]`, finite over the pool, or -inf in both where nothing may be drawn.
        order: `[..., L]`; pool: `[..., P]` or None, as in `plackett_luce`.

    Returns:
        `[..., L]`, up to rounding >= 0; a draw with one item left gives 0.
    """
    new, reference = (_centred(_over_pool(logits, pool)) for logits in (new, reference))
    gap = new - reference
    shift = gap.detach().amin(-1, keepdim=True) - 1  # the mean of (gap - shift) >= 1 has a logarithm
    log_new, log_reference = _log_remaining(new, order), _log_remaining(reference, order)
    mean_gap = (_log_remaining(new + (gap - shift).log(), order) - log_new).exp() + shift
    return mean_gap - log_new + log_reference


def independent_log_prob(evict_logits: Tensor, order: Tensor) -> Tensor:
    """`log softmax(evict_logits)[order]`, `[..., N]` and `[..., L]` -> `[..., L]`: the released code's stand-in.

    Not the probability of what was drawn: it knows neither the pool nor that a drawn item is gone. For parity.
    """
    wide = torch.promote_types(evict_logits.dtype, torch.float32)
    return evict_logits.to(wide).log_softmax(-1).gather(-1, order)


def _over_pool(logits: Tensor, pool: Tensor | None) -> Tensor:
    """The logits with the lowest finite number wherever nothing can be drawn: -inf would turn gradients into NaN."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    floor = torch.finfo(logits.dtype).min
    if pool is None:
        return logits.clamp(min=floor)
    return torch.full_like(logits, floor).scatter(-1, pool, logits.gather(-1, pool).clamp(min=floor))


def _centred(logits: Tensor) -> Tensor:
    """Less the largest: no probability changes, and little cancels where all logits are large."""
    return (logits - logits.detach().amax(-1, keepdim=True)).clamp(min=torch.finfo(logits.dtype).min)


def _log_remaining(logits: Tensor, order: Tensor) -> Tensor:
    """Before each draw, the logsumexp over what is not yet drawn: never-drawn items first, then the order backwards."""
    drawn = logits.gather(-1, order)
    never = logits.scatter(-1, order, torch.finfo(logits.dtype).min).logsumexp(-1, keepdim=True)
    return torch.cat([never, drawn.flip(-1)], -1).logcumsumexp(-1)[..., 1:].flip(-1)


# ---------------------------------------------------------------------------------------------------------------------
# Reward and objective


def spike_reward(
    full: Tensor,
    evicted: Tensor,
    entropy: Tensor,
    start: int,
    eta: float = 1.5,
    low: float = 0.8,
    reduction: str = "mean_low",
    variant: str = "spike",
    by_entry: bool = False,
) -> Tensor | None:
    """Minus the squared increases of the token loss above `eta`, over tokens of which the full model was sure.

    Args:
        full: `[T - 1]` or as `evicted`, token losses of the full cache in nats; entry p predicts token p + 1.
        evicted: `[..., T - 1]`, of rollouts of the same trace.
        entropy: shaped like `full`, of the full cache's predictions, in nats.
        start: the first entry that an eviction touches, `slots` of the budget. Earlier ones are left out, also where
            the split into low and high entropy is made.
        eta: increases up to this, and improvements, cost nothing.
        low: the share of entries that counts as low entropy; `floor((1 - low) n)` are high.
        reduction: "mean_low" over the entries that the variant reads, those without a spike included; or "sum" (the
            paper's). For one trace they differ by a factor, which group-normalised advantages do not see.
        variant: "spike"; or a reward of the paper's ablation: "low_large", the same increases not squared (our
            reading); "low", "high" and "all", the plain increase of the loss over entries of that kind.
        by_entry: the part that every entry from `start` on has, `[..., T - 1 - start]`, instead of their sum.

    Returns:
        `[...]`, one reward <= 0 a rollout ("low", "high" and "all" may be above); None where there is no entry to read:
        such a trace has no reward and is skipped.

    Raises:
        ValueError: where shapes do not fit, a loss is not finite or an option is unknown.
    """
    if reduction not in ("mean_low", "sum") or variant not in ("spike", "low_large", "low", "high", "all"):
        raise ValueError(f"unknown reduction {reduction!r} or variant {variant!r}")
    if full.shape != entropy.shape or full.shape not in (evicted.shape, evicted.shape[-1:]):
        shapes = [tuple(column.shape) for column in (full, evicted, entropy)]
        raise ValueError(f"full, evicted and entropy must have one length, got shapes {shapes}")
    if not (full.isfinite().all() and evicted.isfinite().all() and entropy.isfinite().all()):
        raise ValueError("a loss or an entropy is not finite")
    if start < 0:
        raise ValueError(f"start must be at least 0, got {start}")
    if not 0 <= eta < math.inf:
        raise ValueError(f"eta must be a number of nats, at least 0, got {eta}")
    if start >= full.shape[-1]:
        return None
    increase = (evicted.float() - full.float() if evicted.dtype in HALVES else evicted - full)[..., start:]
    tail = entropy[..., start:].detach().cpu().double()
    rows = [torch.from_numpy(low_entropy(row.numpy(), low)) for row in tail.reshape(-1, tail.shape[-1])]
    is_low = torch.stack(rows).view(tail.shape).to(increase.device)
    reads = {"high": ~is_low, "all": torch.ones_like(is_low)}.get(variant, is_low).expand(increase.shape)
    number = reads.sum(-1)
    if not number.all():
        return None
    if variant in ("spike", "low_large"):
        reads = reads & (increase > eta)
    cost = (increase.square() if variant == "spike" else increase).masked_fill(~reads, 0.0)
    parts = -cost if reduction == "sum" else -cost / number[..., None]
    return parts if by_entry else parts.sum(-1)


def rewards_to_go(parts: Tensor, first: Sequence[int]) -> Tensor:
    """What is still to come of a reward when a decision is made: the parts `[..., n]` from entry `first[m]` on, summed.

    Beyond the paper, whose every decision is credited with all of its trajectory's reward: a decision has not caused
    what came before it, and the gradient without that is the same one with less noise.

    Returns:
        `[..., M]`.

    Raises:
        ValueError: for an entry that is not among the n.
    """
    if any(not 0 <= entry < parts.shape[-1] for entry in first):
        raise ValueError(f"entries must be in 0 .. {parts.shape[-1] - 1}, got {list(first)}")
    later = parts.flip(-1).cumsum(-1).flip(-1)
    return later[..., list(first)]


def advantages(rewards: Tensor, to_go: Tensor | None = None) -> Tensor:
    """Rewards `[..., G]` of rollouts of one trace, minus their mean, over their population standard deviation + 1e-8.

    Exact zeros where all G are equal: such a group teaches nothing and is better skipped.

    Args:
        rewards: of whole rollouts.
        to_go: `[..., G, M]`, see :func:`rewards_to_go`; it is then these, minus their means, over the deviation of the
            rewards, so that a decision with little left to gain counts for little, and no further from 0 than the
            advantage of a whole reward can be, the root of G - 1.

    Raises:
        ValueError: where G < 2, which would make every advantage 0, or a reward is not finite.
    """
    if rewards.dim() == 0 or rewards.shape[-1] < 2:
        raise ValueError(f"a group needs at least 2 rollouts, got rewards of shape {tuple(rewards.shape)}")
    if not rewards.isfinite().all():
        raise ValueError("a reward is not finite")
    spread = rewards.std(-1, correction=0, keepdim=True)
    equal = (rewards == rewards[..., :1]).all(-1, keepdim=True)
    if to_go is None:
        return ((rewards - rewards.mean(-1, keepdim=True)) / (spread + 1e-8)).masked_fill(equal, 0.0)
    furthest = (rewards.shape[-1] - 1) ** 0.5
    later = (to_go - to_go.mean(-2, keepdim=True)) / (spread[..., None] + 1e-8)
    return later.clamp(-furthest, furthest).masked_fill(equal[..., None], 0.0)


def grpo(
    new: Tensor,
    old: Tensor,
    reference: Tensor | None,
    advantage: Tensor,
    clip: float = 0.2,
    beta: float = 0.01,
    kl: Tensor | None = None,
) -> Tensor:
    """`-mean(min(r A, clamp(r, 1 - clip, 1 + clip) A)) + beta mean(KL)`, r = exp(new - old).

    Args:
        new: log-probabilities under the scorer that learns, any shape: a ratio per decision (`plackett_luce`, divided
            by L or not) or per draw.
        old: the same under the scorer that drew the actions. Where it is the learner itself, pass `new.detach()`: r is
            then exactly 1 and the gradient is that of REINFORCE.
        reference: the same under the scorer to stay near; not read, and may be None, where `kl` is given.
        advantage: broadcasts against `new`.
        clip: how far r may leave 1 with profit.
        beta: weight of the KL.
        kl: an exact KL (`plackett_luce_kl`) to use; None for the k3 estimate `exp(d) - d - 1`, d = reference - new.

    Returns:
        A scalar.
    """
    ratio = (new - old.detach()).clamp(-RATIO_BOUND, RATIO_BOUND).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    if kl is None:
        distance = reference.detach() - new
        kl = distance.exp() - distance - 1
    return beta * kl.mean() - gain.mean()

"""Attention as arrivals: the likelihood of when, not only whether, a token is attended to after its window.

Not in the papers. KVpop ranks tokens by the mean of all their future attention, and a decay has to be found apart from
it, since labels that share a decay agree with anything. Here both are parts of one model of the attention itself: per
KV head, a token of age a (queries since it left the window) is attended to with intensity

    base * exp(score - decay * a / step),

so that ``score + decay * t / step`` is at every query the ranking by expected attention from now on, which is exactly
the static priority of :func:`kvkeep.lifetimes.static_priority`. The decay is fitted to real attention and cannot
collapse, tokens at the end of a text are not favoured for having been seen for a short time only, and the
score is the log of a mean, not the mean of a log, so that what is seldom needed, but then badly, counts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

AGE_WIDTH, AGE_HORIZON = 32, 1024  # tokens: fine ranges where evictions happen, doubling ones beyond
LEAST_DECAY = 1e-4  # per token, below which the integral is taken as if it were this


def age_edges(length: int, width: int = AGE_WIDTH, horizon: int = AGE_HORIZON) -> list[int]:
    """Edges of the age ranges for sequences of ``length`` tokens: every ``width`` to the horizon, then doubling.

    >>> age_edges(100)
    [0, 32, 64, 96, 128]
    >>> age_edges(3000)[-3:]
    [1024, 2048, 4096]
    """
    edges = [0, width]
    while edges[-1] < length:
        edges.append(edges[-1] + width if edges[-1] < horizon else 2 * edges[-1])
    return edges


def age_ranges(length: int, window: int, edges: list[int], device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """First and last age (exclusive) of every range that a sequence holds, per token: two float ``[S, ranges]``.

    A range is cut where the sequence ends; ranges beyond it are empty (first = last).
    """
    bounds = torch.tensor(edges, device=device)
    left = (length - window - torch.arange(length, device=device)).clamp(min=0)[:, None]  # queries after the window
    return torch.minimum(bounds[:-1], left).float(), torch.minimum(bounds[1:], left).float()


def intensity(
    score: Tensor,
    decay: Tensor,
    mass: Tensor,
    first: Tensor,
    last: Tensor,
    base: Tensor,
    step: int = 64,
    dispersion: float = 5.0,
) -> Tensor:
    """Negative binomial deviance of the attention received per range of age: how far from a perfect foresight.

    The negative binomial is a Poisson likelihood whose rate varies: with a small dispersion the heaviest tokens
    do not drown the others, with a large one it is Poisson's.

    Args:
        score: ``[B, H, n]``, log intensity at age 0 over the base.
        decay: ``[H]``, >= 0, what the log intensity loses per ``step`` tokens of age.
        mass: ``[B, H, n, ranges]``, from :func:`kvkeep.attention_mass.attention_by_age`.
        first, last: ``[n, ranges]``, from :func:`age_ranges`.
        base: ``[H]``, mean attention per query and token of the head, > 0.
        step: tokens.
        dispersion: in queries at the base rate.

    Returns:
        A scalar >= 0, the mean over tokens and heads of the sum over ranges: half the deviance, 0 where all that was
        received was expected, and where there are no tokens.

    Raises:
        ValueError: where shapes differ.
    """
    if mass.shape[:-1] != score.shape or mass.shape[-2:] != first.shape or first.shape != last.shape:
        raise ValueError(
            f"mass must be [batch, heads, tokens, ranges] like score {tuple(score.shape)} and ages "
            f"{tuple(first.shape)}, got {tuple(mass.shape)}"
        )
    wide = torch.promote_types(score.dtype, torch.float32)
    rate = (decay.to(wide) / step).clamp(min=LEAST_DECAY)[:, None, None]  # [H, 1, 1], per token
    held = last > first
    width = torch.where(held, last - first, 1.0)
    exposure = (-torch.expm1(-rate * width) / rate).log() - rate * first  # log of the integral of exp(-rate * age)
    expected = score.to(wide)[..., None] + exposure  # logs throughout: gates of any size stay finite
    seen = mass.detach().to(wide) / base.to(wide)[:, None, None]
    spread = torch.full_like(expected, math.log(dispersion))
    loss = (seen + dispersion) * (torch.logaddexp(expected, spread) - (seen + dispersion).log())
    loss = loss - seen * expected + torch.xlogy(seen, seen)
    return loss.masked_fill(~held, 0.0).sum() / max(score.numel(), 1)

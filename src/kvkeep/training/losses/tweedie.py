"""A deviance with a log link: scores that foretell the mean of a heavy-tailed amount, not the mean of its log.

What a policy loses by dropping a token is the attention that the token would have received. Ranked by an expected log,
a token that is seldom needed, but then badly, counts for little; ranked by the log of an expectation, for what it
costs. The Tweedie family runs from Poisson (power 1: an error counts in proportion to the amount) to gamma (power 2:
relative errors count).
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RANGE = 15.0  # of the foretold log amount, relative to the mean: far outside what is learned


def tweedie(log_mean: Tensor, amount: Tensor, power: float = 1.5) -> Tensor:
    """Half the Tweedie deviance up to what does not depend on the prediction, mean over all entries.

    ``mu^(2-p) / (2-p) - y mu^(1-p) / (1-p)`` with mu = exp(log_mean); its limits ``mu - y log mu`` for p = 1 and
    ``y / mu + log mu`` for p = 2. Its minimum over mu is the mean of y, whatever p is.

    Args:
        log_mean: predictions, any shape.
        amount: y >= 0, of the same shape; best scaled to a mean of 1.
        power: p in [1, 2].

    Returns:
        A scalar.

    Raises:
        ValueError: where shapes differ, an amount is negative, or the power is outside [1, 2].
    """
    if log_mean.shape != amount.shape:
        raise ValueError(f"predictions and amounts must have one shape, not {log_mean.shape} and {amount.shape}")
    if not 1 <= power <= 2:
        raise ValueError(f"the power must be in [1, 2], not {power}")
    if bool((amount < 0).any()):
        raise ValueError("amounts must not be negative")
    log_mean = log_mean.to(torch.promote_types(log_mean.dtype, torch.float32)).clamp(-LOG_RANGE, LOG_RANGE)
    first = log_mean if power == 2 else ((2 - power) * log_mean).exp() / (2 - power)
    second = -log_mean if power == 1 else ((1 - power) * log_mean).exp() / (power - 1)
    return (first + amount * second).mean()

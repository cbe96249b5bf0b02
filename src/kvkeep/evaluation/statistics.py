"""What a table of losses says, and how sure it is: pooled ratios, gaps closed, bootstrap over documents.

Knows arrays only: one number per document (a sum of losses, in nats) or one per token. The unit of resampling is the
document, never the token: tokens of one document share its topic, its far context and its luck.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

DRAWS = 2000
CONFIDENCE = 0.95
LOW_SHARE = 0.8


class Interval(NamedTuple):
    """A bootstrapped number with the ends of its interval."""

    value: float
    low: float
    high: float


def pooled_ratio(loss: ArrayLike, full_loss: ArrayLike) -> float:
    """Sum of losses over sum of full-cache losses, over the same tokens of all documents.

    Args:
        loss: [documents] summed token losses under a policy.
        full_loss: [documents] summed token losses with the full cache.

    Returns:
        1 where eviction costs nothing, 1.1 where the loss is 10 % higher.

    Raises:
        ValueError: if the shapes differ, are empty or hold something that is not finite, or the full loss is not
            positive.

    >>> round(pooled_ratio([11.0, 22.0], [10.0, 20.0]), 6)
    1.1
    """
    loss, full_loss = _documents(loss, full_loss)
    return _ratio(loss.sum(), full_loss.sum())


def bootstrap_ratio(
    loss: ArrayLike, full_loss: ArrayLike, draws: int = DRAWS, confidence: float = CONFIDENCE, seed: int = 0
) -> Interval:
    """`pooled_ratio` with a percentile interval over resampled documents.

    The same seed resamples the same documents, so rows of one table share their draws. One document gives an interval
    without width.
    """
    loss, full_loss = _documents(loss, full_loss)
    value = _ratio(loss.sum(), full_loss.sum())
    rows = _resampled(len(loss), draws, seed)
    return Interval(value, *_percentiles(loss[rows].sum(1) / full_loss[rows].sum(1), confidence))


def bootstrap_difference(
    loss: ArrayLike,
    reference: ArrayLike,
    full_loss: ArrayLike,
    draws: int = DRAWS,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Interval:
    """How much higher the `pooled_ratio` of one policy is than that of a reference, paired by document.

    Paired: one draw takes the same documents for both, so what makes a document hard for both cancels. An interval
    that includes 0 shows no difference.

    Args:
        loss: [documents] summed token losses under the policy.
        reference: [documents] the same under the reference.
        full_loss: [documents] the same with the full cache.

    Returns:
        Below 0 where the policy loses less than the reference.

    Raises:
        ValueError: as `pooled_ratio`.

    >>> bootstrap_difference([12.0, 24.0], [10.0, 20.0], [8.0, 16.0])
    Interval(value=0.25, low=0.25, high=0.25)
    """
    loss, reference, full_loss = _documents(loss, reference, full_loss)
    more = loss - reference
    value = _ratio(more.sum(), full_loss.sum())
    rows = _resampled(len(loss), draws, seed)
    return Interval(value, *_percentiles(more[rows].sum(1) / full_loss[rows].sum(1), confidence))


def gap_closed(
    rule: ArrayLike,
    learned: ArrayLike,
    oracle: ArrayLike,
    draws: int = DRAWS,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Interval:
    """How much of the distance from a rule to the oracle a learned policy covers: (rule - learned) / (rule - oracle).

    Losses are pooled over documents; the full-cache loss is in every term and cancels, so the gap in excess loss is the
    gap in loss. Paired: one draw takes the same documents for all three.

    Args:
        rule: [documents] summed token losses under the rule.
        learned: [documents] the same under the learned policy.
        oracle: [documents] the same under the oracle.

    Returns:
        0 where the learned policy is no better than the rule, 1 where it is as good as the oracle. Draws in which the
        oracle is no better than the rule say nothing about the gap and are left out; if that is more than one draw in
        twenty, the ends of the interval are infinite.

    Raises:
        ValueError: if the shapes differ, or the oracle is no better than the rule over all documents.

    >>> gap_closed([4.0, 4.0], [3.0, 3.0], [2.0, 2.0])
    Interval(value=0.5, low=0.5, high=0.5)
    """
    rule, learned, oracle = _documents(rule, learned, oracle)
    room = rule.sum() - oracle.sum()
    if room <= 0:
        raise ValueError(f"no gap to close: the rule loses {rule.sum():.6g} nats and the oracle {oracle.sum():.6g}")
    value = float((rule.sum() - learned.sum()) / room)
    rows = _resampled(len(rule), draws, seed)
    room, gain = (rule - oracle)[rows].sum(1), (rule - learned)[rows].sum(1)
    usable = room > 0
    if usable.mean() < 0.95:
        return Interval(value, -np.inf, np.inf)
    return Interval(value, *_percentiles(gain[usable] / room[usable], confidence))


def low_entropy(entropy: ArrayLike, share: float = LOW_SHARE) -> np.ndarray:
    """Marks the tokens of one document at which the full-cache model is most certain (ForesightKV's split).

    The floor(count * (1 - share)) tokens of the highest entropy are "high", all others "low"; of equal entropies the
    later one is high.

    Args:
        entropy: [tokens] entropy of the full-cache prediction, in nats.
        share: the part that is low.

    Returns:
        bool [tokens].

    >>> low_entropy([0.1, 2.0, 0.3, 0.2, 0.1])
    array([ True, False,  True,  True,  True])
    """
    entropy = np.asarray(entropy, dtype=np.float64)
    if entropy.ndim != 1:
        raise ValueError(f"entropy is one document's, [tokens]; got shape {list(entropy.shape)}")
    if not 0 <= share <= 1:
        raise ValueError(f"share is between 0 and 1, got {share}")
    low = np.ones(len(entropy), dtype=bool)
    high = int(len(entropy) * (1 - share) + 1e-9)  # 10 * (1 - 0.8) is 1.9999999999999996
    low[np.argsort(entropy, kind="stable")[len(entropy) - high :]] = False
    return low


def _documents(*columns: ArrayLike) -> list[np.ndarray]:
    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1 or arrays[0].ndim != 1:
        raise ValueError(f"one number per document in every column, got shapes {[list(a.shape) for a in arrays]}")
    if not len(arrays[0]):
        raise ValueError("no documents")
    if not all(np.isfinite(array).all() for array in arrays):
        raise ValueError("a loss is not finite")
    return arrays


def _ratio(loss: float, full_loss: float) -> float:
    if full_loss <= 0:
        raise ValueError(f"the full-cache loss is {full_loss:.6g}: a ratio to it says nothing")
    return float(loss / full_loss)


def _resampled(documents: int, draws: int, seed: int) -> np.ndarray:
    """[draws, documents] indices, with replacement."""
    return np.random.default_rng(seed).integers(documents, size=(draws, documents))


def _percentiles(values: np.ndarray, confidence: float) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)

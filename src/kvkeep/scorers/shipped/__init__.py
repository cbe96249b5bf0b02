"""Scorers that come with the package: one checkpoint folder per model and method, found by the model they fit."""

from __future__ import annotations

from kvkeep.scorers.base import Scorer, ScorerError
from kvkeep.scorers.checkpoint import SHIPPED, load_scorer


def shipped(method: str, config, fingerprint: str | None = None) -> Scorer | None:
    """The scorer shipped for a model.

    Args:
        method: of the policy.
        config: of the model.
        fingerprint: of its weights, from :func:`kvkeep.scorers.model_fingerprint`; None trusts the shape alone.

    Returns:
        The scorer, or None where none is shipped that fits.
    """
    for folder in sorted(SHIPPED.glob(f"*/{method}")):
        scorer = load_scorer(folder)
        try:
            scorer.require_fits(config, fingerprint)
        except ScorerError:
            continue
        return scorer
    return None

"""Learned parts: scorers that foresee which tokens later queries will attend to, and their one checkpoint format.

Floor 2: knows tensors, budgets and the shape of a model, never a policy, a cache or transformers. One file a method.
"""

from kvkeep.scorers.base import LayerScorer, Scorer, ScorerError
from kvkeep.scorers.checkpoint import load_scorer
from kvkeep.scorers.fingerprint import model_fingerprint
from kvkeep.scorers.layout import LayerShape, Layout
from kvkeep.scorers.methods import METHODS, charge, new

__all__ = [
    "METHODS",
    "LayerScorer",
    "LayerShape",
    "Layout",
    "Scorer",
    "ScorerError",
    "charge",
    "load_scorer",
    "model_fingerprint",
    "new",
]

"""kvkeep keeps what a language model will need: generation with a KV cache of fixed size.

    policy = kvkeep.policies.create("h2o_decayed", 256)
    cache = kvkeep.EvictingCache(model.config, policy)
    model.generate(**inputs, cache=cache)

Importing registers the attention function ``"kvkeep"`` and its mask with transformers.
"""

import importlib

from kvkeep import attention_mass, lifetimes, policies, scorers
from kvkeep.budget import Budget
from kvkeep.runtime import attention as _attention
from kvkeep.runtime.cache import EvictingCache
from kvkeep.runtime.replay import Replay, replay
from kvkeep.scorers import load_scorer

_attention.register()


def __getattr__(name: str):
    """The upper floors by name (``kvkeep.training.losses``), imported when first asked for."""
    if name in ("training", "evaluation", "benchmark"):
        return importlib.import_module(f"kvkeep.{name}")
    raise AttributeError(f"module 'kvkeep' has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [
    "Budget",
    "EvictingCache",
    "Replay",
    "attention_mass",
    "lifetimes",
    "load_scorer",
    "policies",
    "replay",
    "scorers",
]

"""kvkeep keeps what a language model will need: generation with a KV cache of fixed size.

    policy = kvkeep.policies.create("h2o_decayed", 256)
    cache = kvkeep.EvictingCache(model.config, policy)
    model.generate(**inputs, cache=cache)

Importing registers the attention function ``"kvkeep"`` and its mask with transformers.
"""

from kvkeep import attention_mass, lifetimes, policies, scorers
from kvkeep.budget import Budget
from kvkeep.runtime import attention as _attention
from kvkeep.runtime.cache import EvictingCache
from kvkeep.runtime.replay import Replay, replay
from kvkeep.scorers import load_scorer

_attention.register()

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

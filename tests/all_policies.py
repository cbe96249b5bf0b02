"""Every policy with an easy and a hard setting: one table that the invariants are tested over."""

from __future__ import annotations

import kvkeep
from tiny import HANDED

ENTRY = kvkeep.Budget(sinks=2, window=4, topk=10)
TIGHT = kvkeep.Budget(sinks=0, window=1, topk=3)
BLOCKS = kvkeep.Budget(sinks=0, window=5, topk=6, interval=5)
SINKS = kvkeep.Budget(sinks=3, window=2, topk=9, interval=3)
SINGLE = kvkeep.Budget(sinks=0, window=0, topk=12, interval=1)

WITHOUT_QUERIES = [
    ("streaming", ENTRY, {}),
    ("streaming", TIGHT, {}),
    ("random", ENTRY, {"seed": 3}),
    ("random", TIGHT, {}),
]
WITH_QUERIES = [
    ("tova", SINGLE, {}),
    ("tova", SINKS, {"per_head": True}),
    ("h2o", BLOCKS, {}),
    ("h2o", SINGLE, {}),
    ("h2o_decayed", SINKS, {}),
    ("h2o_decayed", SINGLE, {}),
    ("snapkv", BLOCKS, {"observation": 4, "kernel": 3}),
    ("snapkv", SINKS, {"observation": 3, "kernel": 5, "head_reduce": "max_logit", "normalise": "older"}),
    ("rkv", BLOCKS, {"observation": 4}),
    ("rkv", SINKS, {"observation": 6, "mix": 0.6, "threshold": 0.2}),
    ("expected_attention", BLOCKS, {"horizon": 16}),
    ("expected_attention", SINKS, {"use_covariance": False, "epsilon": 0.02}),
]
ONLINE = WITHOUT_QUERIES + WITH_QUERIES * HANDED
ORACLES = [
    ("golden", BLOCKS, {}),
    ("golden", SINKS, {"labels": "own", "lookahead": 1}),
    ("future_mass", ENTRY, {}),
    ("future_mass", TIGHT, {"group": "log_mean", "log_gamma": -0.2, "step": 8}),
]
EVERY = WITHOUT_QUERIES + WITH_QUERIES + ORACLES


def make(case):
    name, budget, options = case
    return kvkeep.policies.create(name, budget, **options)


def label(case):
    name, budget, options = case
    return f"{name}-{budget.slots}" + "".join(f"-{value}" for value in options.values())

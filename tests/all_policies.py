"""Every policy with an easy and a hard setting: one table that the invariants are tested over."""

from __future__ import annotations

import torch

import kvkeep
from kvkeep.scorers.features import FeatureSpec
from tiny import HANDED, tiny_model

ENTRY = kvkeep.Budget(sinks=2, window=4, topk=10)
TIGHT = kvkeep.Budget(sinks=0, window=1, topk=3)
BLOCKS = kvkeep.Budget(sinks=0, window=5, topk=6, interval=5)
SINKS = kvkeep.Budget(sinks=3, window=2, topk=9, interval=3)
SINGLE = kvkeep.Budget(sinks=0, window=0, topk=12, interval=1)

LEARNED = [  # options of a random scorer
    ("kvpop_mlp", ENTRY, {"log_gamma": -0.3, "decay_step": 4}),
    ("kvpop_mlp", TIGHT, {"hidden": 5}),
    ("kvpop", ENTRY, {"features": 4, "log_gamma": -0.2, "decay_step": 8}),
    ("kvpop", TIGHT, {"features": 2, "value_dim": 3, "normaliser": "xlstm", "chunk": 5}),
    ("kvpop", ENTRY, {"features": 4, "delay": False, "chunk": 7}),
]
WITHOUT_QUERIES = [
    ("streaming", ENTRY, {}),
    ("streaming", TIGHT, {}),
    ("random", ENTRY, {"seed": 3}),
    ("random", TIGHT, {}),
    *LEARNED,
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
    ("keydiff", BLOCKS, {}),
    ("keydiff", SINKS, {}),
]
FORESIGHT = [  # options of a random scorer, and of the policy
    ("foresightkv", BLOCKS, {"hidden": 5}),
    ("foresightkv", SINKS, {"features": FeatureSpec(windows=(2, "L"), normalize="log", age=True, keys="pre")}),
    ("foresightkv", BLOCKS, {"features": FeatureSpec.released(), "sums": "ring"}),
    ("foresightkv", SINKS, {"evict": "sample", "seed": 7}),
]
WITH_QUERIES += FORESIGHT
ONLINE = WITHOUT_QUERIES + WITH_QUERIES * HANDED
ORACLES = [
    ("golden", BLOCKS, {}),
    ("golden", SINKS, {"labels": "own", "lookahead": 1}),
    ("future_mass", ENTRY, {}),
    ("future_mass", TIGHT, {"group": "log_mean", "log_gamma": -0.2, "step": 8}),
]
EVERY = WITHOUT_QUERIES + WITH_QUERIES + ORACLES


def make(case, model=None):
    """The policy of a case; a learned one gets a random scorer for ``model`` (None = the default tiny model)."""
    name, budget, options = case
    if not kvkeep.policies.describe(name).learned:
        return kvkeep.policies.create(name, budget, **options)
    config = (tiny_model() if model is None else model).config
    own = {option: value for option, value in options.items() if option in ("evict", "pool", "seed", "sums")}
    made = {option: value for option, value in options.items() if option not in own}
    return kvkeep.policies.create(name, budget, scorer=random_scorer(name, config, budget, **made), **own)


def random_scorer(name, config, budget, log_gamma=0.0, seed=0, **options):
    """A scorer of large random weights and statistics, whose decay differs from head to head."""
    scorer = kvkeep.scorers.new(name, config, budget, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * max(parameter.shape[-2], 4) ** -0.5)
        for layer in scorer.layers.values():
            shape = layer.input_mean.shape
            layer.standardise_inputs(
                torch.randn(shape, generator=generator) * 0.1, torch.rand(shape, generator=generator) + 0.5
            )
            layer.standardise_scores(torch.randn(shape[0], generator=generator), torch.full(shape[:1], 0.7))
            layer.log_gamma.copy_(log_gamma * torch.linspace(0.5, 1.5, shape[0]))
    return scorer


def label(case):
    name, budget, options = case
    told = (value.normalize if isinstance(value, FeatureSpec) else value for value in options.values())
    return f"{name}-{budget.slots}" + "".join(f"-{value}" for value in told)

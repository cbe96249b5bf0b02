"""What the tests of the benchmark measure: small budgets, contenders with random scorers, tokens fed one by one."""

from __future__ import annotations

import torch

from kvkeep.benchmark.caches import (
    FULL,
    States,
    contenders,
    longest,
    untrained,
)
from kvkeep.runtime.cache import cache_keyword
from tiny import HANDED, VOCABULARY

BUDGET, CONTEXT = 48, 90
LEARNED = ["kvpop_mlp", "kvpop"] + ["foresightkv"] * HANDED
NAMES = ["streaming", "random", *LEARNED] + ["h2o", "snapkv", "tova", "expected_attention"] * HANDED
INTERVALS = ["h2o", "snapkv", "foresightkv"] * HANDED


def equipped(model, *names):
    return [one if one.name in FULL else untrained(one, model.config, BUDGET) for one in contenders(names)]


def states_for(model, batch=1):
    return States(model, batch, longest([CONTEXT], BUDGET))


def feed(model, cache, seen, count=1, batch=1):
    """Logits of ``count`` tokens, one at a time."""
    steps = []
    for position in range(seen, seen + count):
        ids = torch.full((batch, 1), 1 + position % (VOCABULARY - 1))
        where = torch.full((batch, 1), position)
        steps.append(model(ids, position_ids=where, use_cache=True, **{cache_keyword(model): cache}).logits)
    return torch.cat(steps, 1)

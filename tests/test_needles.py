"""Spec 9, E2: tokens that no attention has pointed to yet, kept by an oracle and by a scorer that reads keys."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import kvkeep
from kvkeep import Budget, policies
from kvkeep.lifetimes import visible
from kvkeep.policies.base import Geometry
from kvkeep.runtime.interval import IntervalResidency
from kvkeep.scorers.features import FeatureSpec
from kvkeep.training.rank import Rank, Schedule
from kvkeep.training.traces import Trace, Tracing, collected
from test_attention_mass import dense_logits
from test_definitions import watch

VOTE = {"observation": 4, "kernel": 1}  # max-pooling would lend the needle its neighbours' votes
BLIND = {"tova": {}, "h2o": {}, "h2o_decayed": {}, "snapkv": VOTE, "rkv": VOTE, "expected_attention": {}}
NEEDLE = Budget(sinks=0, window=4, topk=8, interval=4)  # blocks of four queries from 16 on
UNSEEN = 1e-6


def needle_trace(needle, late, length=40):
    """Every query looks around evenly but never at the needle; those of one late block look at nothing else."""
    weights = torch.ones(length, length, dtype=torch.float64)
    weights[:, needle] = UNSEEN
    weights[needle, needle] = 1.0  # a token sees itself
    first = NEEDLE.slots + late * NEEDLE.interval
    weights[first : first + NEEDLE.interval] = UNSEEN
    weights[first : first + NEEDLE.interval, needle] = 1.0
    return weights.log()[None, None], torch.eye(length, dtype=torch.float64)[None, None], first


@pytest.mark.parametrize("needle", [1, 5, 9])
@pytest.mark.parametrize("late", [2, 3])
def test_foresight_e2_only_foresight_keeps_the_needle(needle, late):
    query, key, first = needle_trace(needle, late)
    wanted = slice(first, first + NEEDLE.interval)
    mass = dense_logits(query, key, 1.0).softmax(-1)[0, 0, wanted]
    for name, options in BLIND.items():
        lifetimes = watch(policies.create(name, NEEDLE, **options), query, key).lifetimes
        assert int(lifetimes[0, 0, needle]) <= first - NEEDLE.interval, name
        assert float((mass * visible(lifetimes)[0, 0, wanted]).sum(-1).max()) < 1e-3, name
    for options in ({}, {"lookahead": late + 1}, {"labels": "own"}):
        lifetimes = watch(policies.create("golden", NEEDLE, **options), query, key).lifetimes
        assert int(lifetimes[0, 0, needle]) > first + NEEDLE.interval - 1, options
        assert float((mass * visible(lifetimes)[0, 0, wanted]).sum(-1).min()) > 0.999


@pytest.mark.parametrize("needle", [1, 5, 9])
def test_foresight_e2_an_oracle_of_the_next_block_is_as_blind(needle):
    query, key, first = needle_trace(needle, late=3)
    lifetimes = watch(policies.create("golden", NEEDLE, lookahead=1), query, key).lifetimes
    assert int(lifetimes[0, 0, needle]) <= first - NEEDLE.interval


# --- What only the key can tell ---------------------------------------------------------------------------------------


def needles(seed, path, budget, length=96):
    """A layer whose queries look at the first token only, until the last block of them looks for what keys tell.

    Until then no attention says which tokens will be needed; returns (trace, attention of the last query, tensors).
    """
    generator = torch.Generator().manual_seed(seed)
    key, query, value = torch.zeros(1, 1, length, 8), torch.zeros(1, 1, length, 8), torch.randn(1, 1, length, 8)
    level = torch.rand(length, generator=generator)
    key[0, 0, :, 0], key[0, 0, :, 3:] = level, torch.randn(length, 5, generator=generator) * 0.1
    key[0, 0, 0, :3] = torch.tensor([0.0, 8.0, 0.0])
    query[0, 0, :, 1] = 8.0
    query[0, 0, -budget.interval :, 0], query[0, 0, -budget.interval :, 1] = 60.0, 0.0
    geometry, spec = Geometry(0, 1, 1, 8, 1.0), collected(FeatureSpec())
    policy = Tracing(budget, spec)
    residency = IntervalResidency(policy, geometry, key, value)
    residency.memory = policy.foresee(geometry, query, key)
    residency.ingest(query, key, value)
    found = policy.tensors() | {"key.0": key[0], "value.0": value[0]}
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, path)
    return Trace("needles", path, budget, spec), (query, key, value)


def kept_mass(policy, tensors):
    """Of the last query's full attention, the share that falls on tokens held then."""
    query, key, value = tensors
    geometry = Geometry(0, 1, 1, 8, 1.0)
    residency = IntervalResidency(policy, geometry, key, value)
    if policy.oracle:
        residency.memory = policy.foresee(geometry, query, key)
    residency.record_lifetimes(key.shape[2])
    residency.ingest(query, key, value)
    attention = (query[0, 0, -1] @ key[0, 0].T).softmax(-1)
    return float(attention[residency.lifetimes[0, 0] == key.shape[2]].sum())


class OneLayer:
    num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, hidden_size = 1, 1, 1, 8, 8


def test_e2_keys_tell_what_attention_cannot(tmp_path):
    """Spec 9, E2."""
    budget = kvkeep.Budget(sinks=0, window=8, topk=16, interval=8)
    made = [needles(seed, tmp_path / f"{seed}.safetensors", budget) for seed in range(24)]
    train, held_out = made[:16], made[16:]
    found, scorers = {}, {}
    for name, spec in {
        "keys and values": FeatureSpec(windows=(), cumulative=False, decay=None),
        "attention": FeatureSpec(kv=False),
    }.items():
        scorer = kvkeep.scorers.new("foresightkv", OneLayer, budget, hidden=16, features=spec)
        schedule = Schedule(loss="ranking", steps=300, batch=8, evictions=None, lr=1e-2, weight_decay=0.0)
        fit = Rank(scorer, [t for t, _ in train], [t for t, _ in held_out], schedule, tmp_path / name.replace(" ", "-"))
        found[name] = fit.run()["overlap"].value
        scorers[name] = scorer
    assert found["keys and values"] >= 0.9
    assert found["attention"] < 0.7

    def mass(name, **options):
        policy = kvkeep.policies.create(name, budget, **options)
        return sum(kept_mass(policy, tensors) for _, tensors in held_out) / len(held_out)

    assert mass("golden") > 0.995
    assert mass("foresightkv", scorer=scorers["keys and values"]) > 0.95
    for rule in ("h2o", "snapkv"):
        assert mass(rule) < 0.7
    assert mass("foresightkv", scorer=scorers["attention"]) < 0.8

"""Schedules and documents that cannot be reinforced: one sentence, nothing written."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

from kvkeep.training.reinforce import Schedule
from test_reinforce import BUDGET, reinforce
from test_training import Text
from tiny import random_ids, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"group": 1}, "a group of 1 has nothing to be compared with, so every advantage is 0: group is 2 or more"),
        ({"rollout": "both"}, "rollout is one of trace, generate, not 'both'"),
        ({"ratio": "token"}, "ratio is one of decision_mean, decision, draw, not 'token'"),
        ({"logprob": "exact"}, "logprob is one of plackett_luce, independent"),
        ({"logprob": "independent"}, 'their kl is "k3", not "exact"'),
        ({"variant": "none"}, "variant is one of spike, low_large, low, high, all"),
        ({"reduction": "mean"}, "reduction is one of mean_low, sum"),
        ({"pool": 1}, "a pool of 1 times what goes leaves no choice"),
        ({"beta_schedule": "cosine"}, 'beta_schedule is "constant" or the step from which beta is 0'),
        ({"epochs": 0}, "epochs must be at least 1, not 0"),
        ({"beta": -0.1}, "beta must be at least 0, not -0.1"),
        ({"temperature": 0.0}, "temperature must be above 0, not 0.0"),
        ({"low": 1.5}, r"low must be in \(0, 1\], not 1.5"),
    ],
)
def test_bad_schedules_are_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence) as refused:
        Schedule(**changes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("documents", "sentence"),
    [
        ([], "there is nothing to train on"),
        ([(Text("brief"), random_ids(BUDGET.slots + 1)[0])], "brief is too short for an eviction to matter"),
    ],
)
def test_what_cannot_be_reinforced_leaves_nothing(model, tmp_path, documents, sentence):
    with pytest.raises(ValueError, match=sentence):
        reinforce(model, tmp_path / "out", documents=documents)
    assert not (tmp_path / "out").exists()


def test_writing_where_a_cache_is_handed_no_queries_is_refused_at_once(model, tmp_path, monkeypatch):
    monkeypatch.setattr("kvkeep.runtime.cache.transformers_version", lambda: Version("5.19.0"))
    with pytest.raises(ValueError, match="needs the queries"):
        reinforce(model, tmp_path / "out", rollout="generate")
    assert not (tmp_path / "out").exists()

"""The scorers that come with the package: whole, small, for the embedded model and no other."""

import pytest

import kvkeep
from kvkeep.runtime import models
from kvkeep.scorers import ScorerError, model_fingerprint
from kvkeep.scorers.checkpoint import SHIPPED
from kvkeep.scorers.shipped import shipped
from tiny import tiny_model

NAMES = [f"{folder.parent.name}/{folder.name}" for folder in sorted(SHIPPED.glob("*/*")) if folder.is_dir()]
METHODS = ("foresightkv", "kvpop", "kvpop_mlp")
AGREEMENT = {"foresightkv": "overlap"}  # with the oracle on held-out text; of the others it is called recall


def test_there_is_one_for_every_method():
    assert {f"smollm2-135m/{method}" for method in METHODS} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_says_how_it_was_made(name):
    scorer = kvkeep.load_scorer(name)
    told = scorer.metadata
    assert scorer.method == name.rpartition("/")[2]
    assert told["command"].startswith(f"kvkeep train {scorer.method} ")
    assert told["recipe"]["preset"] == "best"
    assert told["documents"] >= 90
    held_out = {name: found["value"] for name, found in told["metrics"]["held_out"].items() if isinstance(found, dict)}
    assert held_out[AGREEMENT.get(scorer.method, "recall")] > held_out["chance"] + 0.2
    assert [budget.slots + scorer.state_entries for budget in scorer.budgets] == [128, 256]
    files = {path.name for path in (SHIPPED / name).iterdir()}
    assert files == {"README.md", "config.json", "scorer.safetensors"}, "nothing of the run"


def test_they_are_a_few_megabytes():
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 8e6


def test_nothing_is_shipped_for_another_model():
    config = tiny_model().config
    assert all(shipped(method, config) is None for method in METHODS)
    with pytest.raises(ScorerError, match="does not fit the model"):
        kvkeep.load_scorer(NAMES[0]).require_fits(config)


@pytest.mark.slow
def test_they_fit_the_embedded_model_and_are_found_by_it():
    model, _ = models.load("smollm2-135m")
    for method in METHODS:
        scorer = shipped(method, model.config, model_fingerprint(model))
        assert scorer.fingerprint() == kvkeep.load_scorer(f"smollm2-135m/{method}").fingerprint()
        assert shipped(method, model.config, "0" * 16) is None, "other weights of the same shape"

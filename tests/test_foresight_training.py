"""ForesightKV's training: traces say what the oracle saw, the fit learns it, resumption, refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import kvkeep
from all_policies import random_scorer
from kvkeep.attention_mass import block_attention, future_maximum
from kvkeep.policies.foresightkv import ForesightKV
from kvkeep.scorers.features import FeatureSpec
from kvkeep.training import foresightkv
from kvkeep.training.corpus import data_fingerprint
from kvkeep.training.rank import Rank, Schedule, kendall_tau, overlap, spaced
from kvkeep.training.traces import acting, harvest
from test_training import Text, texts
from tiny import random_ids, tiny_model

BUDGETS = [kvkeep.Budget(sinks=0, window=4, topk=12, interval=4), kvkeep.Budget(sinks=2, window=3, topk=20, interval=6)]


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


def small(preset="mini", **changes):
    return foresightkv.recipe(preset, **{"steps": 6, "save_every": 1, "evaluate_every": 3} | changes)


class Told(ForesightKV):
    """Keeps the features of the candidates at every eviction, in order of position."""

    def keep_scores(self, held):
        order = held.positions.masked_fill(~held.candidates, 10**6).argsort(-1)[..., : int(held.candidates[0, 0].sum())]
        features = self.inputs(held).gather(2, order[..., None].expand(*order.shape, self.inputs(held).shape[-1]))
        told = (held.positions.gather(-1, order).clone(), features)
        self.__dict__.setdefault("_told", {}).setdefault(held.geometry.layer, []).append(told)
        return super().keep_scores(held)


@pytest.mark.parametrize("spec", [FeatureSpec.best(), FeatureSpec.released(), FeatureSpec(windows=(3,), keys="pre")])
def test_a_trace_under_a_student_holds_the_features_it_saw(model, tmp_path, spec):
    """What training reads is what the policy reads when it decides, to rounding."""
    ids, budget = random_ids(70)[0], BUDGETS[0]
    scorer = random_scorer("foresightkv", model.config, budget, features=spec)
    policy = Told(budget, scorer)
    kvkeep.replay(model, ids[None], policy)
    (trace,) = harvest(model, [(Text("a"), ids)], [budget], tmp_path, spec, follow=scorer, storage="float32")
    rotary = foresightkv.rotaries(model, scorer)
    everything = torch.arange(trace.evictions)
    for layer, evictions in policy._told.items():
        tokens = torch.cat([positions for positions, _ in evictions])
        assert torch.equal(load_file(trace.path)[f"tokens.{layer}"].long(), tokens.long())
        built = trace.features(layer, 3, spec, everything, rotary[layer])
        torch.testing.assert_close(built, torch.cat([features for _, features in evictions]), rtol=1e-5, atol=1e-5)


def test_a_trace_follows_golden_and_holds_its_labels(model, tmp_path):
    ids = random_ids(75)[0]
    traces = harvest(model, [(Text("a"), ids)], BUDGETS, tmp_path, FeatureSpec(), storage="float32")
    assert [trace.budget for trace in traces] == BUDGETS
    for trace in traces:
        budget = trace.budget
        dense = {}

        def observe(geometry, query, key, value, evicted_at, dense=dense, budget=budget):
            dense[geometry.layer] = future_maximum(
                block_attention(query, key, budget.slots, budget.interval, scaling=geometry.scaling)
            )

        kvkeep.replay(model, ids[None], kvkeep.policies.create("full"), observe=observe)
        gone = kvkeep.replay(model, ids[None], kvkeep.policies.create("golden", budget)).evicted_at
        tensors = load_file(trace.path)
        assert trace.evictions == -(-(75 - budget.rest) // budget.interval) - 1
        for layer in (0, 1):
            tokens = tensors[f"tokens.{layer}"].long()  # [M, H, C]
            assert tokens.shape == (trace.evictions, 2, budget.slots - budget.window - budget.sinks)
            for eviction in range(trace.evictions):
                query = budget.slots + eviction * budget.interval
                alpha = dense[layer][0, :, :, eviction].gather(-1, tokens[eviction])
                torch.testing.assert_close(trace.alpha(layer, torch.tensor([eviction]))[0], alpha)
                went = gone[layer][0].gather(-1, tokens[eviction]) == query
                assert (went.sum(-1) == budget.interval).all()
                lowest = alpha.argsort(dim=-1, stable=True)[..., : budget.interval]
                assert torch.equal(went.nonzero()[:, 1].view(2, -1), lowest.sort(-1).values)


@pytest.mark.parametrize("rule", ["h2o_decayed", "snapkv", "rkv", "expected_attention", "tova"])
def test_a_trace_follows_a_rule(model, tmp_path, rule):
    """The states that are labelled are those that the rule reaches, also of one that keeps statistics and queries."""
    ids, budget = random_ids(75)[0], kvkeep.policies.budget(rule, 20, interval=4)
    (trace,) = harvest(model, [(Text("a"), ids)], [budget], tmp_path, FeatureSpec(), follow=rule, storage="float32")
    gone = kvkeep.replay(model, ids[None], kvkeep.policies.create(rule, budget)).evicted_at
    tensors, tokens = load_file(trace.path), torch.arange(75)
    for layer in (0, 1):
        for eviction, held in enumerate(tensors[f"tokens.{layer}"].long()):  # [H, C]
            query = budget.slots + eviction * budget.interval
            candidates = (gone[layer][0] >= query) & (tokens < query - budget.window) & (tokens >= budget.sinks)
            assert torch.equal(candidates.nonzero()[:, 1].view(2, -1), held)


def test_a_rule_protects_its_own_window_in_a_trace_that_labels_more(model, tmp_path):
    """With a window of 3 the oracle labels 5 tokens more than the rule, whose window is an interval, would give up."""
    narrow = kvkeep.Budget(sinks=0, window=3, topk=21, interval=8)
    usual = kvkeep.policies.budget("h2o_decayed", narrow.slots, interval=8)
    assert (usual.window, usual.rest) == (8, narrow.rest)
    found = {}
    for budget in (narrow, usual):
        given = [(Text("a"), random_ids(75)[0])]
        (trace,) = harvest(model, given, [budget], tmp_path, FeatureSpec(), follow="h2o_decayed", storage="float32")
        found[budget.window] = load_file(trace.path)["tokens.0"]
    assert found[3].shape[-1] == found[8].shape[-1] + 5
    assert torch.equal(found[3][..., :-5], found[8]), "the same tokens are held, and the next five are looked at too"


@pytest.mark.parametrize("name", ["kvpop_mlp", "future_mass", "random", "nonsense"])
def test_what_cannot_be_followed_is_named(model, tmp_path, name):
    with pytest.raises(ValueError, match=rf"a trace follows golden, .*h2o_decayed.*, not '{name}'; stage dagger"):
        harvest(model, texts(1), BUDGETS[:1], tmp_path, FeatureSpec(), follow=name)
    with pytest.raises(ValueError, match=f"not '{name}'"):
        foresightkv.recipe("best", follow=name)


def test_labels_may_be_the_largest_of_a_group(model, tmp_path):
    ids, budget = random_ids(75)[0], BUDGETS[0]
    given = [(Text("a"), ids)]
    found = {}
    for reduce in ("mean", "max"):
        (trace,) = harvest(model, given, [budget], tmp_path, FeatureSpec(), follow="h2o_decayed", head_reduce=reduce)
        found[reduce] = load_file(trace.path)
    assert torch.equal(found["mean"]["tokens.0"], found["max"]["tokens.0"]), "the same evictions"
    assert (found["max"]["alpha.0"] >= found["mean"]["alpha.0"]).all()
    assert (found["max"]["alpha.0"] > found["mean"]["alpha.0"]).any()
    with pytest.raises(ValueError, match="mean or max, not 'log_mean'"):
        foresightkv.recipe("best", head_reduce="log_mean")


def test_traces_are_read_once(model, tmp_path, monkeypatch):
    given = texts(3)
    first = harvest(model, given, BUDGETS[:1], tmp_path, FeatureSpec())
    monkeypatch.setattr("kvkeep.training.traces.hidden_states", None)
    assert harvest(model, given, BUDGETS[:1], tmp_path, FeatureSpec.best()) == first, "other features, the same sums"
    monkeypatch.undo()
    student = random_scorer("foresightkv", model.config, BUDGETS[0])
    other = harvest(model, given, BUDGETS[:1], tmp_path, FeatureSpec(), follow=student)
    assert not {trace.path for trace in first} & {trace.path for trace in other}
    with pytest.raises(ValueError, match="storage is one of"):
        harvest(model, given, BUDGETS[:1], tmp_path, FeatureSpec(), storage="int8")


@pytest.mark.parametrize("size", [0, 20, -5])
def test_a_damaged_trace_is_read_again(model, tmp_path, size):
    first = harvest(model, texts(2), BUDGETS, tmp_path, FeatureSpec())
    path = first[1].path
    whole, stamps = path.read_bytes(), [trace.path.stat().st_mtime_ns for trace in first]
    path.write_bytes(whole[:size])
    assert harvest(model, texts(2), BUDGETS, tmp_path, FeatureSpec()) == first
    assert path.read_bytes() == whole
    assert [trace.path.stat().st_mtime_ns == stamp for trace, stamp in zip(first, stamps, strict=True)].count(True) == 3


def test_overlap_and_tau():
    alpha = torch.tensor([0.4, 0.2, 0.2, 0.7])
    assert overlap(torch.tensor([3.0, 1, 2, 4]), alpha, 2) == 1
    assert overlap(torch.tensor([1.0, 3, 2, 4]), alpha, 2) == 0.5
    assert kendall_tau(torch.tensor([3.0, 1, 2, 4]), alpha) == 1
    assert kendall_tau(torch.tensor([3.0, 1, 2, 0]), alpha) == pytest.approx((2 - 3) / 5)
    assert overlap(torch.zeros(4), torch.zeros(4), 2) == 1, "of equals the older goes, in both"


@pytest.mark.parametrize(("preset", "loss"), [("mini", "regression"), ("published", "ranking"), ("mini", "tweedie")])
def test_training_lowers_the_loss_and_saves_what_it_measured(model, tmp_path, preset, loss):
    settings = small(preset, steps=60, evaluate_every=20, loss=loss)
    scorer = foresightkv.train(model, texts(6), BUDGETS, tmp_path, settings, base_model="tiny", command="do it")
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(60))
    least = 1.0 if loss == "tweedie" else 0.97  # most of a deviance is noise that nothing foretells
    assert sum(line["loss"] for line in log[-9:]) < least * sum(line["loss"] for line in log[:9])
    assert {"gradient_norm", "lr", "tokens_per_second"} <= set(log[0])
    assert {"held_out_loss", "held_out_overlap", "held_out_chance", "held_out_tau"} <= set(log[19])
    loaded = kvkeep.load_scorer(tmp_path)
    assert loaded.fingerprint() == scorer.fingerprint()
    assert loaded.budgets == tuple(BUDGETS)
    assert loaded.metadata["stage"] == "sft"
    assert loaded.metadata["data_fingerprint"] == data_fingerprint(texts(6))
    held_out = loaded.metadata["metrics"]["held_out"]
    assert held_out["documents"] == 1, "two budgets of one text are not two documents"
    assert len(set(held_out["overlap"]["interval"])) == 1
    assert held_out["overlap"]["interval"][0] <= held_out["overlap"]["value"] <= held_out["overlap"]["interval"][1]
    assert "do it" in (tmp_path / "README.md").read_text()
    for layer in loaded.layers.values():
        assert layer.input_std.min() > 0
        assert (layer.input_mean != 0).any()
    policy = kvkeep.policies.create("foresightkv", BUDGETS[0], scorer=loaded)
    assert torch.isfinite(kvkeep.replay(model, texts(1)[0][1][None], policy).token_loss).all()


@pytest.mark.parametrize("pairs", ["all", "cross", 50])
def test_resumed_run_is_the_uninterrupted_one(model, tmp_path, pairs):
    settings = small("published", steps=7, save_every=2, pairs=pairs)
    shards = tmp_path / "shards"
    straight = foresightkv.train(model, texts(4), BUDGETS, tmp_path / "straight", settings, shards=shards)

    class Killed(Exception):
        pass

    for at in (1, 2, 5, 7, None):

        def progress(stage, done, total, at=at):
            if stage == "fit" and done == at:
                raise Killed

        options = {"shards": shards, "resume": True, "progress": progress}
        try:
            resumed = foresightkv.train(model, texts(4), BUDGETS, tmp_path / "resumed", settings, **options)
        except Killed:
            assert at is not None
    assert resumed.fingerprint() == straight.fingerprint()
    assert resumed.metadata["metrics"] == straight.metadata["metrics"]
    logs = []
    for run in ("straight", "resumed"):
        lines = (tmp_path / run / "run" / "log.jsonl").read_text().splitlines()
        logs.append([{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in lines])
    assert logs[0] == logs[1]


def test_resuming_with_another_model_is_refused(model, tmp_path):
    foresightkv.train(model, texts(3), BUDGETS[:1], tmp_path, small())
    with pytest.raises(ValueError, match="with another model; it cannot be resumed"):
        foresightkv.train(
            tiny_model(dtype=torch.float32, seed=1), texts(3), BUDGETS[:1], tmp_path, small(), resume=True
        )


def test_an_early_stop_watches_the_overlap(model, tmp_path):
    settings = small(steps=200, evaluate_every=1, patience=2, lr=1e-9)
    scorer = foresightkv.train(model, texts(3), BUDGETS[:1], tmp_path, settings)
    assert scorer.metadata["steps"] == 3


def test_dagger_goes_on_from_a_scorer_on_the_states_it_reaches(model, tmp_path):
    shards = tmp_path / "shards"
    first = foresightkv.train(model, texts(4), BUDGETS, tmp_path / "sft", small(), shards=shards)
    before = set(shards.iterdir())
    assert len(before) == 8
    second = foresightkv.train(
        model, texts(4), BUDGETS, tmp_path / "dagger", small(), stage="dagger", start=first, shards=shards
    )
    assert len(set(shards.iterdir()) - before) == 6, "of the three documents trained on, at two budgets"
    assert second.metadata["stage"] == "dagger"
    assert second.metadata["start"] == first.fingerprint()
    assert second.fingerprint() != first.fingerprint()
    for shape in first.geometry:
        assert torch.equal(first.layer(shape.index).input_mean, second.layer(shape.index).input_mean)


def test_a_rule_whose_window_leaves_nothing_has_the_window_of_the_budget(model, tmp_path):
    budget = kvkeep.Budget(sinks=0, window=2, topk=8, interval=12)  # by itself h2o_decayed protects all of an interval
    assert acting(budget, "h2o_decayed").budget == budget
    roomy = kvkeep.Budget(sinks=0, window=2, topk=26, interval=4)
    assert acting(roomy, "h2o_decayed").budget == kvkeep.Budget(sinks=0, window=4, topk=24, interval=4)
    assert foresightkv.train(model, texts(3), [budget], tmp_path, small()).budgets == (budget,)


def test_dagger_restarted_learns_from_the_same_states_with_new_weights(model, tmp_path):
    first = foresightkv.train(model, texts(4), BUDGETS, tmp_path / "sft", small(), shards=tmp_path / "shards")
    given = {"stage": "dagger", "start": first, "shards": tmp_path / "shards", "seed": 5}
    settings = replace(small(steps=1, warmup=0, lr=1e-12), restart=True)
    again = foresightkv.train(model, texts(4), BUDGETS, tmp_path / "again", settings, **given)
    read = set((tmp_path / "shards").iterdir())
    onward = foresightkv.train(model, texts(4), BUDGETS, tmp_path / "onward", replace(settings, restart=False), **given)
    assert set((tmp_path / "shards").iterdir()) == read
    fresh = kvkeep.scorers.new("foresightkv", model.config, BUDGETS, seed=5, **settings.options)
    for shape in first.geometry:
        torch.testing.assert_close(again.layer(shape.index).w1, fresh.layer(shape.index).w1)
        torch.testing.assert_close(onward.layer(shape.index).w1, first.layer(shape.index).w1)
        assert not torch.equal(again.layer(shape.index).input_mean, first.layer(shape.index).input_mean)


def test_powers_go_with_the_features_they_are_of():
    assert foresightkv.recipe("best").options["value_power"] > 0
    ranked = foresightkv.recipe("best", loss="ranking").options  # scores without a scale
    assert (ranked["value_power"], ranked["age_power"]) == (0, 0)
    assert foresightkv.recipe("best", loss="ranking", value_power=0.1).options["value_power"] == 0.1
    both = foresightkv.recipe("best", features=FeatureSpec(kv=False)).options
    assert (both["value_power"], both["age_power"]) == (0, 0)
    assert foresightkv.PRESETS["published"].options["value_power"] == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"stage": "dagger"}, "stage 'dagger' goes on from a scorer of stage 'sft'"),
        ({"stage": "later"}, "stage is one of sft, dagger"),
        (
            {"budgets": [kvkeep.Budget(0, 4, 100, 4)]},
            "document 'text 0' has 70 tokens: nothing to learn from beside a budget that holds 108",
        ),
        ({"documents": texts(1)}, "two documents or more"),
    ],
)
def test_what_cannot_be_trained_leaves_nothing(model, tmp_path, changes, sentence):
    given = {"documents": texts(3), "budgets": BUDGETS, "out": tmp_path / "out", "settings": small()} | changes
    with pytest.raises(ValueError, match=sentence):
        foresightkv.train(model, **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"loss": "hinge"}, "loss is one of ranking, regression, tweedie"),
        ({"power": 3.0}, r"must be in \[1, 2\], not 3.0"),
        ({"pairs": "some"}, 'pairs are "all", "cross" or a number'),
        ({"evictions": -1}, "must be at least 1"),
        ({"colour": 1}, "a recipe has no colour"),
    ],
)
def test_bad_recipes_are_refused(overrides, sentence):
    with pytest.raises(ValueError, match=sentence):
        foresightkv.recipe("best", **overrides)


def test_the_score_loss_reaches_only_the_scorer_and_is_float32(model, tmp_path):
    trace = harvest(model, texts(2), BUDGETS[:1], tmp_path, FeatureSpec())[0]
    scorer = kvkeep.scorers.new("foresightkv", model.config, BUDGETS[:1])
    fit = Rank(scorer, [trace], [], Schedule(loss="ranking"), tmp_path / "run")
    fit.measure()
    loss = fit.loss(0, [(trace, spaced(trace))])
    assert loss.dtype == torch.float32
    loss.backward()
    assert scorer.layer(0).w1.grad.abs().max() > 0
    assert scorer.layer(1).w1.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())

"""Ablations: what the variants differ in, that work is done once, and that the page says what was measured."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from kvkeep.evaluation import ablation
from kvkeep.evaluation.ablation_report import report, summary, verdict
from kvkeep.evaluation.ablation_variants import ABLATIONS, AT_INTERVALS, OTHERS, POWERS, Experiment, Variant, differs
from kvkeep.evaluation.documents import Document
from kvkeep.training import foresightkv, kvpop
from tiny import random_ids, tiny_model

LENGTH = 72
FAST = {"calibrate_on": 1, "decays": (0.0, 0.5), "save_every": 1}


def texts(count, first=0):
    kinds = ("prose", "code")
    return [
        (Document(f"text {seed}", kinds[seed % 2], text="-"), random_ids(LENGTH, seed=seed)[0])
        for seed in range(first, first + count)
    ]


TRAIN, TEST = texts(6), texts(3, first=100)


def few(**changes):
    """Two variants in two steps, which means nothing."""
    variants = (Variant("wide", FAST | {"hidden": 8}), Variant("narrow and few", FAST | {"hidden": 2}, documents=4))
    sizes = {"budget": 40, "length": LENGTH, "seeds": 2, "steps": 2, "model": "tiny"}
    return Experiment(**{"name": "width", "question": "Does it matter?", "variants": variants} | sizes | changes)


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


@pytest.fixture(scope="module")
def done(model, tmp_path_factory):
    """Folder and result of an ablation that nobody stopped."""
    out = tmp_path_factory.mktemp("ablation")
    return out, ablation.run(few(), model, TRAIN, TEST, out)


CHANGED = {
    ("aggregation", "log_mean"): {"group": "log_mean"},
    ("delay", "delay off"): {"delay": False},
    ("delay", "kvpop_mlp"): {"method": "kvpop_mlp"},
    ("decay", "calibrated"): {"decay": "calibrated"},
    ("decay", "off"): {"decay": "off"},
    ("loss", "regression"): {"loss": "regression", "decay": "calibrated", "batch": 1, "tokens": None},
    ("loss", "boundary"): {"loss": "boundary", "decay": "calibrated", "batch": 1, "tokens": None},
    ("hidden", "hidden 16"): {"hidden": 16},
    ("hidden", "hidden 256"): {"hidden": 256},
    ("documents", "36 documents"): {"training documents": 36},
    ("documents", "12 documents"): {"training documents": 12},
    ("foresight-best", "no log, no age"): {"normalize": "mean", "age": False, "age_power": 0},
    ("foresight-best", "no age"): {"age": False, "age_power": 0},
    ("foresight-best", "no power of value or age"): {"value_power": 0, "age_power": 0},
    ("foresight-best", "hidden 16"): {"hidden": 16},
    ("foresight-best", "hidden 128"): {"hidden": 128},
    ("foresight-best", "ranking loss"): {"loss": "ranking", "value_power": 0, "age_power": 0},
    ("foresight-loss", "ranking"): {"loss": "ranking", "value_power": 0, "age_power": 0},
    ("foresight-loss", "regression"): {"loss": "regression"},
    ("foresight-best", "along golden"): {"follow": "golden"},
    ("foresight-best", "window 32"): {"window": 32},
    ("foresight-inputs", "attention only"): {"kv": False},
    ("foresight-inputs", "keys and values only"): {
        "windows": (),
        "cumulative": False,
        "decay": None,
        "age": False,
        "normalize": "mean",
    },
    ("foresight-sampling", "top-2L, sampled"): {"evict": "sample"},
    ("foresight-sampling", "sampled over all"): {"evict": "sample", "pool": None},
    ("foresight-stages", "dagger"): {"stage": "dagger"},
    ("foresight-stages", "dagger, new weights"): {"stage": "dagger", "restart": True},
    ("foresight-rewards", "large, low entropy"): {"variant": "low_large"},
    ("foresight-rewards", "low entropy"): {"variant": "low"},
    ("foresight-rewards", "high entropy"): {"variant": "high"},
    ("foresight-rewards", "all"): {"variant": "all"},
}
REFERENCES = {
    "aggregation": ("max", "kvpop_mlp", {"group": "max"}),
    "delay": ("delay on", "kvpop", {"delay": True}),
    "decay": ("fitted", "kvpop_mlp", {"decay": "fitted", "loss": "intensity"}),
    "loss": ("intensity", "kvpop_mlp", {"loss": "intensity", "decay": "fitted"}),
    "hidden": ("hidden 64", "kvpop_mlp", {"hidden": 64}),
    "documents": ("all documents", "kvpop_mlp", {"training documents": None}),
    "preset": ("best", "kvpop_mlp", {"preset": "best"}),
    "foresight-best": ("best", "foresightkv", {"preset": "best"}),
    "foresight-loss": ("tweedie", "foresightkv", {"loss": "tweedie"}),
    "foresight-inputs": ("both", "foresightkv", {"kv": True}),
    "foresight-sampling": ("top-L", "foresightkv", {"preset": "published"}),
    "foresight-stages": ("sft", "foresightkv", {"stage": "sft"}),
    "foresight-rewards": ("large, low entropy, squared", "foresightkv", {"stage": "rl", "variant": "spike"}),
}


def test_variants_differ_in_what_they_say_and_in_nothing_else():
    found = {}
    for name, experiment in ABLATIONS.items():
        reference, *others = experiment.variants
        label, method, parts = REFERENCES[name]
        assert (reference.name, reference.method) == (label, method)
        assert reference.parts().items() >= parts.items()
        found |= {(name, variant.name): differs(variant, reference) for variant in others}
    published = found.pop(("preset", "published"))
    foresight = found.pop(("foresight-best", "published"))
    assert foresight.items() >= {"preset": "published", "loss": "ranking", "hidden": 16, "lr": 1e-2}.items()
    reinforced = found.pop(("foresight-stages", "rl"))
    assert (
        reinforced.items() >= {"stage": "rl", "group": 16, "steps": 30, "variant": "spike", "credit": "to_go"}.items()
    )
    assert found == CHANGED
    assert published.items() >= {"preset": "published", "loss": "boundary", "decay": "learned"}.items()
    assert ABLATIONS["preset"].variants[1].recipe(7) == kvpop.recipe("published", 7)


def test_steps_are_those_of_every_variant():
    """Of its fit; reinforcement has its own number, since a step of it costs a forward a trajectory."""
    for experiment in ABLATIONS.values():
        fitted = [variant for variant in experiment.variants if variant.stage != "rl"]
        assert all(variant.recipe(3).schedule.steps == 3 for variant in fitted)
        assert all(v.supervised().recipe(3).schedule.steps == 3 for v in experiment.variants if v.foreseeing)


def test_numbers_are_those_of_the_evaluation(done):
    _, result = done
    rows = {row["label"]: row for row in result["rows"]}
    assert list(rows)[: len(OTHERS)] == list(OTHERS)
    wide, narrow = result["variants"]
    losses = {}
    for name, found in (("wide", wide), ("narrow and few", narrow)):
        seeds = [rows[f"{name}, seed {seed}"] for seed in (0, 1)]
        losses[name] = np.array([[d["loss"] * d["tokens"] for d in row["per_document"]] for row in seeds]).mean(0)
        full = np.array([d["full_loss"] * d["tokens"] for d in seeds[0]["per_document"]])
        assert found["loss_ratio"][0] == pytest.approx(losses[name].sum() / full.sum())
        assert found["loss_ratio"][1] <= found["loss_ratio"][0] <= found["loss_ratio"][2]
        assert found["loss_ratio_by_seed"] == [row["loss_ratio"] for row in seeds]
        assert found["loss_ratio_by_seed"][0] != found["loss_ratio_by_seed"][1], "the seed changes nothing"
        assert (found["documents"], found["seeds"]) == (3, 2)
        assert found["recall"] == pytest.approx(np.mean(found["recall_by_seed"]))
        assert all(0 < recall <= 1 for recall in found["recall_by_seed"])
    difference = narrow["difference"]
    assert wide["difference"] is None
    assert difference["loss_ratio"][0] == pytest.approx(narrow["loss_ratio"][0] - wide["loss_ratio"][0])
    by_seed = zip(narrow["loss_ratio_by_seed"], wide["loss_ratio_by_seed"], strict=True)
    assert difference["by_seed"] == pytest.approx([one - other for one, other in by_seed])
    assert difference["won"] == int((losses["narrow and few"] < losses["wide"]).sum())


def test_gap_is_between_the_best_rule_and_the_oracle():
    """Two documents of ten tokens; the full cache loses 1 a token."""

    def row(policy, first, second):
        each = [{"document": "d", "loss": loss, "full_loss": 1.0, "tokens": 10} for loss in (first, second)]
        loss = (first + second) / 2
        base = {"policy": policy, "label": policy, "scorer": None, "kind": "all", "budget": 40}
        return base | {"documents": 2, "loss": loss, "loss_ratio": loss, "loss_ratio_ci": [0, 9], "per_document": each}

    rules = [row("streaming", 2.5, 2.5), row("tova", 2.0, 2.0)]
    runs = [row("kvpop_mlp", *losses) for losses in ((1.4, 1.8), (1.6, 1.2), (2.0, 1.9), (2.0, 2.1))]
    titles = ("wide, seed 0", "wide, seed 1", "narrow and few, seed 0", "narrow and few, seed 1")
    runs = [run | {"label": title, "scorer": title} for run, title in zip(runs, titles, strict=True)]
    recalls = {title: (0.1 * place, 0.05) for place, title in enumerate(titles)}
    wide, narrow = summary(few(), [*rules, row("future_mass", 1.2, 1.0), *runs], recalls)["variants"]
    assert wide["gap"]["closed"] == pytest.approx((2.0 - 1.5) / (2.0 - 1.1))
    assert (wide["gap"]["rule"], wide["gap"]["oracle"], wide["gap"]["wins"]) == ("tova", "future_mass", 2)
    assert wide["gap"]["ci"] == pytest.approx([0.5 / 1.0, 0.5 / 0.8]), "documents are drawn after seeds were averaged"
    assert narrow["gap"]["closed"] == pytest.approx(0)
    assert (narrow["recall"], narrow["recall_chance"]) == (pytest.approx(0.25), 0.05)
    assert narrow["difference"]["loss_ratio"] == pytest.approx([0.5, 0.5, 0.5])
    assert narrow["difference"]["by_seed"] == pytest.approx([0.35, 0.65])
    assert narrow["difference"]["won"] == 0
    without = summary(few(), [*rules, row("future_mass", 2.2, 2.2), *runs], recalls)["variants"]
    assert [variant["gap"] for variant in without] == [None, None]


def test_every_variant_trains_on_its_documents_with_its_recipe(done):
    out, result = done
    shards = {path.name for path in (out / "shards").iterdir()}
    assert len(shards) == len(TRAIN) + len(TEST), "one shard a document, shared by all variants"
    places = {row["label"]: row["scorer"] for row in result["rows"]}
    for variant, row, count in zip(few().variants, result["variants"], (6, 4), strict=True):
        assert (row["trained_on"], row["steps"], row["memory"]) == (count, 2, 0)
        for seed in (0, 1):
            saved = json.loads((out / "scorers" / places[variant.title(seed)] / "config.json").read_text())
            assert saved["metadata"]["seed"] == seed
            assert saved["metadata"]["recipe"]["hidden"] == variant.overrides["hidden"]
            assert saved["metadata"]["recipe"]["calibrate_on"] == 1, "what a variant says goes before the experiment"
            assert saved["base_model"] == "tiny"
    assert str(out) not in (out / "width.json").read_text(), "a result names no place on this disk"


def test_a_stopped_run_goes_on_to_the_same_result(done, model, tmp_path):
    _, result = done

    class Stopped(Exception):
        pass

    def stopper(when, at):
        def told(stage, done, total):
            if stage.startswith(when) and done >= at:
                raise Stopped

        return told

    stops = [("wide, seed 0: harvest", 3), ("wide, seed 0: fit", 1), ("narrow and few, seed 0: calibrate", 1)]
    stops += [("wide, seed 1: fit", 2), ("evaluate: wide, seed 1 at 40, text 101", 0)]
    for when, at in stops:
        with pytest.raises(Stopped):
            ablation.run(few(), model, TRAIN, TEST, tmp_path, tmp_path / "read", stopper(when, at))
    assert not (tmp_path / "width.json").exists()
    assert ablation.run(few(), model, TRAIN, TEST, tmp_path, tmp_path / "read") == result
    assert json.loads((tmp_path / "width.json").read_text()) == result


def test_finished_work_is_not_done_again_and_may_grow(model, tmp_path, monkeypatch):
    first = ablation.run(few(seeds=1), model, TRAIN, TEST[:2], tmp_path)
    trained = []
    train = kvpop.train
    monkeypatch.setattr(kvpop, "train", lambda *given, **named: trained.append(given[4].name) or train(*given, **named))
    monkeypatch.setattr("kvkeep.evaluation.evaluate.replay", None)  # a replay would be a TypeError
    assert ablation.run(few(seeds=1), model, TRAIN, TEST[:2], tmp_path) == first
    assert trained == []
    monkeypatch.undo()
    monkeypatch.setattr(kvpop, "train", lambda *given, **named: trained.append(given[4].name) or train(*given, **named))
    more = ablation.run(few(), model, TRAIN, TEST, tmp_path)
    assert [name[-2:] for name in trained] == ["-1", "-1"]
    assert more["variants"][0]["loss_ratio_by_seed"][0] != first["variants"][0]["loss_ratio_by_seed"][0]
    assert [row["documents"] for row in more["variants"]] == [3, 3]


def test_foresightkv_has_its_own_recipe_stages_and_monitor(model, tmp_path, monkeypatch):
    """Variants that differ in how the policy is run share a scorer; a later stage begins with the first's."""
    fast = {"hidden": 4, "save_every": 1, **POWERS}
    quick = {"steps": 1, "batch": 1, "group": 2}
    variants = (
        Variant("topk", fast, "foresightkv"),
        Variant("sample", fast, "foresightkv", policy={"evict": "sample"}),
        Variant("dagger", fast, "foresightkv", stage="dagger"),
        Variant("rl", {**POWERS, "hidden": 4, "variant": "all"} | quick, "foresightkv", stage="rl"),
    )
    trained, train = [], foresightkv.train
    monkeypatch.setattr(
        foresightkv,
        "train",
        lambda *given, **named: trained.append(named.get("stage", "sft")) or train(*given, **named),
    )
    asked = few(name="foresight", seeds=1, variants=variants, others=AT_INTERVALS)
    result = ablation.run(asked, model, TRAIN, TEST, tmp_path)
    assert trained == ["sft", "dagger", "sft", "rl"], "the first was there for the second, not for another recipe"
    topk, sample, dagger, _ = result["variants"]
    assert topk["recall"] == sample["recall"] != dagger["recall"]
    assert topk["recall_chance"] == pytest.approx(10 / 32), "all but the newest 8 may go"
    assert topk["loss_ratio"] != sample["loss_ratio"]
    assert {row["policy"]: row["role"] for row in result["others"]}["golden"] == "oracle"
    page = report(result, "command")
    assert "**Overlap**: of what golden drops" in page
    assert "| sample | foresightkv | evict sample |" in page


def test_page_has_every_row_and_the_command(done):
    out, result = done
    page = report(json.loads((out / "width.json").read_text()), ablation.command(few(), 3))
    assert page == report(result, ablation.command(few(), 3))
    assert (
        "Printed by `python -m kvkeep.evaluation.ablation width --out DIR --seeds 2 --documents 3 --budget 40 "
        "--length 72 --train-documents 48 --calibrate-on 4 --model tiny --steps 2`." in page
    )
    assert ablation.command(few(dtype="bfloat16"), 3).endswith("--steps 2 --dtype bfloat16")
    assert page.count("\n| wide |") == 2
    assert page.count("\n| narrow and few |") == 3
    assert "| narrow and few | kvpop_mlp | hidden 2 | 4 | 2 | 0 |" in page
    for policy in OTHERS:
        assert page.count(f"\n| {policy} |") == 1
    narrow = result["variants"][1]
    low, high = sorted(narrow["difference"]["by_seed"])
    assert f"| {low:+.4f} to {high:+.4f} | {narrow['difference']['won']} of 3 |" in page
    assert f"* {verdict(narrow, 'wide')}\n" in page


@pytest.mark.parametrize(
    ("interval", "by_seed", "sentence"),
    [
        ((0.01, -0.01, 0.03), [0.01, 0.01], "`a` and `b`: no difference shown, the interval includes zero."),
        ((0.01, 0.0, 0.03), [0.01, 0.01], "`a` and `b`: no difference shown, the interval includes zero."),
        ((0.02, 0.01, 0.03), [0.01, 0.03], "`a` loses more than `b`, with every seed."),
        ((-0.02, -0.03, -0.01), [-0.01, -0.03], "`a` loses less than `b`, with every seed."),
        ((-0.02, -0.03, -0.01), [-0.05, 0.01], "no difference shown, the seeds disagree, though the interval over"),
        ((-0.02, -0.03, -0.01), [-0.02], "`a` loses less than `b`; how much of it is the luck of one seed is not"),
    ],
)
def test_verdict(interval, by_seed, sentence):
    row = {"variant": "a", "difference": {"loss_ratio": interval, "by_seed": by_seed}}
    assert sentence in verdict(row, "b")


@pytest.mark.parametrize(
    ("experiment", "train", "test", "sentence"),
    [
        (few(), TRAIN[:4], TEST, "'narrow and few' trains on 4 of the training documents, but there are only 4"),
        (few(), TRAIN[:1], TEST, "two documents or more to train on, and as many held out, not 1, 3"),
        (few(), TRAIN, TEST[:1], "two documents or more to train on, and as many held out, not 6, 1"),
        (few(length=73), TRAIN, TEST, "document 'text 0' has 72 tokens, not 73"),
        (few(budget=36), TRAIN, TEST, "36"),
        (few(length=40), TRAIN, TEST, "length must be at least 42"),
        (few(variants=(Variant("odd", {"hiden": 3}),)), TRAIN, TEST, "a recipe has no hiden"),
    ],
)
def test_what_cannot_be_run_leaves_nothing(model, tmp_path, experiment, train, test, sentence):
    with pytest.raises(ValueError, match=sentence):
        ablation.run(experiment, model, train, test, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_scorer_is_kept_under_what_decides_it(done, model, tmp_path, monkeypatch):
    """Another question in the same folder trains only what no other question has trained."""
    trained, train = [], kvpop.train
    monkeypatch.setattr(kvpop, "train", lambda *given, **named: trained.append(given[4].name) or train(*given, **named))
    ablation.run(few(seeds=1), model, TRAIN, TEST, tmp_path)
    assert len(trained) == 2
    wide, narrow = few().variants
    renamed = few(name="other", seeds=1, variants=(Variant("same", wide.overrides), Variant("all", narrow.overrides)))
    other = ablation.run(renamed, model, TRAIN, TEST, tmp_path)
    assert len(trained) == 3, "one of them was there"
    assert other["variants"][0]["loss_ratio"] == pytest.approx(
        json.loads((tmp_path / "width.json").read_text())["variants"][0]["loss_ratio"]
    )
    for changed in ({"steps": 3}, {"budget": 41}):
        count = len(trained)
        ablation.run(few(seeds=1, **changed), model, TRAIN, TEST, tmp_path)
        assert len(trained) == count + 2, changed
    assert len(set(trained)) == len(trained)

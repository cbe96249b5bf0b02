"""Training a scorer on a frozen backbone: shards, resumption, routing of gradients, memory, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvkeep
from kvkeep.attention_mass import future_attention
from kvkeep.scorers import model_fingerprint
from kvkeep.training import kvpop, losses
from kvkeep.training.corpus import data_fingerprint
from kvkeep.training.decay import LearnedDecay
from kvkeep.training.fit import Fit, Schedule, admitted
from kvkeep.training.harvest import harvest
from kvkeep.training.state import Log
from tiny import random_ids, tiny_model

BUDGETS = [kvkeep.Budget(2, 4, 10), kvkeep.Budget(2, 4, 20)]
METHODS = ("kvpop_mlp", "kvpop")
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


@dataclass
class Text:
    name: str


def texts(count=5, length=70):
    return [(Text(f"text {seed}"), random_ids(length, seed=seed)[0]) for seed in range(count)]


def small(**changes):
    return kvpop.recipe("mini", **{"steps": 6, "calibrate_on": 1, "decays": (0.5, 1.0), "save_every": 1} | changes)


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


def test_kvpop_starts_as_the_scorer_it_is_given(model, tmp_path):
    """Its memory weighs nothing at first: the scores are the other's, and training moves them."""
    options = {"shards": tmp_path / "shards"}
    start = kvpop.train("kvpop_mlp", model, texts(3), BUDGETS, tmp_path / "mlp", small(hidden=8), **options)
    fresh = kvkeep.scorers.new("kvpop", model.config, BUDGETS, hidden=8)
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 1, 2, 30, 8, generator=generator)
    for shape in fresh.geometry:
        fresh.layer(shape.index).start_from(start.layer(shape.index))
        theirs = start.layer(shape.index)
        raw = start(shape.index, keys, values, 4)[..., :26] * theirs.score_std[:, None] + theirs.score_mean[:, None]
        assert torch.allclose(fresh(shape.index, keys, values, 4)[..., :26], raw, atol=1e-5)
    made = kvpop.train("kvpop", model, texts(3), BUDGETS, tmp_path / "kvpop", small(hidden=8), start=start, **options)
    assert made.layer(0).w1[:, :8].abs().max() > 0, "the memory learned nothing"
    assert torch.equal(made.layer(0).input_mean, start.layer(0).input_mean)
    with pytest.raises(ValueError, match="a readout 4 wide cannot start from a scorer 8 wide"):
        kvpop.train("kvpop", model, texts(3), BUDGETS, tmp_path / "other", small(hidden=4), start=start, **options)
    with pytest.raises(ValueError, match="a kvpop_mlp scorer cannot start from a kvpop scorer"):
        kvpop.train("kvpop_mlp", model, texts(3), BUDGETS, tmp_path / "other", small(hidden=8), start=made, **options)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("preset", ["mini", "published"])
def test_training_lowers_the_loss_and_saves_what_it_measured(model, tmp_path, method, preset):
    settings = kvpop.recipe(preset, steps=30, evaluate_every=10, calibrate_on=1)
    scorer = kvpop.train(method, model, texts(6), BUDGETS, tmp_path, settings, shards=tmp_path / "shards")
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(30))
    assert sum(line["loss"] for line in log[-5:]) < sum(line["loss"] for line in log[:5])
    assert {"gradient_norm", "lr", "tokens_per_second"} <= set(log[0])
    assert {"held_out_loss", "held_out_recall", "held_out_chance"} <= set(log[9])
    loaded = kvkeep.load_scorer(tmp_path)
    assert loaded.fingerprint() == scorer.fingerprint()
    assert list(loaded.budgets) == BUDGETS
    assert loaded.metadata["base_fingerprint"] == model_fingerprint(model)
    assert loaded.metadata["data_fingerprint"] == data_fingerprint(texts(6))
    assert loaded.metadata["recipe"]["schedule"]["steps"] == 30
    held_out = loaded.metadata["metrics"]["held_out"]
    assert held_out["documents"] == 1
    for name in ("loss", "recall", "chance"):
        assert held_out[name]["value"] == pytest.approx(log[-1][f"held_out_{name}"])
        assert held_out[name]["interval"][0] <= held_out[name]["value"] <= held_out[name]["interval"][1]
    decays = torch.stack([loaded.layer(layer.index).log_gamma for layer in loaded.geometry])
    if preset == "published":
        assert (decays < 0).all()
    else:
        ratios = loaded.metadata["metrics"]["calibration"]
        for budget in loaded.budgets:
            found = ratios[f"{budget.rest} tokens"]
            assert found[str(loaded.decay_factors[budget.rest])] == min(found.values())
        rates = load_file(tmp_path / "run" / "state.safetensors")
        for shape in loaded.geometry:
            layer = loaded.layer(shape.index)
            fitted = rates[f"model.decay.rate.{shape.index}"] / layer.score_std
            assert torch.allclose(-layer.log_gamma, fitted, rtol=1e-5)
        assert decays.unique().numel() == decays.numel(), "every head has its own decay"
    policy = kvkeep.policies.create(method, BUDGETS[0], scorer=loaded)
    assert torch.isfinite(kvkeep.replay(model, texts(1)[0][1][None], policy).token_loss).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("preset", ["mini", "published"])
def test_resumed_run_is_the_uninterrupted_one(model, tmp_path, method, preset):
    """Stopped after every step and resumed: the same losses, decay and weights, digit for digit."""
    settings = kvpop.recipe(preset, steps=7, evaluate_every=3, save_every=2, calibrate_on=1, decays=(0.0, 0.3))
    arguments = (method, model, texts(4), BUDGETS)
    straight = kvpop.train(*arguments, tmp_path / "straight", settings, shards=tmp_path / "shards")
    ends = iter((1, 2, 5, 6, 7, None))

    class Killed(Exception):
        pass

    def killer(at):
        def progress(stage, done, total):
            if stage == "fit" and done == at:
                raise Killed

        return progress

    for end in ends:
        options = {"shards": tmp_path / "shards", "resume": True, "progress": killer(end)}
        if end is None:
            resumed = kvpop.train(*arguments, tmp_path / "resumed", settings, **options)
        else:
            with pytest.raises(Killed):
                kvpop.train(*arguments, tmp_path / "resumed", settings, **options)
    assert resumed.fingerprint() == straight.fingerprint()
    assert resumed.metadata["metrics"] == straight.metadata["metrics"]
    logs = []
    for run in ("straight", "resumed"):
        lines = (tmp_path / run / "run" / "log.jsonl").read_text().splitlines()
        logs.append([{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in lines])
    assert logs[0] == logs[1]


@pytest.mark.slow
def test_kill_dash_nine_loses_at_most_what_was_not_saved(tmp_path):
    program = textwrap.dedent("""
        import os, signal, sys
        import torch
        torch.set_num_threads(1)
        from test_training import BUDGETS, kvpop, texts, tiny_model
        kill_at = int(sys.argv[2])
        def progress(stage, done, total):
            if stage == "fit" and done == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        settings = kvpop.recipe("mini", steps=9, save_every=2, calibrate_on=1, decays=(0.0, 0.3))
        model = tiny_model(dtype=torch.float32)
        scorer = kvpop.train(
            "kvpop_mlp", model, texts(4), BUDGETS, sys.argv[1], settings, resume=True, progress=progress
        )
        print(scorer.fingerprint())
    """)

    def run(folder, kill_at):
        command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / folder), str(kill_at)]
        return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)

    straight = run("straight", -1)
    assert straight.returncode == 0, straight.stderr
    for kill_at in (3, 8):
        assert run("killed", kill_at).returncode == -9
    resumed = run("killed", -1)
    assert resumed.stdout == straight.stdout


@pytest.mark.parametrize("preset", ["mini", "published"])
def test_the_log_tells_of_every_head(model, tmp_path, preset):
    """Issue: keep rate and gamma per head, at every held-out evaluation."""
    settings = kvpop.recipe(preset, steps=2, evaluate_every=1, calibrate_on=1)
    kvpop.train("kvpop_mlp", model, texts(4), BUDGETS, tmp_path, settings)
    for line in map(json.loads, (tmp_path / "run" / "log.jsonl").read_text().splitlines()):
        for name in ("keep_rate", "gamma"):
            assert [len(heads) for heads in line[name]] == [2, 2]
            assert all(0 <= value <= 1 for heads in line[name] for value in heads)
        assert {value for heads in line["gamma"] for value in heads} != {1.0}


def test_keep_rate_is_what_stays_when_it_leaves_the_window():
    budget = kvkeep.Budget(1, 2, 3)
    rising, falling = torch.arange(20.0), -torch.arange(20.0)
    assert admitted(torch.stack([rising, falling])[None], budget).tolist() == [[1.0, 0.0]]
    order = torch.tensor(
        [9, 1, 2, 3, 0, 4, 1.5, 9, 9]
    )  # sink, three that fill the cache, then 0 no, 4 yes; two in the window
    assert admitted(order[None, None], budget).item() == pytest.approx(1 / 3)


def test_seed_decides_everything(model, tmp_path):
    prints = [
        kvpop.train(
            "kvpop_mlp", model, texts(3), BUDGETS, tmp_path / str(run), small(), seed=seed, shards=tmp_path / "shards"
        ).fingerprint()
        for run, seed in enumerate((0, 0, 1))
    ]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("method", METHODS)
def test_score_loss_reaches_only_the_scorer(method, tmp_path):
    """Spec kvpop 12.12: keys and values enter detached, so no gradient reaches what made them."""
    backbone = tiny_model(dtype=torch.float32).requires_grad_(True)
    scorer = kvkeep.scorers.new(method, backbone.config, BUDGETS)
    seen = []

    def observe(geometry, query, key, value, evicted_at):
        assert key.requires_grad
        score = scorer(geometry.layer, key, value, 4)
        target = future_attention(query, key, 4, scaling=geometry.scaling)
        seen.append(losses.boundary(score, target, BUDGETS[0], -0.01, 64))

    ids = random_ids(60)
    result = kvkeep.replay(backbone, ids, kvkeep.policies.create("random", BUDGETS[0]), gradients=True, observe=observe)
    sum(seen).backward(retain_graph=True)
    assert all(parameter.grad is None for parameter in backbone.parameters())
    assert any(parameter.grad.abs().max() > 0 for parameter in scorer.parameters())
    scorer.zero_grad()
    result.token_loss.mean().backward()
    assert all(parameter.grad is None for parameter in scorer.parameters())
    assert backbone.model.layers[0].self_attn.k_proj.weight.grad.abs().max() > 0


def test_learned_decay_stays_in_its_range(model, tmp_path):
    shards = harvest(model, texts(2), 4, tmp_path)
    scorer = kvkeep.scorers.new("kvpop_mlp", model.config, BUDGETS)
    schedule = Schedule(loss="boundary", tokens=None, decay="learned", gamma=0.9, gamma_lr=50.0, steps=4, warmup=0)
    fit = Fit(scorer, shards, [], schedule, tmp_path / "run")
    fit.run()
    gammas = torch.cat([fit.learned.log_gamma(layer.index) for layer in scorer.geometry]).exp()
    assert (gammas >= 0.9 - 1e-6).all()
    assert (gammas <= 1 - 1e-4 + 1e-6).all()
    assert (gammas > 0.95).all(), "no gradient reached the decay"
    assert LearnedDecay(scorer, 0.99).log_gamma(0).exp().detach() == pytest.approx(0.99)


def test_fitted_decay_is_that_of_the_attention(tmp_path):
    """Attention made to fall by a known share per step of age is fitted with that decay, whatever a token's score."""
    generator = torch.Generator().manual_seed(0)
    length, window, rate = 600, 4, 0.8
    model = tiny_model(dtype=torch.float32)
    (shard,) = harvest(model, texts(1, length), window, tmp_path, ages=True)
    first, last = losses.age_ranges(length, window, losses.age_edges(length))
    mass = (torch.exp(-rate / 64 * first) - torch.exp(-rate / 64 * last)) * 64 / rate
    level = torch.rand(2, length, 1, generator=generator)  # what no score can explain
    tensors = load_file(shard.path)
    save_file({n: (mass * level).half() if n.startswith("ages") else t for n, t in tensors.items()}, shard.path)
    scorer = kvkeep.scorers.new("kvpop_mlp", model.config, BUDGETS)
    schedule = Schedule(steps=300, tokens=None, batch=1, lr=1e-2, fitted_lr=0.05, dispersion=1.0)
    fit = Fit(scorer, [shard], [], schedule, tmp_path / "run")
    fit.run()
    rates = torch.cat(list(fit.fitted.rate.values()))
    assert (rates - rate).abs().max() < 0.05


def test_tokens_drawn_are_new_in_every_step_and_document(model, tmp_path):
    (shard,) = harvest(model, texts(1), 4, tmp_path, ages=True)
    scorer = kvkeep.scorers.new("kvpop_mlp", model.config, BUDGETS)
    fit = Fit(scorer, [shard], [], Schedule(tokens=16), tmp_path / "run")
    first, second = fit.drawn(shard, 0), fit.drawn(shard, 1)
    fit.step = 1
    assert len({tuple(t.tolist()) for t in (first, second, fit.drawn(shard, 0))}) == 3
    assert first.unique().numel() == 16
    assert min(t.min() for t in (first, second)) >= 2
    assert max(t.max() for t in (first, second)) < 70 - 4


@pytest.mark.parametrize("method", METHODS)
def test_drawn_tokens_have_the_loss_of_the_whole_on_average(model, tmp_path, method):
    (shard,) = harvest(model, texts(1), 4, tmp_path, ages=True)
    scorer = kvkeep.scorers.new(method, model.config, BUDGETS)
    fit = Fit(scorer, [shard], [], Schedule(tokens=8), tmp_path / "run")
    fit.measure()
    with torch.no_grad():
        each = [float(fit.loss([shard], 0, [tokens])) for tokens in torch.randperm(64).add(2).split(8)]
        whole = float(fit.loss([shard], 0))
    assert sum(each) / 8 == pytest.approx(whole, rel=1e-5)
    assert scorer.stateful == (method == "kvpop")


@pytest.mark.parametrize("method", METHODS)
def test_documents_of_different_lengths_share_a_step(model, tmp_path, method):
    """Their pooled loss is the mean over tokens of both, whatever ranges of age the shorter one lacks."""
    shards = harvest(model, [*texts(1), (Text("long"), random_ids(150, seed=9)[0])], 4, tmp_path, ages=True)
    fit = Fit(kvkeep.scorers.new(method, model.config, BUDGETS), shards, [], Schedule(), tmp_path / "run")
    fit.measure()
    drawn = [torch.arange(2, 66), torch.arange(2, 146)]
    with torch.no_grad():
        alone = [float(fit.loss([shard], 1, [tokens])) for shard, tokens in zip(shards, drawn, strict=True)]
        assert float(fit.loss(shards, 1, drawn)) == pytest.approx((64 * alone[0] + 144 * alone[1]) / 208, rel=1e-5)


def test_early_stop_waits_for_its_patience(model, tmp_path):
    shards = harvest(model, texts(3), 4, tmp_path, ages=True)
    scorer = kvkeep.scorers.new("kvpop_mlp", model.config, BUDGETS)
    schedule = Schedule(steps=50, lr=0.0, fitted_lr=0.0, evaluate_every=2, patience=3)
    fit = Fit(scorer, shards[:2], shards[2:], schedule, tmp_path / "run")
    fit.run()
    assert fit.step == 2 + 3 * 2  # the first evaluation is an improvement, the three after it are not


def test_log_drops_lines_past_the_saved_step(tmp_path):
    log = Log(tmp_path / "log.jsonl", 0)
    for step in range(4):
        log.write({"step": step})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    Log(tmp_path / "log.jsonl", 2)
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [0, 1]


MISTAKES = [
    (lambda model, out: kvpop.train("h2o", model, texts(), BUDGETS, out), "train takes kvpop or kvpop_mlp, not 'h2o'"),
    (lambda model, out: kvpop.train("kvpop", model, texts(1), BUDGETS, out), "two documents or more"),
    (
        lambda model, out: kvpop.train("kvpop", model, texts(3, 20), BUDGETS, out),
        "document 'text 0' has 20 tokens: nothing to learn from beside a budget that holds 26",
    ),
    (
        lambda model, out: kvpop.train("kvpop", model, texts(), [kvkeep.Budget(2, 4, 9), kvkeep.Budget(2, 5, 9)], out),
        "share their window",
    ),
    (lambda model, out: kvpop.recipe("bset"), "unknown preset 'bset'"),
    (lambda model, out: kvpop.recipe("best", width=3), "a recipe has no width"),
    (lambda model, out: kvpop.recipe("best", loss="hinge"), "not 'hinge'"),
    (lambda model, out: kvpop.recipe("best", decay="learned"), "a learned decay comes from the boundary loss"),
    (lambda model, out: harvest(model, texts(1), 4, out, target_source="teacher"), "not 'teacher'"),
]


@pytest.mark.parametrize(("call", "sentence"), MISTAKES, ids=[sentence for _, sentence in MISTAKES])
def test_mistakes_are_one_sentence_and_write_nothing(model, tmp_path, call, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        call(model, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_one_step_at_16384_tokens_stays_below_two_gigabytes(method, tmp_path):
    """No S x S tensor on the training path: one such float32 matrix of one head would be 1 GB."""
    program = textwrap.dedent("""
        import sys
        import torch
        torch.set_num_threads(1)
        import kvkeep
        from pathlib import Path
        from test_training import Text
        from tiny import random_ids, tiny_model
        from kvkeep.training import kvpop, losses
        from kvkeep.training.fit import LOSSES, Fit
        from kvkeep.training.harvest import harvest
        method, folder = sys.argv[1], Path(sys.argv[2])
        model = tiny_model(dtype=torch.float32, group=1)
        budget = kvkeep.Budget(4, 32, 220)
        for source, under in (("dense", None), ("sparse", kvkeep.policies.create("streaming", budget))):
            documents = [(Text("long"), random_ids(16_384)[0])]
            shards = harvest(model, documents, 32, folder, target_source=source, under=under, ages=True)
        for loss in LOSSES:
            scorer = kvkeep.scorers.new(method, model.config, [budget])
            schedule = kvpop.recipe("best", steps=1, loss=loss).schedule
            Fit(scorer, shards, shards, schedule, folder / loss).run()
        scorer.set_decay(-0.3)
        kvkeep.replay(model, documents[0][1][None], kvkeep.policies.create(method, budget, scorer=scorer))
        peak = [line for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
        print(int(peak.split()[1]))
    """)
    command = [sys.executable, "-W", "ignore", "-c", program, method, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2_000_000, "kB"


def test_state_of_another_scorer_is_refused(model, tmp_path):
    kvpop.train("kvpop_mlp", model, texts(3), BUDGETS, tmp_path, small())
    state = tmp_path / "run" / "state.safetensors"
    assert any(name.startswith("optimizer.0.exp_avg") for name in load_file(state))
    scorer = kvkeep.scorers.new("kvpop_mlp", model.config, BUDGETS, hidden=7)
    shards = harvest(model, texts(2), 4, tmp_path / "shards")
    with pytest.raises(ValueError, match="was saved by another run"):
        Fit(scorer, shards, [], Schedule(), tmp_path / "run", resume=True)

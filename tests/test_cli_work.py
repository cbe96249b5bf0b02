"""`kvkeep train` and `kvkeep benchmark` on a tiny byte-level model: results, resumption, mistakes."""

import json
import os
import subprocess
import sys

import pytest
import torch
import typer.main

import kvkeep
from kvkeep.cli import app, train_flags
from tiny import HANDED

SMALL = ("--length", "100", "--budgets", "44,60", "--preset", "mini", "--steps", "4")


def train(run, folder, texts, out, *more, method="kvpop_mlp"):
    return run("train", method, "--model", folder, "--out", out, *SMALL, *more, "--data", *texts)


@pytest.mark.parametrize("method", ["kvpop_mlp", "kvpop"])
def test_train_makes_a_scorer_that_evaluate_and_generate_take(run, folder, texts, tmp_path, method):
    out = tmp_path / "scorer"
    code, said, err = train(run, folder, texts, out, method=method)
    assert (code, err) == (0, "")
    assert "held-out loss" in said
    assert "by fitted decays times: 0.5 " in said
    assert f"{method} scorer for budgets 44, 60, from 3 documents" in said
    size = sum(shard.stat().st_size for shard in (out / "run" / "shards").iterdir()) / 1e6
    assert f"documents as read are in {out / 'run' / 'shards'} ({size:.1f} MB): needed for --resume only\n" in said
    scorer = kvkeep.load_scorer(out)
    assert [budget.slots + scorer.state_entries for budget in scorer.budgets] == [44, 60]
    assert scorer.metadata["command"].startswith(f"kvkeep train {method} --model {folder}")
    result = tmp_path / "out.json"
    options = ("--model", folder, "--budgets", "44", "--length", "100", "--json", result, "--data", *texts)
    code, said, _ = run("evaluate", "--policies", f"streaming,{method}", "--scorer", f"{method}={out}", *options)
    assert code == 0
    rows = {row["policy"]: row for row in json.loads(result.read_text())["rows"] if row["kind"] == "all"}
    assert rows[method]["slots"] + scorer.state_entries == rows["streaming"]["slots"] == 44
    if HANDED:
        budget = ("--policy", method, "--scorer", out, "--budget", "44", "--max-new-tokens", "8")
        code, said, _ = run("generate", "--model", folder, *budget, texts[0].read_text())
        assert code == 0
        assert "evicted" in said


def test_kvpop_is_trained_from_a_finished_scorer_with_the_memory_asked_for(run, folder, texts, tmp_path):
    start, out = tmp_path / "mlp", tmp_path / "kvpop"
    assert train(run, folder, texts, start)[0] == 0
    code, _, err = train(run, folder, texts, out, "--start", start, "--features", "1", method="kvpop")
    assert (code, err) == (0, "")
    scorer = kvkeep.load_scorer(out)
    assert scorer.options["features"] == 1
    assert torch.equal(scorer.layer(0).input_mean, kvkeep.load_scorer(start).layer(0).input_mean)
    code, _, err = train(run, folder, texts, tmp_path / "other", "--start", start)
    assert code == 2
    assert "--start is for kvpop on a frozen backbone" in err
    assert not (tmp_path / "other").exists()


@pytest.mark.skipif(not HANDED, reason="attention policies need a transformers that hands keywords down")
def test_foresightkv_is_trained_and_goes_on_with_dagger(run, folder, texts, tmp_path):
    budgets = ("--interval", "8", "--budget-at-rest")
    code, said, err = train(run, folder, texts, tmp_path / "sft", *budgets, method="foresightkv")
    assert (code, err) == (0, "")
    assert "held-out overlap with golden" in said
    assert "foresightkv scorer for budgets 52 (44 at rest), 68 (60 at rest), from 3 documents" in said
    scorer = kvkeep.load_scorer(tmp_path / "sft")
    assert [(budget.rest, budget.interval) for budget in scorer.budgets] == [(44, 8), (60, 8)]
    more = ("--stage", "dagger", "--start", tmp_path / "sft")
    code, _, err = train(run, folder, texts, tmp_path / "dagger", *budgets, *more, method="foresightkv")
    assert (code, err) == (0, "")
    assert kvkeep.load_scorer(tmp_path / "dagger").metadata["stage"] == "dagger"
    more = ("--stage", "rl", "--start", tmp_path / "sft", "--group-size", "2", "--steps", "1", "--reward", "all")
    code, said, err = train(run, folder, texts, tmp_path / "rl", *budgets, *more, method="foresightkv")
    assert (code, err) == (0, "")
    assert "reward on the traces trained on" in said
    reinforced = kvkeep.load_scorer(tmp_path / "rl").metadata
    assert reinforced["stage"] == "rl"
    assert reinforced["recipe"]["reinforcement"]["variant"] == "all"
    assert reinforced["start"] == scorer.fingerprint()
    code, _, err = train(
        run, folder, texts, tmp_path / "kv", *budgets, "--inputs", "kv", "--preset", "published", method="foresightkv"
    )
    assert (code, err) == (0, "")
    assert kvkeep.load_scorer(tmp_path / "kv").options["features"]["windows"] == []
    options = ("--model", folder, "--budgets", "44", "--length", "100", "--data", *texts)
    given = ("--scorer", f"foresightkv={tmp_path / 'dagger'}", "--budget-at-rest", "--interval", "8")
    code, said, err = run("evaluate", "--policies", "h2o,foresightkv", *given, *options)
    assert code == 0, err
    assert "foresightkv" in said


def test_train_goes_on_only_when_told_to(run, folder, texts, tmp_path):
    out = tmp_path / "scorer"
    code, said, _ = train(run, folder, texts, out, "--shards", tmp_path / "shards")
    assert code == 0
    assert "documents as read" not in said, "they are where the user wants them"
    before, card = kvkeep.load_scorer(out).fingerprint(), (out / "README.md").read_text()
    code, _, err = train(run, folder, texts, out)
    assert code == 2
    assert "give --resume" in err
    assert train(run, folder, texts, out, "--shards", tmp_path / "shards", "--resume")[0] == 0
    assert kvkeep.load_scorer(out).fingerprint() == before
    assert (out / "README.md").read_text() == card, "a run that was resumed is the same run"
    size = (out / "scorer.safetensors").stat().st_size
    assert train(run, folder, texts, out, "--resume", "--half")[0] == 0
    assert (out / "scorer.safetensors").stat().st_size < 0.7 * size
    code, _, err = train(run, folder, texts, out, "--resume", "--seed", "1")
    assert code == 2
    assert "cannot be resumed" in err


def test_a_scorer_stops_early_and_is_the_best_one(run, folder, texts, tmp_path):
    out = tmp_path / "scorer"
    early = ("--steps", "40", "--evaluate-every", "1", "--patience", "2", "--lr", "3")
    assert train(run, folder, texts, out, *early)[0] == 0
    lines = [json.loads(line) for line in (out / "run" / "log.jsonl").read_text().splitlines()]
    losses = [line["held_out_loss"] for line in lines]
    assert [line["waited"] for line in lines[-2:]] == [1, 2]
    assert len(lines) < 40
    told = kvkeep.load_scorer(out).metadata
    assert told["recipe"]["schedule"]["patience"] == 2
    assert told["metrics"]["held_out"]["loss"]["value"] == min(losses) < losses[-1]


@pytest.mark.skipif(not HANDED, reason="attention policies need a transformers that hands keywords down")
def test_foresightkv_stops_early_too(run, folder, texts, tmp_path):
    early = ("--steps", "40", "--evaluate-every", "1", "--patience", "1", "--lr", "1e-9", "--interval", "8")
    code, _, err = train(run, folder, texts, tmp_path / "out", *early, method="foresightkv")
    assert (code, err) == (0, "")
    assert kvkeep.load_scorer(tmp_path / "out").metadata["steps"] == 2


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes

TRAIN = {parameter.name: parameter for parameter in typer.main.get_command(app).commands["train"].params}
ALWAYS = (
    "method out more model data count length budgets steps lr evaluate_every backbone resume dtype device seed help"
)
VALUES = {
    "rank": "4",
    "targets": "q_proj",
    "kl": "tail",
    "packing": "concat",
    "compute": "own",
    "scorer": "nowhere",
    "stage": "dagger",
    "inputs": "kv",
    "follow": "snapkv",
    "window": "8",
    "interval": "8",
    "rollout": "trace",
    "group_size": "4",
    "reward": "low",
    "beta": "1",
    "loss": "regression",
    "shards": "nowhere",
    "hidden": "8",
    "decay": "off",
    "group": "max",
    "features": "1",
    "start": "nowhere",
    "preset": "mini",
    "patience": "1",
}
SITUATIONS = {
    ("kvpop",): "kvpop on a frozen backbone",
    ("kvpop_mlp",): "kvpop_mlp on a frozen backbone",
    ("foresightkv",): "the sft stage of foresightkv",
    ("foresightkv", "--stage", "dagger"): "the dagger stage of foresightkv",
    ("foresightkv", "--stage", "rl"): "the rl stage of foresightkv",
    ("streaming", "--backbone", "full"): "streaming, a rule",
    ("kvpop", "--backbone", "full"): "kvpop with --backbone full",
    ("kvpop_mlp", "--backbone", "lora"): "kvpop_mlp with --backbone lora",
    ("kvpop", "--backbone", "lora", "--scorer", "nowhere"): "kvpop with --scorer",
}
MEANT = {  # what does mean something, of all that stands in a rule
    "kvpop on a frozen backbone": "preset hidden loss decay group delay features start patience shards half",
    "kvpop_mlp on a frozen backbone": "preset hidden loss decay group patience shards half",
    "the sft stage of foresightkv": "preset hidden loss group stage inputs follow interval window at_rest "
    "patience shards half start",
    "the dagger stage of foresightkv": "preset loss group stage follow restart interval at_rest patience shards half "
    "start",
    "the rl stage of foresightkv": "preset stage interval at_rest rollout group_size reward beta patience half start",
    "streaming, a rule": "kl packing checkpointing compute shards",
    "kvpop with --backbone full": "kl packing checkpointing compute scorer train_scorer preset hidden loss decay group "
    "delay features patience shards half",
    "kvpop_mlp with --backbone lora": "rank targets kl packing checkpointing compute scorer train_scorer preset hidden "
    "loss decay group patience shards half",
    "kvpop with --scorer": "rank targets kl packing checkpointing compute scorer train_scorer shards half",
}


def test_every_flag_stands_in_a_rule_or_means_something_always():
    ruled = {name for rule in train_flags.RULES for name in rule.names.split()}
    assert ruled | set(ALWAYS.split()) == TRAIN.keys() | {"help"}
    assert not ruled & set(ALWAYS.split())


@pytest.mark.parametrize("arguments", SITUATIONS, ids=" ".join)
def test_a_flag_that_would_change_nothing_is_refused(run, no_model, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    where = SITUATIONS[arguments]
    refused = set()
    for name in {name for rule in train_flags.RULES for name in rule.names.split()}:
        option = TRAIN[name]
        for flag in (*option.opts, *option.secondary_opts):
            if name == "scorer" and flag in arguments:
                continue
            value = () if option.is_flag else (VALUES[name],)
            code, _, err = run("train", *arguments, "--out", "x", flag, *value)
            if "it means nothing for" in err and "stage" not in name:
                assert err.startswith(f"kvkeep: {flag} is for ")
                assert err.endswith(f"; it means nothing for {where}\n")
                assert (code, err.count("\n")) == (2, 1)
                refused.add(name)
            elif "is for foresightkv" in err:  # its --stage changes what is asked for
                refused.add(name)
    everything = {name for rule in train_flags.RULES for name in rule.names.split()}
    assert refused == everything - set(MEANT[where].split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "kvpop", "--out", "x", "--lr", "nan"), "--lr must be a finite number above 0, not nan"),
        (("train", "foresightkv", "--out", "x", "--lr", "inf"), "--lr must be a finite number above 0, not inf"),
        (("train", "kvpop", "--out", "x", "--backbone", "full", "--lr", "0"), "--lr must be a finite number above 0"),
        (("train", "kvpop", "--out", "x", "--patience", "-1"), "--patience"),
        (("train", "h2o", "--out", "x"), "kvpop_mlp or foresightkv, not 'h2o'"),
        (("train", "kvpop", "--out", "x", "--preset", "bset"), "unknown preset 'bset'"),
        (("train", "kvpop", "--out", "x", "--loss", "hinge"), "not 'hinge'"),
        (("train", "kvpop", "--out", "x", "--budgets", "many"), "--budgets takes numbers"),
        (("train", "kvpop", "--out", "x", "--data", "nowhere.txt"), "nowhere.txt"),
        (("train", "kvpop"), "--out"),
        (("train", "kvpop", "--out", "x", "--stage", "sft"), "--stage is for foresightkv"),
        (("train", "kvpop", "--out", "x", "--budget-at-rest"), "--budget-at-rest is for foresightkv"),
        (("train", "kvpop", "--out", "x", "--reward", "low"), "--reward is for foresightkv"),
        (("train", "foresightkv", "--out", "x", "--beta", "1"), "--beta is for --stage rl"),
        (("train", "foresightkv", "--out", "x", "--stage", "rl"), "--stage rl needs --start DIR"),
        (("train", "foresightkv", "--out", "x", "--stage", "rl", "--group-size", "1", "--start", "y"), "group of 1"),
        (("train", "foresightkv", "--out", "x", "--stage", "rl", "--reward", "high5", "--start", "y"), "not 'high5'"),
        (("train", "foresightkv", "--out", "x", "--stage", "rl", "--hidden", "8", "--start", "y"), "--hidden is for"),
        (("train", "foresightkv", "--out", "x", "--stage", "rl", "--loss", "ranking", "--start", "y"), "--loss is for"),
        (("train", "foresightkv", "--out", "x", "--delay"), "--delay is for the memory of kvpop"),
        (("train", "foresightkv", "--out", "x", "--backbone", "lora"), "on a frozen backbone"),
        (("train", "foresightkv", "--out", "x", "--stage", "dagger"), "--stage dagger needs --start DIR"),
        (("train", "foresightkv", "--out", "x", "--start", "y"), "--stage sft starts from nothing"),
        (("train", "foresightkv", "--out", "x", "--loss", "intensity"), "not 'intensity'"),
        (("train", "foresightkv", "--out", "x", "--budgets", "10", "--interval", "9"), "must be above"),
        (("benchmark", "--policies", "golden"), "oracle"),
        (("benchmark", "--policies", "h3o"), "did you mean 'h2o'"),
        (("benchmark", "--lengths", "100"), "does not fill a budget of 512"),
        (("benchmark", "--budget", "30", "--policies", "streaming"), "must be above"),
        (("benchmark", "--json", "nowhere/out.json"), "no folder"),
        (("benchmark", "--report", "nowhere/out.md"), "no folder"),
        (("benchmark", "--plot", "out.png"), "a file that ends with .svg"),
        (("benchmark", "--plot", "out.svg", "--lengths", "2048"), "two lengths or more"),
        (("benchmark", "--what", "speed"), "decode, overhead, prefill, labels, running_topk, memory, capacity, not"),
        (("benchmark", "--what", "prefill", "--lengths", "512"), "within the budget of 512"),
        (("benchmark", "--what", "overhead", "--policies", "full"), "name one"),
        (("benchmark", "--policies", "streaming,streaming"), "'streaming' is named twice"),
        (("benchmark", "--policies", "kvpop", "--budget", "30"), "must be above"),
        (("benchmark", "--policies", "full,kvpop", "--interval", "3"), "--interval 3 is for policies that decide"),
        (("benchmark", "--model", "random:gpt"), "there is no shape 'random:gpt'"),
        (("benchmark", "--scorer", "kvpop"), "--scorer takes NAME=DIR"),
        (("evaluate", "--json", "/proc/out.json"), "/proc cannot be written to"),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(run, no_model, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_train_refuses_documents_that_do_not_fill_a_budget(run, folder, texts, tmp_path):
    out = tmp_path / "scorer"
    arguments = ("--model", folder, "--out", out, "--length", "60", "--budgets", "60", "--data", *texts)
    code, _, err = run("train", "kvpop_mlp", *arguments)
    assert code == 2
    assert "nothing to learn from beside a budget that holds 60" in err
    assert not out.exists()


@pytest.mark.skipif(not HANDED, reason="h2o needs queries, which this transformers does not hand to a cache")
def test_benchmark_measures_every_row(run, folder, tmp_path):
    result = tmp_path / "out.json"
    options = ("--budget", "40", "--lengths", "50,90", "--batches", "1,2", "--repetitions", "5", "--json", result)
    policies = "full,full_preallocated,streaming,h2o"
    code, said, err = run("benchmark", "--model", folder, "--policies", policies, *options)
    assert (code, err) == (0, "")
    rows = json.loads(result.read_text())["rows"]
    assert len(rows) == 4 * 2 * 2
    assert all(row["ms_best"] <= row["ms_median"] for row in rows)
    fields = "what policy budget context batch dtype ms_best ms_median ratio kv_bytes peak_rss"
    assert set(fields.split()) < set(rows[0])
    assert {row["what"] for row in rows} == {"decode"}
    sizes = {(row["policy"], row["context"], row["batch"]): row["kv_bytes"] for row in rows}
    pair = 2 * 2 * 8 * 2 * 4  # layers, KV heads, head size, key and value, bytes
    assert sizes["full", 90, 2] - sizes["full", 50, 2] == 40 * 2 * pair
    assert sizes["full", 90, 1] == sizes["full_preallocated", 90, 1] == (90 + 5 + 2) * pair
    assert sizes["h2o", 50, 1] == sizes["h2o", 90, 1] < sizes["full", 50, 1]
    assert "full_preallocated" in said


@pytest.mark.skipif(not HANDED, reason="foresightkv needs queries, which this transformers does not hand to a cache")
def test_benchmark_measures_everything_of_random_weights(run, tmp_path):
    result, page, picture = (tmp_path / name for name in ("out.json", "out.md", "out.svg"))
    sizes = ("--budget", "64", "--lengths", "520,600", "--kv-memory", "1", "--tokens", "70", "--repetitions", "5")
    files = ("--json", result, "--report", page, "--plot", picture)
    policies = "full,kvpop_mlp,kvpop,foresightkv,h2o"
    options = ("--model", "random:qwen3-tiny", "--what", "all", "--policies", policies)
    code, said, err = run("benchmark", *options, *sizes, *files)
    assert (code, err) == (0, "")
    found = json.loads(result.read_text())
    measured = dict.fromkeys(row["what"] for row in found["rows"])
    assert list(measured) == ["decode", "overhead", "prefill", "labels", "running_topk", "memory", "capacity"]
    assert all(set(row) == set(found["rows"][0]) for row in found["rows"])
    told = found["settings"]
    assert (told["model"], told["threads"], told["dtype"]) == ("random:qwen3-tiny", 1, "bfloat16")
    assert {"load_average", "load_average_after", "torch", "transformers", "bandwidth_gb_per_s"} <= set(told)
    text = page.read_text()
    assert "kvpop: not one byte more after 70 tokens | 0 bytes | reached" in text
    assert all(f"### {what}" in text for what in ("decode", "overhead", "parts", "prefill", "capacity"))
    assert picture.read_text().startswith("<svg")
    assert "times faster" in said


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_input_that_is_not_text_is_refused(folder, command):
    program = [sys.executable, "-W", "ignore", "-m", "kvkeep.cli", command, "--model", str(folder), "--policy", "full"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PYTHONUTF8": "1"}
    done = subprocess.run(program, input=b"hello\n\xff\xfe\n", capture_output=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.decode().strip() == "kvkeep: standard input is not UTF-8 text"


@pytest.mark.parametrize("seed", ["-1", "99999999999999999999"])
@pytest.mark.parametrize("command", ["generate", "evaluate", "demo"])
def test_seeds_out_of_range_are_named(run, no_model, command, seed):
    code, _, err = run(command, "--seed", seed)
    assert code == 2
    assert "--seed" in err


def test_interval_without_a_policy_that_has_one_is_refused(run, no_model):
    code, _, err = run("evaluate", "--policies", "streaming,random", "--interval", "3")
    assert code == 2
    assert "--interval 3 is for policies that decide every interval" in err

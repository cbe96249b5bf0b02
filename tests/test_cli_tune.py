"""`kvkeep train --backbone` on a tiny byte-level model: adapters and models that evaluate takes, mistakes."""

import json

import pytest

import kvkeep

CLI = ("--length", "100", "--budgets", "44,60", "--steps", "4")
MINI = ("--preset", "mini")  # of a scorer that is trained first
LORA = ("--backbone", "lora")


def log_of(out):
    return [json.loads(line) for line in (out / "run" / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("backbone", ["lora", "full"])
@pytest.mark.parametrize("method", ["streaming", "kvpop_mlp"])
def test_command_tunes_and_evaluate_takes_the_result(run, folder, texts, tmp_path, method, backbone):
    out, result = tmp_path / "tuned", tmp_path / "out.json"
    first = () if method == "streaming" else MINI
    options = ("--model", folder, "--out", out, *CLI, *first, "--backbone", backbone, "--gradient-checkpointing")
    code, said, err = run("train", method, *options, "--data", *texts)
    assert (code, err) == (0, "")
    assert "held-out KL to the untuned model" in said
    assert f"tuned under {method} at 44, 60 tokens" in said
    folders = [out / "run" / "shards", *([out / "run" / "scorer" / "run" / "shards"] if first else [])]
    assert f"documents as read are in {' and '.join(map(str, folders))} (" in said
    command = json.loads((out / "tune.json").read_text())["command"]
    written = [path.stat().st_mtime_ns for path in (out / "run" / "scorer").glob("*.*")]
    again = ("train", method, *options)
    scorer = () if method == "streaming" else ("--scorer", f"{method}={out / 'scorer'}")
    options = ("--policies", method, *scorer, "--budgets", "44", "--length", "100", "--json", result)
    code, _, err = run("evaluate", "--model", out, *options, "--data", *texts)
    assert (code, err) == (0, "")
    assert json.loads(result.read_text())["rows"][0]["loss"] > 0
    code, _, err = run(*again, "--data", *texts)
    assert code == 2
    assert "--resume" in err
    assert run(*again, "--resume", "--data", *texts)[0] == 0
    assert json.loads((out / "tune.json").read_text())["command"] == command
    assert [path.stat().st_mtime_ns for path in (out / "run" / "scorer").glob("*.*")] == written, "trained once"


@pytest.mark.parametrize("packing", ["concat", "reset"])
def test_command_resumes_packs_and_takes_a_scorer(run, folder, texts, tmp_path, packing):
    first = ("train", "kvpop_mlp", "--model", folder, *CLI)
    assert run(*first, *MINI, "--out", tmp_path / "scorer", "--data", *texts)[0] == 0
    options = ("--backbone", "lora", "--packing", packing, "--scorer", tmp_path / "scorer", "--train-scorer")
    options = (*options, "--out", tmp_path / "tuned", "--compute", "bfloat16", "--data", *texts)
    assert run(*first, *options)[0] == 0
    once = (tmp_path / "tuned" / "tune.json").read_text()
    code, _, err = run(*first, "--resume", *options)
    assert (code, err) == (0, "")
    again = (tmp_path / "tuned" / "tune.json").read_text()
    assert json.loads(again) | {"command": None} == json.loads(once) | {"command": None}


def test_budgets_are_those_asked_for_with_the_memory_of_the_scorer(run, folder, texts, tmp_path):
    out = tmp_path / "tuned"
    options = ("--model", folder, "--out", out, *CLI, *MINI, *LORA, "--half", "--evaluate-every", "2", "--train-scorer")
    code, said, err = run("train", "kvpop", *options, "--data", *texts)
    assert (code, err) == (0, "")
    assert "tuned under kvpop at 44, 60 tokens" in said
    record = json.loads((out / "tune.json").read_text())
    scorer = kvkeep.load_scorer(out / "scorer")
    assert record["state_entries"] == scorer.state_entries > 0
    assert [sum(budget.values()) + record["state_entries"] for budget in record["budgets"]] == [44, 60]
    log = log_of(out)
    assert {line["budget"] for line in log if "budget" in line} == {44, 60}
    assert [line["step"] for line in log if "held_out_kl" in line] == [0, 2, 4]
    assert json.loads((out / "scorer" / "config.json").read_text())["weights"]["matrices"] == "float16"
    assert scorer.metadata["tuned"]["scorer_trained_on"] == "the untuned backbone, then along with the tuned one"
    first = kvkeep.load_scorer(out / "run" / "scorer")
    assert scorer.metadata["tuned"]["scorer"] == first.fingerprint()
    assert [line["held_out_loss"] for line in log_of(out / "run" / "scorer")[1::2]], "evaluated every 2 steps as well"


def test_a_scorer_of_other_flags_is_not_taken_for_this_one(run, folder, texts, tmp_path):
    out = tmp_path / "tuned"
    options = ("--model", folder, "--out", out, *CLI, *MINI, *LORA, "--data", *texts)
    assert run("train", "kvpop_mlp", *options)[0] == 0
    before = (out / "scorer" / "scorer.safetensors").read_bytes()
    code, _, err = run("train", "kvpop_mlp", *options, "--resume", "--hidden", "8")
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot be resumed" in err
    assert (out / "scorer" / "scorer.safetensors").read_bytes() == before


@pytest.mark.parametrize("targets", ["nope", "q_proj,qkv_proj", ""])
def test_targets_are_checked_before_a_scorer_is_trained(run, folder, texts, tmp_path, targets):
    out = tmp_path / "tuned"
    options = ("--model", folder, "--out", out, *CLI, *MINI, *LORA, "--targets", targets, "--data", *texts)
    code, said, err = run("train", "kvpop_mlp", *options)
    assert (code, said, err.count("\n")) == (2, "", 1)
    if targets:
        layers = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head"
        missing = targets.rpartition(",")[2]
        assert f"targets {missing} match no linear layer of LlamaForCausalLM, which has {layers}" in err
    else:
        assert "targets must name at least one linear layer" in err
    assert not out.exists()


def test_a_folder_of_something_else_is_refused_before_a_scorer_is_trained(run, folder, texts, tmp_path):
    model, tuned, file = tmp_path / "model", tmp_path / "tuned", tmp_path / "file"
    model.mkdir()
    (model / "config.json").write_text("{}")
    file.write_text("")
    options = ("--model", folder, *CLI, *LORA, "--data", *texts)
    assert run("train", "streaming", "--out", tuned, *options)[0] == 0
    before = sorted(tmp_path.rglob("*"))
    for out, resume, words in (
        (model, (), "holds config.json, which no training run put there"),
        (file, (), "is a file; it should be a folder"),
        (tuned, (), "holds a run already: give --resume"),
        (tuned, ("--resume",), "trained no scorer of its own; it cannot be resumed"),
    ):
        code, _, err = run("train", "kvpop_mlp", "--out", out, *MINI, *resume, *options)
        assert (code, err.count("\n")) == (2, 1)
        assert words in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("streaming",), "--backbone lora or full"),
        (("streaming", "--backbone", "lora", "--scorer", "x"), "--scorer is for a method that has a scorer"),
        (("streaming", "--backbone", "lora", "--budgets", "10"), "a budget of 10 slots must be above"),
        (("kvpop", "--scorer", "x"), "for a tuned backbone"),
        (("kvpop", "--train-scorer"), "for a tuned backbone"),
        (("kvpop", "--backbone", "lora", "--scorer", "nowhere/at/all"), "nowhere/at/all"),
        (("kvpop", "--backbone", "lora", "--kl", "reverse"), "kl is one of"),
        (("kvpop", "--backbone", "quarter"), "--backbone"),
        (("h2o", "--backbone", "lora"), "not 'h2o'"),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(run, no_model, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("train", *arguments, "--out", "x")
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())

"""`kvkeep train --backbone` on a tiny byte-level model: adapters and models that evaluate takes, mistakes."""

import json

import pytest

CLI = ("--length", "100", "--budgets", "44,60", "--preset", "mini", "--steps", "4")


@pytest.mark.parametrize("backbone", ["lora", "full"])
@pytest.mark.parametrize("method", ["streaming", "kvpop_mlp"])
def test_command_tunes_and_evaluate_takes_the_result(run, folder, texts, tmp_path, method, backbone):
    out, result = tmp_path / "tuned", tmp_path / "out.json"
    options = ("--model", folder, "--out", out, *CLI, "--backbone", backbone, "--gradient-checkpointing")
    code, said, err = run("train", method, *options, "--data", *texts)
    assert (code, err) == (0, "")
    assert "held-out KL to the untuned model" in said
    assert f"tuned under {method} at" in said
    scorer = () if method == "streaming" else ("--scorer", f"{method}={out / 'scorer'}")
    options = ("--policies", method, *scorer, "--budgets", "44", "--length", "100", "--json", result)
    code, _, err = run("evaluate", "--model", out, *options, "--data", *texts)
    assert (code, err) == (0, "")
    assert json.loads(result.read_text())["rows"][0]["loss"] > 0
    again = ("train", method, "--model", folder, "--out", out, *CLI, "--backbone", backbone, "--gradient-checkpointing")
    code, _, err = run(*again, "--data", *texts)
    assert code == 2
    assert "--resume" in err
    assert run(*again, "--resume", "--data", *texts)[0] == 0


@pytest.mark.parametrize("packing", ["concat", "reset"])
def test_command_resumes_packs_and_takes_a_scorer(run, folder, texts, tmp_path, packing):
    first = ("train", "kvpop_mlp", "--model", folder, *CLI)
    assert run(*first, "--out", tmp_path / "scorer", "--data", *texts)[0] == 0
    options = ("--backbone", "lora", "--packing", packing, "--scorer", tmp_path / "scorer", "--train-scorer")
    options = (*options, "--out", tmp_path / "tuned", "--compute", "bfloat16", "--data", *texts)
    assert run(*first, *options)[0] == 0
    once = (tmp_path / "tuned" / "tune.json").read_text()
    code, _, err = run(*first, "--resume", *options)
    assert (code, err) == (0, "")
    again = (tmp_path / "tuned" / "tune.json").read_text()
    assert json.loads(again) | {"command": None} == json.loads(once) | {"command": None}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("streaming",), "--backbone lora or full"),
        (("streaming", "--backbone", "lora", "--scorer", "x"), "takes no scorer"),
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

"""Scorer checkpoints: round trips, cards, saves killed half-way, whatever must be refused, fingerprints, the hub."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file

import kvkeep
from all_policies import ENTRY, random_scorer
from kvkeep import Budget, scorers
from kvkeep.scorers import checkpoint, model_fingerprint
from test_scorers import SMOL, pairs
from tiny import tiny_model

CONFIG = tiny_model().config
METADATA = {
    "base_model": "someone/tiny",
    "base_fingerprint": "0123456789abcdef",
    "data_fingerprint": "fedcba9876543210",
    "metrics": {"loss_ratio": {"value": 1.083, "interval": [1.041, 1.143]}, "documents": 24},
    "command": "kvkeep train kvpop --seed 3",
    "seed": 3,
}


def made(name="kvpop", seed=0, **options):
    options = {"features": 4, "delay": False} | options if name == "kvpop" else options
    return random_scorer(name, CONFIG, ENTRY, log_gamma=-0.25, seed=seed, decay_step=16, **options)


# --- Round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", scorers.METHODS)
def test_a_scorer_comes_back_whole(name, tmp_path):
    scorer = made(name)
    scorer.decay_factors = {128: 2.0, 256: 1.25}
    assert scorer.save_pretrained(tmp_path / "new" / "scorer", **METADATA) == tmp_path / "new" / "scorer"
    back = kvkeep.load_scorer(str(tmp_path / "new" / "scorer"))
    assert back.fingerprint() == scorer.fingerprint()
    assert back.metadata == METADATA
    for attribute in [
        "method",
        "options",
        "layout",
        "budgets",
        "state_entries",
        "decay_step",
        "decay_factors",
        "geometry",
    ]:
        assert getattr(back, attribute) == getattr(scorer, attribute)
    assert not back.training
    inputs = torch.randn(1, *scorer.layer(1).input_mean.shape, generator=torch.Generator().manual_seed(0))[:, :, None]
    assert torch.equal(
        *(
            each.layer(1).score((inputs,), (inputs,), each.initial_state(1, 1, inputs.device, window=4))
            for each in (back, scorer)
        )
    )
    assert sorted(os.listdir(tmp_path / "new" / "scorer")) == ["README.md", "config.json", "scorer.safetensors"]


@pytest.mark.parametrize("factors", [{"0": 1.0}, {"x": 1.0}, {"128": -1.0}, {"128": float("nan")}, {"128": "2"}])
def test_decay_factors_that_make_no_sense_are_refused(tmp_path, factors):
    made().save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    record["decay"]["factors"] = factors
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(scorers.ScorerError, match="decay factors are numbers from 0 per tokens held"):
        kvkeep.load_scorer(tmp_path)


def test_config_says_what_it_is(tmp_path):
    made().save_pretrained(tmp_path, **METADATA)
    record = json.loads((tmp_path / "config.json").read_text())
    assert (record["format_version"], record["library_version"]) == (1, kvkeep.__version__)
    assert (record["method"], record["options"]["features"], record["state_entries"]) == ("kvpop", 4, 6)
    assert record["budgets"] == [{"sinks": 2, "window": 4, "topk": 10, "interval": 0}]
    assert record["layout"]["bounded"][1] == {"index": 1, "kv_heads": 2, "query_heads": 6, "head_dim": 8}
    assert record["layout"]["rotary"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert record["decay"] == {"step": 16, "log_gamma": [-0.375, -0.125], "factors": {}}
    assert record["inputs"] == {"version": 1, "order": ["key after rotary", "value"]}
    assert {name: record[name] for name in checkpoint.KNOWN} == {name: METADATA[name] for name in checkpoint.KNOWN}
    assert record["metadata"] == {"command": METADATA["command"], "seed": 3}


@pytest.mark.parametrize(("name", "limit"), [("kvpop_mlp", 3.2e6), ("kvpop", 5.5e6)])
def test_files_for_a_small_model_are_a_few_megabytes(name, limit, tmp_path):
    scorer = scorers.new(name, SMOL, 128)
    scorer.save_pretrained(tmp_path / "full")
    scorer.save_pretrained(tmp_path / "half", half=True)
    full, half = ((tmp_path / kind / "scorer.safetensors").stat().st_size for kind in ("full", "half"))
    assert full < limit
    assert half < 0.6 * full


def test_half_precision_costs_a_thousandth(tmp_path):
    scorer = made("kvpop")
    scorer.save_pretrained(tmp_path, half=True)
    back = kvkeep.load_scorer(tmp_path)
    keys, values = pairs(200)
    exact, rounded = scorer(0, keys, values, 4), back(0, keys, values, 4)
    assert 0 < (exact - rounded).abs().max() < 5e-3 * exact.std()
    stored = load_file(tmp_path / "scorer.safetensors")
    assert stored["layers.0.w1"].dtype == torch.float16
    assert torch.equal(stored["layers.0.log_gamma"], scorer.layer(0).log_gamma)
    with torch.no_grad():
        scorer.layer(0).w1[0, 0, 0] = 1e6
    with pytest.raises(ValueError, match=r"'layers.0.w1' of the scorer is too large for float16, so it was not saved"):
        scorer.save_pretrained(tmp_path / "never", half=True)
    assert not (tmp_path / "never").exists()


def test_a_scorer_that_is_not_finite_is_not_saved(tmp_path):
    scorer = made("kvpop_mlp")
    scorer.save_pretrained(tmp_path)
    good = scorer.fingerprint()
    with torch.no_grad():
        scorer.layer(1).w2[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"'layers.1.w2' of the scorer is NaN or infinite, so it was not saved"):
        scorer.save_pretrained(tmp_path)
    assert kvkeep.load_scorer(tmp_path).fingerprint() == good
    with pytest.raises(ValueError, match="must fit into JSON"):
        made().save_pretrained(tmp_path, metrics={"loss": float("nan")})
    assert kvkeep.load_scorer(tmp_path).fingerprint() == good


def test_float64_scorers_are_stored_in_float32(tmp_path):
    made().double().save_pretrained(tmp_path)
    assert kvkeep.load_scorer(tmp_path).fingerprint() == made().fingerprint()


# --- Killed while saving ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", range(9))
def test_a_save_killed_at_any_step_leaves_a_whole_scorer(step, tmp_path, monkeypatch):
    """Each of three files is opened, written to and renamed; the process dies at the given one of these."""
    old, new, third = made(seed=1), made(seed=2), made(seed=3)
    old.save_pretrained(tmp_path)
    (tmp_path / "log.jsonl").write_text("{}\n")
    for victim, reached in ((new, step), (third, 5)):  # the second dies with all written and nothing renamed
        calls = iter(range(100))

        def dying(real, calls=calls, reached=reached):
            def call(*arguments):
                if next(calls) == reached:
                    raise KeyboardInterrupt
                return real(*arguments)

            return call

        with monkeypatch.context() as patched:
            patched.setattr(checkpoint.os, "fsync", dying(os.fsync))
            patched.setattr(checkpoint.os, "replace", dying(os.replace))
            patched.setattr("builtins.open", dying(open))
            with pytest.raises(KeyboardInterrupt):
                victim.save_pretrained(tmp_path, seed=victim is new)
        left = kvkeep.load_scorer(tmp_path)
        assert left.fingerprint() in {old.fingerprint(), new.fingerprint()}
        assert (left.fingerprint() == new.fingerprint()) == bool(left.metadata.get("seed"))
    third.save_pretrained(tmp_path)
    assert kvkeep.load_scorer(tmp_path).fingerprint() == third.fingerprint()
    assert sorted(os.listdir(tmp_path)) == ["README.md", "config.json", "log.jsonl", "scorer.safetensors"]


LOOP = """
import sys
sys.path[:0] = {paths!r}
from test_checkpoint import made
scorers = [made(seed=seed) for seed in (1, 2)]
scorers[0].save_pretrained({folder!r}, seed=0)
print("ready", flush=True)
while True:
    for seed, scorer in enumerate(scorers):
        scorer.save_pretrained({folder!r}, seed=seed)
"""


@pytest.mark.slow
def test_kill_9_while_saving_leaves_a_whole_scorer(tmp_path):
    known = {made(seed=seed).fingerprint(): seed - 1 for seed in (1, 2)}
    here = Path(__file__).parent
    program = LOOP.format(paths=[str(here), str(here.parent / "src")], folder=str(tmp_path))
    for attempt in range(3):
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            time.sleep(0.2 + 0.05 * random.Random(attempt).random())
            process.send_signal(signal.SIGKILL)
        left = kvkeep.load_scorer(tmp_path)
        assert known[left.fingerprint()] == left.metadata["seed"]


# --- The hub ---------------------------------------------------------------------------------------------------------


class Hub:
    """Remembers what it was given; refuses everybody but "me"."""

    def __init__(self, store):
        self.store, self.made = store, []

    def __call__(self, token=None):
        self.token = token
        return self

    def create_repo(self, repo_id, private, exist_ok):
        if not repo_id.startswith("me/"):
            raise OSError("403 Forbidden\nlong explanation")
        self.made.append((repo_id, private))

    def upload_folder(self, repo_id, folder_path, commit_message):
        for file in Path(folder_path).iterdir():
            (self.store / file.name).write_bytes(file.read_bytes())
        return f"https://hub/{repo_id}"


def test_push_and_load_through_the_hub(tmp_path, monkeypatch):
    hub, scorer = Hub(tmp_path), made()
    scorer.metadata = {"command": "kvkeep train"}
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, allow_patterns: str(tmp_path))
    assert scorer.push_to_hub("me/scorer", token="secret", private=True) == "https://hub/me/scorer"
    assert (hub.token, hub.made) == ("secret", [("me/scorer", True)])
    back = kvkeep.load_scorer("me/scorer")
    assert (back.fingerprint(), back.metadata) == (scorer.fingerprint(), {"command": "kvkeep train"})
    with pytest.raises(ValueError, match=r"could not be uploaded to 'you/scorer': 403 Forbidden$"):
        scorer.push_to_hub("you/scorer")


# --- Fingerprints of models ------------------------------------------------------------------------------------------


def test_fingerprints_name_the_weights_whatever_their_dtype():
    stored = tiny_model(dtype=torch.bfloat16)
    print_ = model_fingerprint(stored)
    assert len(print_) == 16
    for dtype in (torch.float32, torch.float64):
        assert model_fingerprint(tiny_model(dtype=torch.bfloat16).to(dtype)) == print_
        assert model_fingerprint(tiny_model(dtype=dtype)) == print_  # rounds as the cast does
    assert model_fingerprint(stored.state_dict()) == print_
    assert model_fingerprint(dict(reversed(list(stored.state_dict().items())))) == print_
    assert model_fingerprint(stored.model) != print_  # without the head
    assert model_fingerprint(tiny_model(seed=1)) != print_
    assert model_fingerprint(tiny_model("qwen2")) != print_


def test_fingerprints_ignore_ties_and_notice_training():
    tied = SimpleNamespace(weight=torch.randn(30, 4))
    assert model_fingerprint({"a": tied.weight, "b": tied.weight}) == model_fingerprint({"b": tied.weight})
    model = tiny_model(dtype=torch.float32)
    before = model_fingerprint(model)
    model.model.layers[1].mlp.up_proj.weight.mul_(1.02)
    assert model_fingerprint(model) != before
    with pytest.raises(ValueError, match="'w' is on the meta device"):
        model_fingerprint({"w": torch.zeros(3, device="meta")})
    with pytest.raises(ValueError, match="without weights"):
        model_fingerprint({})


def test_fingerprints_of_a_scorer_see_buffers_and_options():
    prints = {made(seed=0).fingerprint(), made(seed=1).fingerprint(), made(chunk=9).fingerprint()}
    scorer = made()
    for change in (lambda: scorer.set_decay(-0.1), lambda: scorer.layer(0).input_mean.add_(1)):
        change()
        prints.add(scorer.fingerprint())
    assert len(prints) == 5
    assert Budget(2, 4, 10) == ENTRY

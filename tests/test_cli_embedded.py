"""The commands in processes of their own, on the embedded model: fetched and converted the first time."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvkeep

pytestmark = pytest.mark.slow


def kvkeep_process(*arguments, **options):
    command = [sys.executable, "-m", "kvkeep.cli", *map(str, arguments)]
    source = Path(kvkeep.__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source), "COLUMNS": "120"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def finished(*arguments, stdin=None):
    process = kvkeep_process(*arguments, stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL)
    out, err = process.communicate(stdin, timeout=600)
    return process.returncode, out, err


def test_the_embedded_model_writes_english_within_a_budget():
    prompt = "The history of the lighthouse begins in ancient Egypt. " * 12
    code, out, err = finished("generate", prompt, "--policy", "h2o", "--budget", "64", "--max-new-tokens", "24")
    assert code == 0, err
    assert re.search(r"[a-z]+ [a-z]+ [a-z]+", out.splitlines()[0] + out)
    assert "24 tokens" in out
    assert err == ""


def test_the_embedded_model_chats():
    code, out, err = finished("chat", "--max-new-tokens", "24", stdin="What is the capital of France?\n/exit\n")
    assert code == 0, err
    assert "Paris" in out


def test_golden_is_far_ahead_of_the_rules_on_the_embedded_model(tmp_path):
    out = tmp_path / "out.json"
    arguments = ("--policies", "streaming,h2o_decayed,golden", "--budgets", "128", "--budget-at-rest")
    arguments += ("--length", "640")
    code, _, err = finished("evaluate", *arguments, "--kinds", "procedural", "--documents", "2", "--json", out)
    assert code == 0, err
    ratio = {row["policy"]: row["loss_ratio"] for row in json.loads(out.read_text())["rows"] if row["kind"] == "all"}
    assert ratio["golden"] - 1 < 0.7 * (min(ratio["streaming"], ratio["h2o_decayed"]) - 1)


def test_a_killed_evaluation_goes_on_and_ends_the_same(folder, texts, tmp_path):
    arguments = ["evaluate", "--model", folder, "--policies", "streaming,random", "--budgets", "40,48,56"]
    arguments += ["--length", "100", "--data", *texts]
    whole, killed = tmp_path / "whole.json", tmp_path / "killed.json"
    assert finished(*arguments, "--json", whole)[0] == 0
    process = kvkeep_process(*arguments, "--json", killed, stdin=subprocess.DEVNULL)
    work = tmp_path / "killed.json.work"
    for _ in range(6000):
        if process.poll() is not None or (work.is_dir() and len(list(work.iterdir())) >= 3):
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not killed.exists() or process.returncode == 0
    done = {path.name: path.stat().st_mtime_ns for path in work.glob("*.json")}
    assert finished(*arguments, "--json", killed)[0] == 0
    assert json.loads(killed.read_text()) == json.loads(whole.read_text())
    assert {path.name: path.stat().st_mtime_ns for path in work.glob("*.json") if path.name in done} == done


def test_the_demo_shows_both_and_measures():
    code, out, err = finished("demo")
    assert code == 0, err
    for name in ("full", "streaming", "h2o_decayed", "kvpop_mlp", "kvpop", "foresightkv", "golden"):
        assert name in out
    assert out.count("tokens/s") >= 2
    assert out.count("Pepper") >= 3, "said, remembered with the full cache, and with a trained scorer in half of it"
    assert "loss ratio" in out

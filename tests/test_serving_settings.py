"""What an engine is told, and what it refuses in a sentence before it starts."""

from __future__ import annotations

import json
import re
import socket
import sys

import pytest

import kvkeep
from all_policies import ENTRY, random_scorer
from kvkeep.scorers import model_fingerprint
from kvkeep.serving import server
from kvkeep.serving.settings import Attention, Engine, Settings, block_slots, checkpoint_fingerprint
from tiny import tiny_model


def test_a_record_becomes_the_policy_of_the_command_line():
    settings = Settings.of({"policy": "random", "budget": 100, "sinks": 2, "window": 8, "seed": 3})
    policy = settings.make(None)
    assert (policy.name, policy.seed, policy.budget) == ("random", 3, kvkeep.Budget(2, 8, 90))
    assert Settings.of(settings.to_json()) == settings
    at_rest = Settings.of({"policy": "h2o", "budget": 96, "budget_at_rest": True, "interval": 32}).make(None)
    assert (at_rest.budget.rest, at_rest.budget.slots) == (96, 128)


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (None, "a record with policy and budget, not None"),
        ({"policy": "random"}, "need budget"),
        ({"policy": "random", "budget": 64, "windows": 3}, "have no windows"),
        ({"policy": "random", "budget": 64.5}, "budget must be an integer, not 64.5"),
        ({"policy": "random", "budget": True}, "budget must be an integer, not True"),
        ({"policy": "golden", "budget": 64}, "'golden' is an oracle"),
        ({"policy": "full", "budget": 64}, "'full' evicts nothing"),
        ({"policy": "streamin", "budget": 64}, "did you mean 'streaming'"),
    ],
)
def test_a_bad_record_is_refused(record, complaint):
    with pytest.raises(ValueError, match=complaint):
        Settings.of(record)


@pytest.mark.parametrize(
    ("engine", "complaint"),
    [
        (Engine(prefix_caching=True), "--no-enable-prefix-caching"),
        (Engine(speculative="ngram"), "speculative decoding .ngram. takes tokens back"),
        (Engine(cache_dtype="fp8"), "not quantised: kv-cache-dtype auto, not fp8"),
        (Engine(context_parallel=2), "context parallelism over 2 devices"),
        (Engine(microbatches=True), "microbatches"),
        (Engine(connector="NixlConnector"), "the KV connector NixlConnector"),
    ],
)
def test_an_engine_that_cannot_work_is_refused(engine, complaint):
    Engine().require_possible()
    with pytest.raises(ValueError, match=complaint):
        engine.require_possible()


@pytest.mark.parametrize(
    ("attention", "complaint"),
    [
        (Attention("layer 3", sliding_window=512), "layer 3 has a sliding window of 512"),
        (Attention("layer 3", softcap=True), "softcap"),
        (Attention("layer 3", sinks=True, alibi=True), "sinks, alibi"),
        (Attention("layer 3", decoder=False), "a cache of its own"),
        (Attention("layer 3", shares="layer 1"), "a cache of its own"),
    ],
)
def test_a_layer_that_attends_otherwise_is_refused(attention, complaint):
    Attention("layer 3").require_plain()
    with pytest.raises(ValueError, match=complaint):
        attention.require_plain()


def test_a_scorer_of_another_model_is_refused_by_shape_and_by_weights(tmp_path):
    model, other = tiny_model(), tiny_model(seed=1)
    model.save_pretrained(tmp_path / "model")
    other.save_pretrained(tmp_path / "other")
    scorer = random_scorer("kvpop_mlp", model.config, ENTRY)
    path = scorer.save_pretrained(tmp_path / "scorer", base_fingerprint=model_fingerprint(model))
    settings = Settings("kvpop_mlp", 64, scorer=str(path))
    assert settings.scorer_for(model.config, tmp_path / "model").fingerprint() == scorer.fingerprint()
    with pytest.raises(ValueError, match="weights with fingerprint"):
        settings.scorer_for(other.config, tmp_path / "other")
    with pytest.raises(ValueError, match="KV heads"):
        settings.scorer_for(tiny_model(kv_heads=1).config)
    with pytest.raises(ValueError, match="no kvpop_mlp scorer is shipped"):
        Settings("kvpop_mlp", 64).scorer_for(model.config)
    with pytest.raises(ValueError, match="takes no scorer"):
        Settings("random", 64, scorer=str(path)).scorer_for(model.config)


@pytest.mark.parametrize("shards", ["5GB", "20KB"])
def test_a_checkpoint_has_the_fingerprint_of_its_model(shards, tmp_path):
    """Also where it is split over files; a folder without safetensors has none."""
    model = tiny_model()
    model.save_pretrained(tmp_path / "model", max_shard_size=shards)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > (shards == "20KB")
    assert checkpoint_fingerprint(tmp_path / "model") == model_fingerprint(model)
    assert checkpoint_fingerprint(tmp_path) is None
    assert checkpoint_fingerprint("owner/name") is None


def test_blocks_are_rounded_up_to_what_a_kernel_needs():
    assert [block_slots(slots, 32) for slots in (1, 32, 33, 256)] == [32, 32, 64, 256]


# --- The command line and the child process ---------------------------------------------------------------------------


def test_the_server_is_vllms_with_our_settings(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    settings = Settings("streaming", 64, window=8)
    line = server.command("/models/m", "m", settings, "0.0.0.0", 80, ["--max-model-len", "512"])
    assert line[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    given = json.loads(line[line.index("--additional-config") + 1])
    assert Settings.of(given["kvkeep"]) == settings
    assert "--no-enable-prefix-caching" in line
    assert line[-2:] == ["--max-model-len", "512"]
    assert server.environment()["VLLM_PLUGINS"] == "mine,kvkeep"
    monkeypatch.delenv("VLLM_PLUGINS")
    assert "kvkeep" in server.environment()["VLLM_PLUGINS"].split(",")


FAKE = """
import http.server, json, sys
answers = json.loads(sys.argv[2])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        found = answers.get(self.path)
        self.send_response(404 if found is None else 200)
        body = json.dumps(found).encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
REPORT = {"layers": 2, "running": 2, "evicted": 0, "budget": {"slots": 64}}
MODELS = {"data": [{"id": "m", "max_model_len": 512}]}


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.mark.parametrize(
    ("answers", "complaint"),
    [
        ({}, "the server runs without kvkeep .*it would keep every token"),
        ({"/kvkeep": {"layers": 0}}, "no layer evicts"),
        ({"/kvkeep": REPORT, "/v1/models": MODELS, "/v1/completions": {}}, "did not evict from a prompt of 80 tokens"),
    ],
    ids=["plugin-missing", "plugin-idle", "plugin-asleep"],
)
def test_a_server_that_runs_dense_is_found_out(answers, complaint):
    """A server that answers as vLLM would, were the plugin not loaded or not at work."""
    port = free_port()
    arguments = [sys.executable, "-c", FAKE, str(port), json.dumps({"/health": {}} | answers)]
    running = server.Server(arguments, f"http://127.0.0.1:{port}", echo=lambda line: None)
    try:
        running.wait_until_healthy(60)
        with pytest.raises(RuntimeError, match=complaint):
            running.prove_eviction()
    finally:
        running.stop()
    assert running.process.poll() is not None


def test_a_refusal_is_the_sentence_that_the_worker_wrote():
    text = "print('ERROR x.Refused: kvkeep refuses: a budget of 9 is odd'); raise SystemExit(1)"
    lines = []
    running = server.Server([sys.executable, "-c", text], "http://127.0.0.1:1", echo=lines.append)
    with pytest.raises(ValueError, match=r"^a budget of 9 is odd$"):
        running.wait_until_healthy(60)
    assert lines == ["ERROR x.Refused: kvkeep refuses: a budget of 9 is odd"]
    running = server.Server([sys.executable, "-c", "raise SystemExit(3)"], "http://127.0.0.1:1", echo=lines.append)
    with pytest.raises(RuntimeError, match="stopped with code 3"):
        running.wait_until_healthy(60)


def test_concurrency_counts_whole_pages():
    report = {"blocks": 101, "page": 64 * 1024 + 4096, "token": 1024, "longest": 2000}
    assert server.concurrency(report) == (100.0, pytest.approx(100 * 68 / 2000))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--policy", "golden"], "oracle"),
        (["--policy", "full"], "evicts nothing"),
        (["--policy", "streaming", "--budget", "20"], "sinks 4 . window 32"),
        (["--prefill", "dense"], "--prefill sparse"),
        (["--port", "0"], "free port"),
        (["--engine", "transformers", "--", "--max-model-len", "9"], "no flags of vLLM"),
        ([], "vLLM is not installed here"),
    ],
)
def test_the_command_finds_a_mistake_before_anything_slow(flags, complaint, run, no_model):
    code, _, err = run("serve", *flags)
    assert code == 2
    assert len(err.splitlines()) == 1
    assert re.search(complaint, err), err

"""What `kvkeep benchmark` measures with: turns, rows, overhead, prompts, labels, limits and shapes."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config

from benchmarked import BUDGET, CONTEXT, NAMES, equipped, states_for
from kvkeep.benchmark import decode, labels, limit, memory, overhead, peak, prefill, shapes, suite, timing
from kvkeep.benchmark.caches import (
    States,
    contenders,
)
from tiny import HANDED, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


# --- Turns and rows --------------------------------------------------------------------------------------------------


def test_jobs_take_turns_and_only_calls_are_on_the_clock(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr(timing, "clock_of", lambda _: ("test", lambda call: _spent(now, call)))

    def job(name, takes):
        def prepare():
            now[0] += 100
            return (name,)

        def call(given):
            order.append(given)
            now[0] += takes

        return timing.Job(call, prepare)

    told = []
    taken = timing.in_turns([job("a", 1), job("b", 2)], 5, torch.device("cpu"), lambda *done: told.append(done))
    assert taken == [[1.0] * 5, [2.0] * 5]
    assert "".join(order) == "abba" * 3 + "ab"
    assert told == [(turn, 7) for turn in range(1, 8)]


def _spent(now, call):
    start = now[0]
    call()
    return now[0] - start


def test_the_clock_is_processor_time_of_one_thread():
    assert torch.get_num_threads() == 1
    name, clock = timing.clock_of(torch.device("cpu"))
    assert name == "processor time of the thread"
    assert clock(lambda: torch.cuda.is_available() or __import__("time").sleep(0.2)) < 100


def test_rows_have_all_fields_and_no_other():
    row = timing.row("decode", "full", torch.bfloat16, [3.00049, 1.0, 2.0], batch=2)
    assert tuple(row) == timing.FIELDS
    assert (row["dtype"], row["ms_best"], row["ms_median"], row["batch"], row["peak_rss"]) == (
        "bfloat16",
        1,
        2,
        2,
        None,
    )
    with pytest.raises(TypeError, match="colour"):
        timing.row("decode", "full", torch.bfloat16, colour="red")


def test_decode_rows_compare_with_the_first_evicting_policy_at_the_shortest_context(model):
    found = equipped(model, "full", "streaming", "random")
    limit_ = limit.Bandwidth(1e9, "test")
    rows = decode.decode(model, found, BUDGET, [CONTEXT, 60], batches=[1, 2], repetitions=5, bandwidth=limit_)
    assert [(row["policy"], row["context"], row["batch"]) for row in rows] == [
        (name, context, batch)
        for batch in (1, 2)
        for context in (CONTEXT, 60)
        for name in ("full", "streaming", "random")
    ]
    for batch in (1, 2):
        group = [row for row in rows if row["batch"] == batch]
        (reference,) = [row for row in group if (row["policy"], row["context"]) == ("streaming", 60)]
        assert reference["ratio"] == 1
        for row in group:
            assert row["ratio"] == pytest.approx(row["ms_median"] / reference["ms_median"], rel=2e-3)
            assert row["tokens_per_second"] == pytest.approx(1000 * batch / row["ms_median"], rel=2e-3)
    full = next(row for row in rows if row["policy"] == "full")
    weights = sum(parameter.nbytes for parameter in model.parameters()) - model.get_input_embeddings().weight.nbytes
    assert full["floor_ms"] == pytest.approx(1000 * (weights + (CONTEXT + 7) * 256) / 1e9, rel=1e-3)
    bounded = next(row for row in rows if row["policy"] == "streaming")
    assert bounded["floor_ms"] == pytest.approx(1000 * (weights + BUDGET * 256) / 1e9, rel=1e-3)


def test_only_what_cannot_be_measured_is_refused(model):
    some, none = contenders(["streaming"]), contenders(["full"])
    for call, words in (
        (lambda: decode.check(some, BUDGET, [40], 9), "a context of 40 tokens does not fill a budget of 48"),
        (lambda: decode.check(some, BUDGET, [60], 4), "a median of 4 repetitions"),
        (lambda: overhead.check(none, 9), "overhead is that of policies that evict"),
        (lambda: prefill.check(none, BUDGET, [60], 9), "sparse prefill is that of policies that evict"),
        (lambda: prefill.check(some, BUDGET, [48], 9), "within the budget of 48"),
        (lambda: labels.check([512], 9), "golden labels begin at query 512"),
        (lambda: memory.check(none), "memory is that of policies that evict"),
        (lambda: suite.Plan(("speed",), some, BUDGET).check(), "running_topk, memory, capacity, not speed"),
        (lambda: suite.Plan((), some, BUDGET).check(), "not nothing"),
        (lambda: peak.require_memory(2**60, torch.device("cpu"), "this"), r"this needs 1152921504\.6 GB at once"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    decode.check(none, BUDGET, [40], 5)


# --- Overhead --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not HANDED, reason="attention policies need a transformers that hands keywords down")
def test_overhead_has_a_step_of_every_policy_and_the_evicting_one_where_there_is_an_interval(model):
    found = equipped(model, "full", "kvpop_mlp", "h2o")
    rows = overhead.overhead(model, found, BUDGET, CONTEXT, repetitions=5, bandwidth=limit.Bandwidth(1e9, "test"))
    assert [(row["policy"], row["part"]) for row in rows] == [
        ("kvpop_mlp", "step"),
        ("h2o", "step"),
        ("h2o", "evicting step"),
    ]
    assert all(row["ratio"] > 0 and row["reference_ms"] > 0 and row["floor_ms"] > 0 for row in rows)
    rows = overhead.parts(model, found, BUDGET, CONTEXT, repetitions=5)
    assert [(row["policy"], row["part"]) for row in rows] == [
        *(("kvpop_mlp", part) for part in ("layer", "score", "replace")),
        *(("h2o", part) for part in ("layer", "score", "statistics", "evict")),
    ]


def test_a_step_is_averaged_over_its_interval():
    ordinary, evicting = ([10.0, 10.0, 30.0], [8.0, 10.0, 10.0]), ([50.0] * 3, [10.0] * 3)
    row = overhead._joined("h2o", torch.float32, 4, ordinary, evicting, {})
    assert row["ms_best"] == row["ms_median"] == (3 * 10 + 50) / 4
    assert (row["reference_ms"], row["reference_ms_best"]) == (10, (3 * 8 + 10) / 4)
    assert row["ratio"] == (3 * 10 * 1.25 + 50) / 40  # of 1.25, 1 and 3 in three turns the median is 1.25


def test_what_is_done_once_in_a_window_counts(model, monkeypatch):
    """A policy that takes its time at one token of a window: the median of tokens would not see it."""
    policy = equipped(model, "streaming")[0].policy(BUDGET)
    window = policy.budget.window

    def take(jobs, turns, *_):
        assert turns % window == 0
        assert turns >= 5 * window
        slow = [10.0 + 20.0 * (turn % window == 0) for turn in range(turns)]
        return [slow, [10.0] * turns]

    monkeypatch.setattr(overhead, "in_turns", take)
    pair = overhead._timed(model, [policy], CONTEXT, states_for(model), 5, None)[id(policy), False]
    row = overhead._joined("streaming", torch.float32, 0, pair, None, {})
    assert row["ratio"] == pytest.approx(1 + 2 / window, abs=1e-4)
    assert overhead.means([1, 3, 5, 9], 2) == [2, 7]


@pytest.mark.parametrize("name", NAMES)
def test_the_questions_to_a_policy_are_those_of_a_step_that_chooses(model, name):
    (contender,) = equipped(model, name)
    policy = contender.policy(BUDGET)
    asked = overhead.questions(model.config, policy, CONTEXT, states_for(model))
    if policy.kind == "entry":
        assert set(asked) == {"score"}
        method, step = asked["score"]
        assert policy.priority(step).shape == (1, 2, 1)
        assert int(step.positions.min()) >= 0
    else:
        assert set(asked) == {"score", "statistics"}
        method, held = asked["score"]
        assert held.count == policy.budget.interval
        assert policy.keep_scores(held).shape[-1] == policy.budget.slots
    assert hasattr(policy, method)
    assert "priority" not in vars(policy)  # it was a copy that listened


# --- Prompts and labels ----------------------------------------------------------------------------------------------


def test_prefill_reads_the_prompt_that_a_cache_would(model):
    (contender,) = equipped(model, "kvpop_mlp")
    states = States(model, 1, 80)
    query, (keys, values) = states.query(80), states.pair(80)
    job = prefill.ingesting(model, contender, BUDGET, query, keys, values)
    (layer,) = job.prepare()
    job.call(layer)
    assert layer.columns == 80
    assert int((layer.positions >= 0).sum(-1).min()) == contender.policy(BUDGET).budget.rest
    torch.testing.assert_close(prefill.grouped(query, keys, values), prefill.repeated(query, keys, values))
    rows = prefill.prefill(model, [contender], BUDGET, [60, 80])
    assert [(row["policy"], row["context"]) for row in rows] == [
        ("sdpa", 60),
        ("kvpop_mlp", 60),
        ("sdpa", 80),
        ("kvpop_mlp", 80),
    ]
    for row in rows:
        assert (row["ratio"] == 1) == (row["policy"] == "sdpa")


def test_labels_are_the_same_dense_and_in_blocks(model, monkeypatch):
    query, key = labels.random_heads(model, 700, seed=3)
    assert (query.shape[1], key.shape[1]) == (3, 1)
    for mine, dense in labels.LABELS.values():
        torch.testing.assert_close(mine(query, key), dense(query, key), rtol=0, atol=1e-4)
    rows = labels.labels(model, [520])
    assert {(row["part"], row["policy"]) for row in rows} == {
        (label, side) for label in labels.LABELS for side in ("row blocks", "dense")
    }
    assert all(row["ratio"] == 1 for row in rows if row["policy"] == "dense")
    wrong = {"future_attention": (labels.future_in_blocks, lambda *heads: labels.future_dense(*heads) + 0.01)}
    monkeypatch.setattr(labels, "LABELS", wrong)
    with pytest.raises(RuntimeError, match=r"future_attention: row blocks and the dense computation differ by 0\.01"):
        labels.labels(model, [520])


def test_running_topk_is_timed_with_the_backend_of_the_device():
    (row,) = labels.topk(torch.device("cpu"), rows=2, length=1200)
    assert (row["policy"], row["batch"], row["context"]) == ("numba", 2, 1200)


# --- Limits and shapes -----------------------------------------------------------------------------------------------


def test_a_floor_is_bytes_over_bandwidth(monkeypatch):
    assert limit.Bandwidth(2e9, "x").floor(3_000_000, 1_000_000) == 2
    monkeypatch.setitem(limit.BUFFER_BYTES, "cpu", 2**20)
    found = limit.bandwidth(torch.device("cpu"))
    assert found.rate > 0
    assert "1 MiB of float32" in found.by


@pytest.mark.parametrize(
    ("name", "parameters", "read"), [("qwen3-4b", 4_022_468_096, 0), ("qwen3-8b", 8_190_735_360, 151_936 * 4096)]
)
def test_shapes_are_those_of_the_published_models(name, parameters, read):
    model = shapes.random_model(Qwen3Config(**shapes.SHAPES[name]), torch.bfloat16, "meta", name)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert limit.weight_bytes(model) == 2 * (parameters - read)
    assert model.config.num_hidden_layers * model.config.num_key_value_heads * model.config.head_dim == 36 * 8 * 128
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_random_weights_are_run_by_name_and_unknown_shapes_refused():
    model = shapes.load("random:qwen3-tiny", "float32")
    assert model.dtype == torch.float32
    found = equipped(model, "full", "kvpop_mlp")
    rows = decode.decode(model, found, BUDGET, [CONTEXT])
    assert [row["policy"] for row in rows] == ["full", "kvpop_mlp"]
    with pytest.raises(
        ValueError, match="there is no shape 'random:qwen9'; there are random:qwen3-4b, random:qwen3-8b"
    ):
        shapes.load("random:qwen9")
    assert not shapes.is_random("smollm2-135m")


@pytest.mark.slow
def test_peak_memory_is_that_of_a_process_of_its_own():
    model = shapes.load("random:qwen3-tiny")
    cpu = torch.device("cpu")
    small = peak.alone(labels.label_alone, cpu, "golden", False, (1, 2, 3000, 16), "float32")
    dense = peak.alone(labels.label_alone, cpu, "golden", True, (1, 2, 3000, 16), "float32")
    assert dense - small > 2 * 4 * 3000**2 / 2  # of two squares at least one is never there at once
    assert small > 2**26
    found = equipped(model, "full", "kvpop_mlp")
    rows = decode.decode(model, found, BUDGET, [CONTEXT], source="random:qwen3-tiny")
    rows += prefill.prefill(model, found, BUDGET, [CONTEXT], source="random:qwen3-tiny")
    assert all(row["peak_rss"] > 2**26 for row in rows)
    with pytest.raises(ValueError, match="there is no shape"):
        peak.alone(decode.decode_alone, cpu, "random:qwen9", "float32", found[0], BUDGET, CONTEXT, 1)

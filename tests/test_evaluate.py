"""The evaluation against numbers computed beside it from `kvkeep.replay`, its file of results, and how it resumes."""

import io
import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

import kvkeep
from kvkeep.evaluation import evaluate as evaluation
from kvkeep.evaluation import statistics, store
from kvkeep.evaluation.contenders import Contender, line_up, split_budget, with_options
from kvkeep.evaluation.table import best_rule, by_kind, role, table

LENGTH = 72
BUDGETS = (40, 44)
POLICIES = ("full", "streaming", "random", "h2o_decayed", "golden")
FIELDS = [
    *("policy", "label", "scorer", "preset", "seed", "league", "kind", "budget", "slots", "rest", "interval", "length"),
    *("documents", "loss", "full_loss", "loss_ratio", "loss_ratio_ci", "low_entropy_ratio", "high_entropy_ratio"),
    *("recall", "recall_chance", "recall_per_layer", "output_cosine"),
    *("kv_bytes", "full_kv_bytes", "realised_compression", "per_document"),
]


@dataclass
class Document:
    name: str
    kind: str
    text: str = ""


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,  # far from uniform, so that what is evicted shows in the loss
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def documents():
    generator = torch.Generator().manual_seed(1)
    named = [Document(f"d{i}", kind) for i, kind in enumerate(("prose", "code", "prose", "code", "prose"))]
    return [(document, torch.randint(32, (1, LENGTH), generator=generator)) for document in named]


@pytest.fixture(scope="module")
def result(model, documents):
    return evaluation.evaluate(model, documents, POLICIES, BUDGETS, LENGTH)


def rows_of(result, **wanted):
    return [row for row in result["rows"] if all(row[name] == value for name, value in wanted.items())]


def test_rows_have_every_field_in_order_and_all_documents_first(result):
    assert all(list(row) == FIELDS for row in result["rows"])
    expected = [(k, b, p) for k in ("all", "prose", "code") for b in BUDGETS for p in POLICIES]
    assert [(row["kind"], row["budget"], row["policy"]) for row in result["rows"]] == expected
    assert json.loads(json.dumps(result, allow_nan=False)) == result


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", ["all", "code"])
def test_the_numbers_are_those_of_replay(model, documents, result, budget, kind):
    (row,) = rows_of(result, policy="h2o_decayed", budget=budget, kind=kind)
    losses, full_losses, low_losses, low_full = [], [], 0.0, 0.0
    for document, ids in documents:
        if kind in ("all", document.kind):
            out = kvkeep.replay(model, ids, kvkeep.policies.create("h2o_decayed", budget))
            full = kvkeep.replay(model, ids, kvkeep.policies.create("full"))
            losses.append(out.token_loss[0, budget:].double())
            full_losses.append(full.token_loss[0, budget:].double())
            low = statistics.low_entropy(full.entropy[0, budget:].numpy())
            low_losses += losses[-1][low].sum()
            low_full += full_losses[-1][low].sum()
    assert row["documents"] == len(losses)
    assert row["loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-6)
    assert row["full_loss"] == pytest.approx(float(torch.cat(full_losses).mean()), rel=1e-6)
    assert row["loss_ratio"] == pytest.approx(row["loss"] / row["full_loss"], rel=1e-9)
    assert row["loss_ratio"] != pytest.approx(1, abs=1e-4), "eviction must show, or this test tests nothing"
    assert row["loss_ratio_ci"][0] <= row["loss_ratio"] <= row["loss_ratio_ci"][1]
    assert row["low_entropy_ratio"] == pytest.approx(float(low_losses / low_full), rel=1e-5)
    each = row["per_document"]
    assert [entry["tokens"] for entry in each] == [LENGTH - 1 - budget] * len(losses)
    assert [entry["loss"] for entry in each] == pytest.approx([float(loss.mean()) for loss in losses], rel=1e-6)


def test_the_full_cache_is_the_yardstick(result):
    for row in rows_of(result, policy="full"):
        assert row["loss_ratio"] == row["low_entropy_ratio"] == row["high_entropy_ratio"] == 1
        assert row["loss_ratio_ci"] == [1, 1]
        assert (row["slots"], row["rest"], row["interval"], row["realised_compression"]) == (None, None, None, 0)
        # keys and values, head size, KV heads, layers, bytes of a float32
        assert row["kv_bytes"] == row["full_kv_bytes"] == LENGTH * 2 * 8 * 2 * 2 * 4


def test_bytes_and_compression_follow_the_budget(result):
    for row in rows_of(result, kind="all"):
        if row["policy"] != "full":
            assert row["slots"] == row["budget"] == row["rest"] + row["interval"]
            assert row["kv_bytes"] * LENGTH == row["full_kv_bytes"] * row["slots"]
            assert 0 < row["realised_compression"] < 1 - row["rest"] / LENGTH


def test_no_token_before_the_largest_cache_counts(model, documents):
    # At rest, "golden" holds 40 + 10 tokens at most, so nobody is measured before query 50.
    contenders = line_up(["streaming", "golden"], at_rest=True)
    result = evaluation.evaluate(model, documents[:2], contenders, [40], LENGTH)
    assert result["settings"]["measured_queries"] == {"40": [50, LENGTH - 2]}
    assert {entry["tokens"] for row in result["rows"] for entry in row["per_document"]} == {LENGTH - 1 - 50}
    (alone,) = rows_of(evaluation.evaluate(model, documents[:2], ["streaming"], [40], LENGTH), kind="all")
    assert alone["per_document"][0]["tokens"] == LENGTH - 1 - 40


def test_the_first_counted_query_is_the_first_that_can_differ(model, documents):
    for name in ("streaming", "h2o", "tova", "golden"):
        policy = kvkeep.policies.create(name, 40)
        first = evaluation.first_measured([Contender(name)], 40, LENGTH)
        gone = torch.cat(kvkeep.replay(model, documents[0][1], policy).evicted_at)
        assert int(gone.min()) == first == 40


def test_the_model_is_as_it_was(model, documents):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attention, forward = model.config._attn_implementation, model.forward
    evaluation.evaluate(model, documents[:1], ["snapkv"], [40], LENGTH)
    assert model.config._attn_implementation == attention
    assert model.forward == forward
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# Resuming


@pytest.fixture
def counted(monkeypatch):
    """Counts the replays that are really run."""
    ran = []

    def replay(model, ids, policy):
        ran.append(policy.name)
        return kvkeep.replay(model, ids, policy)

    monkeypatch.setattr(evaluation, "replay", replay)
    return ran


def test_finished_work_is_not_done_again(model, documents, result, counted, tmp_path):
    assert evaluation.evaluate(model, documents, POLICIES, BUDGETS, LENGTH, resume_dir=tmp_path) == result
    assert len(counted) == len(documents) * (1 + 4 * 2)  # the full cache serves every budget
    assert len(list(tmp_path.iterdir())) == len(counted)
    counted.clear()
    assert evaluation.evaluate(model, documents, POLICIES, BUDGETS, LENGTH, resume_dir=tmp_path) == result
    assert counted == []


def test_what_is_new_or_damaged_is_done(model, documents, counted, tmp_path):
    first = evaluation.evaluate(model, documents[:3], ["streaming"], [40], LENGTH, resume_dir=tmp_path)
    counted.clear()
    evaluation.evaluate(model, documents[:4], ["streaming", "h2o"], [40], LENGTH, resume_dir=tmp_path)
    assert sorted(counted) == ["full", "h2o", "h2o", "h2o", "h2o", "streaming"]
    counted.clear()
    for damage in ("", "{", '["not", "a record"]'):
        next(tmp_path.iterdir()).write_text(damage)
        again = evaluation.evaluate(model, documents[:3], ["streaming"], [40], LENGTH, resume_dir=tmp_path)
        assert again == first
    assert set(counted) <= {"full", "h2o", "streaming"}


def test_a_stop_in_the_middle_keeps_what_was_finished(model, documents, counted, tmp_path):
    def stop(stage, done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluation.evaluate(model, documents, POLICIES, BUDGETS, LENGTH, resume_dir=tmp_path, progress=stop)
    assert len(counted) == 5
    evaluation.evaluate(model, documents, POLICIES, BUDGETS, LENGTH, resume_dir=tmp_path)
    assert len(counted) == len(documents) * (1 + 4 * 2)


@pytest.mark.parametrize("change", ["weights", "dtype", "option", "budget", "ids"])
def test_every_change_that_matters_is_noticed(model, documents, counted, tmp_path, change):
    contenders, budgets, chosen, changed = [Contender("random", options={"seed": 1})], [40], documents[:1], model
    evaluation.evaluate(model, chosen, contenders, budgets, LENGTH, resume_dir=tmp_path)
    counted.clear()
    if change in ("weights", "dtype"):
        changed = LlamaForCausalLM(model.config).eval()
        changed.load_state_dict(model.state_dict())
        if change == "weights":
            changed.model.layers[1].mlp.up_proj.weight.data[3, 3] += 1
        else:
            changed = changed.double()
    elif change == "option":
        contenders = [Contender("random", options={"seed": 2})]
    elif change == "budget":
        contenders = [Contender("random", options={"seed": 1}, overrides={"window": 31})]
    else:
        chosen = [(chosen[0][0], chosen[0][1].roll(1))]
    evaluation.evaluate(changed, chosen, contenders, budgets, LENGTH, resume_dir=tmp_path)
    assert "random" in counted


def test_an_equal_copy_of_the_model_is_the_same_model(model):
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.config._name_or_path = "elsewhere"
    assert store.fingerprint(copy) == store.fingerprint(model)


def test_files_are_whole_or_absent(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    store.write_atomic(path, "old")
    monkeypatch.setattr(store.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        store.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_floats_survive_the_file():
    values = torch.randn(100)
    assert np.array_equal(store.unpack_floats(store.pack_floats(values)), values.double().numpy())


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policies": ["streming"]}, "did you mean 'streaming'"),
        ({"policies": ["tova", "tova"]}, "'tova' is named twice"),
        ({"policies": []}, "no policy"),
        ({"budgets": [30]}, "policy 'streaming': .*30 .*above sinks 4 \\+ window 32"),
        ({"budgets": [LENGTH - 1]}, "no document is longer than the budget.*streaming holds 71.*at least 73"),
        ({"documents": []}, "no document of 72 tokens"),
        ({"length": 73}, "'d0' has 72 tokens, not 73"),
    ],
)
def test_mistakes_are_named_before_anything_runs(model, documents, counted, arguments, message):
    given = {"documents": documents, "policies": ["streaming"], "budgets": [40], "length": LENGTH} | arguments
    with pytest.raises(ValueError, match=message):
        evaluation.evaluate(model, **given)
    assert counted == []


def test_a_loss_that_is_not_finite_names_its_place(model, documents):
    broken = LlamaForCausalLM(model.config).eval()
    broken.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"'d0' under 'full' is not finite from query 0"):
        evaluation.evaluate(broken, documents[:1], ["streaming"], [40], LENGTH)


# Budgets and tables


def test_budgets_at_rest_are_those_of_the_papers_tables():
    assert split_budget("golden", 128, at_rest=True) == kvkeep.Budget(sinks=0, window=32, topk=96, interval=32)
    assert split_budget("h2o_decayed", 128, at_rest=True, overrides={"interval": 16}).slots == 144
    assert split_budget("tova", 128, at_rest=True).rest == 128
    assert split_budget("streaming", 128, at_rest=True).slots == 128
    assert split_budget("full", 128, at_rest=True) is None
    for name in kvkeep.policies.names()[1:]:
        if kvkeep.policies.describe(name).learned:
            continue  # its scorer's memory costs tokens of the budget
        assert split_budget(name, 128, at_rest=True).rest == split_budget(name, 128).slots == 128


def test_every_kind_of_policy_gets_the_parts_it_has():
    contenders = line_up(["full", "streaming", "random", "h2o"], seed=3, overrides={"window": 9, "interval": 5})
    by_name = {contender.name: contender for contender in contenders}
    assert by_name["streaming"].policy(64).budget == kvkeep.Budget(4, 9, 51)
    assert by_name["h2o"].policy(64).budget.interval == 5
    assert by_name["full"].policy(64).budget is None
    assert (by_name["random"].policy(64).seed, by_name["random"].seed, by_name["h2o"].seed) == (3, 3, None)


def test_options_of_a_policy_may_follow_its_name():
    written = ["golden", "golden:lookahead=1", "snapkv:observation=4:head_reduce=max_logit", "random:seed=9"]
    contenders = line_up(written, seed=3, overrides={"interval": 5})
    assert [one.title for one in contenders] == written
    assert [dict(one.options) for one in contenders] == [
        {},
        {"lookahead": 1},
        {"observation": 4, "head_reduce": "max_logit"},
        {"seed": 9},
    ]
    assert [one.seed for one in contenders] == [None, None, None, 9]
    assert contenders[1].policy(40).lookahead == 1
    assert with_options("h2o_decayed:decay=0.5") == ("h2o_decayed", {"decay": 0.5})
    assert with_options("foresightkv:pool=none") == ("foresightkv", {"pool": None})
    assert with_options("tova:per_head=true") == ("tova", {"per_head": True})
    for bad in ("golden:lookahead", "golden:=1", "golden:"):
        with pytest.raises(ValueError, match="are written NAME:option=value"):
            line_up([bad])
    with pytest.raises(ValueError, match="interval is given twice"):
        line_up(["golden:interval=16:interval=8"])
    with pytest.raises(ValueError, match="colour"):
        line_up(["golden:colour=1"])[0].policy(40)
    with pytest.raises(ValueError, match="unknown policy 'goldn'"):
        line_up(["goldn:lookahead=1"])


def test_parts_of_the_budget_may_follow_a_name_and_go_before_the_flags():
    written = [
        "golden",
        "golden:interval=8",
        "h2o:interval=10:window=3",
        "streaming:sinks=2",
        "golden:interval=8:lookahead=1",
    ]
    contenders = line_up(written, overrides={"interval": 5, "window": 6})
    assert [one.title for one in contenders] == written
    budgets = [one.policy(40).budget for one in contenders]
    assert [(one.interval, one.window, one.slots) for one in budgets] == [
        (5, 6, 40),
        (8, 6, 40),
        (10, 3, 40),
        (0, 6, 40),
        (8, 6, 40),
    ]
    assert budgets[3].sinks == 2
    assert contenders[4].policy(40).lookahead == 1
    at_rest = line_up(["h2o:interval=10"], at_rest=True)[0].policy(40).budget
    assert (at_rest.rest, at_rest.interval) == (40, 10)
    for bad, complaint in {
        "streaming:interval=4": "interval",
        "golden:interval=many": "interval must be an integer, not 'many'",
        "golden:window=100": "100",
        "full:interval=4": "interval",
    }.items():
        with pytest.raises(ValueError, match=complaint):
            line_up([bad])[0].policy(40)


def test_the_table_labels_everyone_and_marks_the_best_rule(result):
    rows = rows_of(result, kind="all", budget=40)
    assert [role(row) for row in rows] == ["no eviction", "baseline", "baseline", "rule", "oracle"]
    assert role({"policy": "kvpop", "scorer": "somewhere"}) == "learned"
    best = best_rule(rows)
    assert best["loss_ratio"] == min(row["loss_ratio"] for row in rows[1:4])
    for width, tables in ((80, 6), (120, 3)):  # three kinds; two budgets beside or below each other
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(table(result, width))
        text = console.export_text()
        assert text.count("loss ratio at 40") == 3
        assert text.count(" tokens\n") == tables or text.count(" tokens ") == tables
        assert "…" not in text
        marked = [line.split()[0] for line in text.split("prose:")[0].splitlines() if "*" in line]
        assert best["policy"] in marked


def test_the_table_by_kind_shows_every_kind(result):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(by_kind(result, 44))
    lines = console.export_text().splitlines()
    assert lines[2].split() == ["policy", "all", "prose", "code"]
    (golden,) = [line.split() for line in lines if line.startswith("golden")]
    expected = [f"{row['loss_ratio']:.3f}" for row in rows_of(result, policy="golden", budget=44)]
    assert golden == ["golden", "oracle", *expected]

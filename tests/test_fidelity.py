"""Recall and output cosine against sets and S x S matrices, in the rows of an evaluation, its file and its tables."""

import io
import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import kvkeep
from kvkeep.budget import Budget
from kvkeep.evaluation import evaluate as evaluation
from kvkeep.evaluation.contenders import Contender
from kvkeep.evaluation.fidelity import fidelity
from kvkeep.evaluation.report import markdown
from kvkeep.evaluation.table import recall_table, role
from kvkeep.lifetimes import chance_recall, running_topk, visible
from reference import interval_lifetimes
from tiny import random_ids, tiny_model

LENGTH = 40
BUDGETS = (20, 24)
SMALL = {"sinks": 2, "window": 5}
FIELDS = ("recall", "recall_chance", "recall_per_layer", "output_cosine")


@dataclass
class Document:
    name: str
    kind: str
    text: str = ""


def entrant(name, label=None, **options):
    return Contender(name, label, options, overrides={} if name in ("full", "h2o") else SMALL)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def documents():
    return [(Document(f"d{i}", kind), random_ids(LENGTH, seed=i)) for i, kind in enumerate(("prose", "code", "prose"))]


@pytest.fixture(scope="module")
def contenders():
    return [entrant("full"), entrant("streaming"), entrant("random", seed=3), entrant("h2o"), entrant("future_mass")]


@pytest.fixture(scope="module")
def result(model, documents, contenders):
    return evaluation.evaluate(model, documents, contenders, BUDGETS, LENGTH, recall=True)


@pytest.fixture(scope="module")
def dense(model):
    """Per layer query, key, value of a full-cache run, in float64, and the scaling."""
    seen = {}

    def observe(geometry, query, key, value, _):
        seen[geometry.layer] = (query, key, value, geometry.scaling)

    kvkeep.replay(model, random_ids(LENGTH), kvkeep.policies.create("full"), observe=observe)
    return seen


def attention(query, key, value, scaling, mask):
    """Probabilities and outputs with a mask [1, H, S, S], the plain way."""
    group = query.shape[1] // key.shape[1]
    key, value, mask = (tensor.repeat_interleave(group, 1) for tensor in (key, value, mask))
    probabilities = (query @ key.mT * scaling).masked_fill(~mask, -torch.inf).softmax(-1)
    return probabilities, probabilities @ value


def by_sets(query, key, value, scaling, evicted_at, budget):
    """Recall [H] and cosine [S] of one layer, from the definitions."""
    heads, length = key.shape[1], key.shape[2]
    causal = torch.ones(1, heads, length, length, dtype=torch.bool).tril()
    probabilities, output = attention(query, key, value, scaling, causal)
    cosine = torch.cosine_similarity(
        attention(query, key, value, scaling, visible(evicted_at))[1], output, dim=-1
    ).mean((0, 1))
    window = budget.window + (budget.interval > 0)  # at query q, tokens after q - window are out of reach
    recalls = []
    for head in range(heads):
        group = probabilities[0].unflatten(0, (heads, -1))[head]  # [G, S, S]
        teacher = [
            max(np.log(1e-6 + one[t + window :, t].sum().item() / max(1, length - t - window)) for one in group)
            for t in range(length)
        ]
        shares = []
        for q in range(budget.slots, length, max(budget.interval, 1)):
            eligible = range(budget.sinks, q - window + 1)
            best = set(sorted(eligible, key=lambda t: (teacher[t], t), reverse=True)[: budget.topk])
            held = {t for t in eligible if evicted_at[0, head, t] > q}
            assert len(held) == budget.topk
            shares.append(len(best & held) / budget.topk)
        recalls.append(sum(shares) / len(shares))
    return recalls, cosine


def random_lifetimes(budget, seed):
    """Per layer [1, 2, LENGTH], those of a policy that ranks at random."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(2, 1, 2, LENGTH, generator=generator)
    if budget.interval == 0:
        return [running_topk(layer, budget) for layer in scores]
    return [interval_lifetimes(lambda head, _, held, s=s: s[0, head, held], budget, LENGTH, 2) for s in scores]


budgets = st.builds(Budget, st.integers(0, 3), st.integers(1, 6), st.integers(1, 12), st.integers(0, 5))


# What is measured


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(budgets, st.integers(0, 2**31)), min_size=1, max_size=3))
def test_both_equal_their_definitions_on_random_lifetimes(model, dense, drawn):
    held = {name: (budget, random_lifetimes(budget, seed)) for name, (budget, seed) in enumerate(drawn)}
    found = fidelity(model, random_ids(LENGTH), held)
    for name, (budget, lifetimes) in held.items():
        layers = [by_sets(*dense[layer], lifetimes[layer], budget) for layer in range(2)]
        assert found[name].recall == pytest.approx([np.mean(recalls) for recalls, _ in layers], abs=1e-6)
        expected = torch.stack([cosine for _, cosine in layers]).mean(0)
        assert torch.allclose(found[name].output_cosine, expected, atol=1e-9)


def test_whoever_holds_everything_is_the_full_cache(model):
    everything = [torch.full((1, 2, LENGTH), LENGTH, dtype=torch.int32)] * 2
    found = fidelity(model, random_ids(LENGTH), {"all": (Budget(2, 5, 9), everything)})["all"]
    assert found.recall == [1, 1]
    assert torch.allclose(found.output_cosine, torch.ones(LENGTH).double(), atol=1e-12)


def test_attention_is_the_same_until_something_is_evicted(model):
    budget = Budget(2, 5, 9)
    cosine = fidelity(model, random_ids(LENGTH), {0: (budget, random_lifetimes(budget, 0))})[0].output_cosine
    assert torch.allclose(cosine[: budget.rest], torch.ones(budget.rest).double(), atol=1e-12)
    assert (cosine[budget.rest :] < 1 - 1e-6).all()


def test_the_teachers_own_policy_holds_all_that_it_wants(model, documents, result):
    """In the first layer; above it, its queries and keys are those that eviction has left."""
    for row in rows_of(result, policy="future_mass"):
        assert row["recall_per_layer"][0] == 1
        assert 0.8 < row["recall_per_layer"][1] < 1
    shallow = tiny_model()
    shallow.model.layers = shallow.model.layers[:1]
    shallow.config.num_hidden_layers = 1
    rows = evaluation.evaluate(shallow, documents, [entrant("future_mass")], [20], LENGTH, recall=True)["rows"]
    assert {row["recall"] for row in rows} == {1}


def test_random_choice_is_as_good_as_chance(model, documents):
    contenders = [entrant("random", f"random {seed}", seed=seed) for seed in range(12)]
    contenders.append(entrant("future_mass"))
    rows = rows_of(evaluation.evaluate(model, documents, contenders, [20], LENGTH, recall=True), kind="all")
    chance = np.mean([13 / (q - 5 - 2 + 1) for q in range(20, LENGTH)])
    assert rows[0]["recall_chance"] == pytest.approx(chance)
    assert np.mean([row["recall"] for row in rows[:-1]]) == pytest.approx(chance, abs=0.02)
    assert rows[-1]["recall"] > chance + 0.2


def test_layers_that_are_not_bounded_have_no_recall(documents):
    model, contender = tiny_model("gemma3"), entrant("streaming")
    (row,) = rows_of(evaluation.evaluate(model, documents, [contender], [20], LENGTH, recall=True), kind="all")
    assert [recall is None for recall in row["recall_per_layer"]] == [False, True, False]
    assert row["recall"] == pytest.approx((row["recall_per_layer"][0] + row["recall_per_layer"][2]) / 2)
    policy, ids = contender.policy(20), documents[0][1]
    found = fidelity(model, ids, {0: (policy.budget, kvkeep.replay(model, ids, policy).evicted_at)})
    assert found[0].output_cosine[:20].tolist() == pytest.approx([1] * 20)


# The rows of an evaluation


def rows_of(result, **wanted):
    return [row for row in result["rows"] if all(row[name] == value for name, value in wanted.items())]


@pytest.mark.parametrize("name", ["random", "h2o"])
@pytest.mark.parametrize("kind", ["all", "prose"])
def test_rows_are_means_over_documents_layers_and_counted_queries(model, documents, contenders, result, name, kind):
    (contender,) = [one for one in contenders if one.name == name]
    (row,) = rows_of(result, policy=name, budget=20, kind=kind)
    policy, found = contender.policy(20), []
    for document, ids in documents:
        if kind in ("all", document.kind):
            held = {0: (policy.budget, kvkeep.replay(model, ids, policy).evicted_at)}
            found.append(fidelity(model, ids, held)[0])
    per_layer = np.mean([one.recall for one in found], 0)
    assert row["recall_per_layer"] == pytest.approx(per_layer)
    assert row["recall"] == pytest.approx(per_layer.mean())
    assert row["recall_chance"] == chance_recall(LENGTH, policy.budget)
    counted = torch.stack([one.output_cosine[20 : LENGTH - 1] for one in found])
    assert row["output_cosine"] == pytest.approx(float(counted.mean()), abs=1e-7)
    assert row["output_cosine"] < 0.999


def test_the_full_cache_has_no_topk_and_the_same_outputs(result):
    for row in rows_of(result, policy="full"):
        assert [row[name] for name in FIELDS] == [None, None, None, 1]


def test_nothing_is_measured_unless_asked_for(model, documents, contenders, result, monkeypatch):
    monkeypatch.setattr(evaluation, "fidelity", None)
    plain = evaluation.evaluate(model, documents, contenders, BUDGETS, LENGTH)
    assert {row[name] for row in plain["rows"] for name in FIELDS} == {None}
    same = [{name: value for name, value in row.items() if name not in FIELDS} for row in result["rows"]]
    assert [{name: value for name, value in row.items() if name not in FIELDS} for row in plain["rows"]] == same


# Resuming


@pytest.fixture
def counted(monkeypatch):
    """Names of the policies that are run, and "recall" for every pass that measures it."""
    ran = []

    def replay(model, ids, policy):
        ran.append(policy.name)
        return kvkeep.replay(model, ids, policy)

    def measure(*arguments):
        ran.append("recall")
        return fidelity(*arguments)

    monkeypatch.setattr(evaluation, "replay", replay)
    monkeypatch.setattr(evaluation, "fidelity", measure)
    return ran


@pytest.mark.parametrize("stop", [5, 9, 14])
def test_resumed_equals_uninterrupted(model, documents, contenders, result, counted, tmp_path, stop):
    def stopping(stage, done, total):
        assert total == 3 * (1 + 4 * 2 + 1)
        if done == stop:
            raise KeyboardInterrupt

    given = (model, documents, contenders, BUDGETS, LENGTH)
    with pytest.raises(KeyboardInterrupt):
        evaluation.evaluate(*given, recall=True, resume_dir=tmp_path, progress=stopping)
    assert evaluation.evaluate(*given, recall=True, resume_dir=tmp_path) == result
    assert counted.count("recall") == 3
    counted.clear()
    assert evaluation.evaluate(*given, recall=True, resume_dir=tmp_path) == result
    assert counted == []


def test_work_kept_without_recall_is_done_again_only_if_recall_is_asked_for(
    model, documents, contenders, result, counted, tmp_path
):
    given = (model, documents[:1], contenders[:3], [20], LENGTH)
    plain = evaluation.evaluate(*given, resume_dir=tmp_path)
    assert counted == ["full", "streaming", "random"]
    counted.clear()
    assert evaluation.evaluate(*given, resume_dir=tmp_path) == plain
    assert counted == []
    measured = evaluation.evaluate(*given, recall=True, resume_dir=tmp_path)
    assert counted == ["streaming", "random", "recall"]
    assert all(row["recall"] is not None for row in measured["rows"] if row["policy"] != "full")
    counted.clear()
    assert evaluation.evaluate(*given, resume_dir=tmp_path) == plain, "kept or not, it was not asked for"
    more = (model, documents[:1], contenders[:4], [20], LENGTH)
    evaluation.evaluate(*more, recall=True, resume_dir=tmp_path)
    assert counted == ["h2o", "recall"]


def test_one_policy_under_two_titles_is_measured_once(model, documents, counted):
    contenders = [entrant("streaming", "one"), entrant("streaming", "two")]
    rows = evaluation.evaluate(model, documents[:1], contenders, [20], LENGTH, recall=True)["rows"]
    assert counted == ["full", "streaming", "recall"]
    assert rows[0]["recall"] == rows[1]["recall"] is not None


# Tables and the command line


def test_tables_show_every_policy_beside_chance_and_streaming(result):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(recall_table(result))
    text = console.export_text()
    page = markdown(result | {"settings": {"model": "m", "dtype": "float64"}})
    assert "| | streaming | random | h2o | future_mass |" in page
    for budget in BUDGETS:
        rows = [row for row in rows_of(result, kind="all", budget=budget) if row["policy"] != "full"]
        for row in rows:
            numbers = [f"{row[name]:.3f}" for name in ("recall", "recall_chance", "output_cosine")]
            assert f"{row['policy']} {role(row)} {budget} {' '.join(numbers)}" in " ".join(text.split())
        for layer in (0, 1):
            cells = " | ".join(f"{row['recall_per_layer'][layer]:.3f}" for row in rows)
            assert f"| layer {layer} | {cells} |" in page
        chance = " | ".join(f"{row['recall_chance']:.3f}" for row in rows)
        assert f"| by chance | {chance} |" in page


def test_no_table_without_recall(model, documents, contenders):
    plain = evaluation.evaluate(model, documents[:1], contenders[:2], [20], LENGTH)
    assert recall_table(plain) is None
    assert "teacher" not in markdown(plain)


def test_the_command_measures_it_with_the_flag_only(run, folder, texts, tmp_path):
    out = tmp_path / "out.json"
    arguments = ("evaluate", "--model", folder, "--policies", "full,streaming", "--budgets", "40", "--length", "100")
    arguments += ("--data", *texts, "--json", out)
    code, said, err = run(*arguments)
    assert code == 0, err
    assert {row[name] for row in json.loads(out.read_text())["rows"] for name in FIELDS} == {None}
    assert "recall" not in said
    code, said, err = run(*arguments, "--recall")
    assert code == 0, err
    (row,) = rows_of(json.loads(out.read_text()), policy="streaming", kind="all")
    assert len(row["recall_per_layer"]) == len(kvkeep.runtime.models.load(str(folder))[0].model.layers)
    numbers = " ".join(f"{row[name]:.3f}" for name in ("recall", "recall_chance", "output_cosine"))
    assert f"streaming baseline 40 {numbers}" in " ".join(said.split())
    assert "Monitors" in said

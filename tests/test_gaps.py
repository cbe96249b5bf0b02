"""Gap closed, from the rows of an evaluation."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from kvkeep.evaluation.contenders import Contender
from kvkeep.evaluation.gaps import comparisons, gap_table, gaps, seeds_together
from kvkeep.evaluation.report import joined, main, markdown


def row(policy, losses, kind="all", budget=128, scorer=None, seed=None, preset=None):
    per_document = [{"document": str(i), "loss": loss, "full_loss": 1.0, "tokens": 10} for i, loss in enumerate(losses)]
    loss = sum(losses) / len(losses)
    base = {"policy": policy, "label": policy, "scorer": scorer, "kind": kind, "budget": budget}
    base |= {"seed": seed, "preset": preset, "league": None}
    return base | {"loss": loss, "loss_ratio": loss, "per_document": per_document}


ROWS = [
    row("full", [1.0, 1.0, 1.0]),
    row("streaming", [1.9, 1.9, 1.9]),
    row("h2o", [1.4, 1.8, 1.6]),
    row("kvpop_mlp", [1.3, 1.2, 1.7], scorer="somewhere"),
    row("golden", [1.1, 1.2, 1.3]),
    row("future_mass", [2.0, 2.0, 2.0]),
]


def test_gap_is_to_the_best_rule_and_to_every_oracle_that_beats_it():
    (found,) = gaps(ROWS)
    assert (found["rule"], found["oracle"], found["label"]) == ("h2o", "golden", "kvpop_mlp")
    assert found["closed"] == pytest.approx((4.8 - 4.2) / (4.8 - 3.6))
    assert found["ci"][0] <= found["closed"] <= found["ci"][1]
    assert (found["wins"], found["documents"]) == (2, 3)


def test_kinds_and_budgets_are_compared_among_themselves():
    more = [row(r["policy"], [d["loss"] for d in r["per_document"]][:2], "code", 256, r["scorer"]) for r in ROWS]
    assert [(found["kind"], found["budget"], found["documents"]) for found in gaps(ROWS + more)] == [
        ("all", 128, 3),
        ("code", 256, 2),
    ]


SEEDS = [
    row("kvpop", [1.3, 1.2, 1.7], scorer="a", seed=0, preset="best") | {"label": "kvpop (a)"},
    row("kvpop", [1.1, 1.2, 1.3], scorer="b", seed=1, preset="best") | {"label": "kvpop (b)"},
    row("kvpop", [1.0, 1.0, 1.0], scorer="c", seed=1, preset="published") | {"label": "kvpop (c)"},
]


def test_seeds_are_averaged_per_document_and_nothing_else_is():
    together, alone = seeds_together(SEEDS)
    assert together["label"] == "kvpop (best), mean of 2 seeds"
    assert [document["loss"] for document in together["per_document"]] == pytest.approx([1.2, 1.2, 1.5])
    assert together["loss"] == pytest.approx(1.3)
    assert alone == SEEDS[2]
    assert [document["loss"] for document in SEEDS[0]["per_document"]] == [1.3, 1.2, 1.7], "the rows are left alone"


def test_a_later_stage_or_another_option_is_no_other_seed():
    drawn = [dict(each) | {"label": each["label"].replace("kvpop", "kvpop:evict=sample")} for each in SEEDS[:2]]
    later = dict(SEEDS[0]) | {"preset": "best, rl", "seed": 2, "label": "kvpop (d)"}
    found = [each["label"] for each in seeds_together([*SEEDS[:2], *drawn, later])]
    assert found == ["kvpop (best), mean of 2 seeds", "kvpop:evict=sample (best), mean of 2 seeds", "kvpop (d)"]


@pytest.mark.parametrize(("stage", "said"), [(None, "best"), ("sft", "best"), ("rl", "best, rl")])
def test_rows_know_the_preset_and_the_later_stage(stage, said):
    scorer = SimpleNamespace(metadata={"recipe": {"preset": "best"}, "stage": stage, "seed": 3})
    made = Contender("foresightkv").with_scorer(scorer, "folder/a", alone=False)
    assert (made.preset, made.seed, made.title) == (said, 3, "foresightkv (a)")


def test_gap_of_the_seeds_together_stands_beside_each_seed():
    found = {record["label"]: record["closed"] for record in gaps([*ROWS, *SEEDS]) if record["oracle"] == "golden"}
    assert found["kvpop (best), mean of 2 seeds"] == pytest.approx((found["kvpop (a)"] + found["kvpop (b)"]) / 2)
    assert list(found) == ["kvpop_mlp", "kvpop (a)", "kvpop (b)", "kvpop (c)", "kvpop (best), mean of 2 seeds"]


def test_learned_policies_are_compared_in_pairs_by_document():
    rows = [*ROWS, *SEEDS[:2]]
    found, *others = comparisons(rows)
    assert (found["label"], found["reference"]) == ("kvpop (best), mean of 2 seeds", "kvpop_mlp")
    assert found["difference"] == pytest.approx((1.2 + 1.2 + 1.5 - 1.3 - 1.2 - 1.7) / 3)
    assert found["ci"][0] <= found["difference"] <= found["ci"][1]
    assert found["wins"] == 2
    assert [(record["label"], record["reference"]) for record in others] == [
        (learned, rule) for learned in ("kvpop_mlp", found["label"]) for rule in ("streaming", "h2o")
    ]
    against = {record["reference"]: record for record in comparisons(ROWS)}
    assert against.keys() == {"streaming", "h2o"}, "one learned policy has no learned rival, and oracles are none"
    assert against["h2o"]["difference"] == pytest.approx((1.3 + 1.2 + 1.7 - 1.4 - 1.8 - 1.6) / 3)
    assert against["h2o"]["wins"] == 2


def test_table_shows_all_documents_only():
    more = [row(r["policy"], [d["loss"] for d in r["per_document"]], "code", 128, r["scorer"]) for r in ROWS]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(gap_table(gaps(ROWS + more)))
    text = console.export_text()
    assert text.count("kvpop_mlp") == 1
    assert "0.50 [" in text
    assert "2 of 3" in text


def test_nothing_learned_means_no_gap():
    assert gaps([r for r in ROWS if r["scorer"] is None]) == []


def test_markdown_has_a_table_per_budget_and_only_numbers_of_the_result():
    extra = {"documents": 3, "length": 99, "loss_ratio_ci": [1.0, 2.0], "full_loss": 1.0, "realised_compression": 0.5}
    extra |= {"low_entropy_ratio": None, "high_entropy_ratio": 1.25}
    page = markdown({"rows": [r | extra for r in [*ROWS, *SEEDS[:2]]], "settings": {"model": "m", "dtype": "float32"}})
    assert "3 documents of 99 tokens" in page
    assert "| h2o | rule | 1.600 [1.000, 2.000] * | - | 1.250 | 0.50 |" in page
    assert "| kvpop_mlp | 128 | all | h2o | golden | 0.50 [" in page
    assert "| kvpop (best), mean of 2 seeds | kvpop_mlp | 128 | -0.1000 [" in page


# ---- several results on one page


def result(rows, **changed):
    settings = {
        "model_fingerprint": "m",
        "dtype": "float32",
        "length": 100,
        "budgets": [128],
        "documents": ["a", "b", "c"],
    }
    return {"rows": [row | {"full_loss": 1.0} for row in rows], "settings": settings | changed}


def test_results_on_the_same_documents_are_joined():
    together = joined([result(ROWS[:3]), result([ROWS[0], ROWS[3]]), result([ROWS[4]])])
    assert [row["label"] for row in together["rows"]] == ["full", "streaming", "h2o", "kvpop_mlp", "golden"]
    assert gaps(together["rows"]) == gaps(ROWS[:5])


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (result(ROWS, documents=["a", "b"]), "another documents cannot be joined"),
        (result(ROWS, model_fingerprint="n"), "another model fingerprint cannot be joined"),
        (result([]) | {"rows": [ROWS[3] | {"full_loss": 1.1}]}, "the full cache loses 1.1 nats"),
        (result([ROWS[3] | {"scorer": "another"}]), "'kvpop_mlp' at 128 is not the same in two results"),
        (result([ROWS[4] | {"interval": 8}]), "'golden' at 128 is not the same in two results"),
        (result([ROWS[2] | {"loss": ROWS[2]["loss"] + 0.01}]), "'h2o' at 128 is not the same in two results"),
    ],
)
def test_results_that_do_not_belong_together_are_refused(other, sentence):
    with pytest.raises(ValueError, match=sentence):
        joined([result(ROWS), other])


def test_the_page_of_nothing_is_an_error(capsys, tmp_path):
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "text.json").write_text("no json")
    names = [str(tmp_path / name) for name in ("none.json", "empty.json", "text.json")]
    for arguments in ([], ["--help"], *([name] for name in names)):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith("error: this is no report: ")
        assert (arguments[0] if arguments and arguments[0] in names else "out.json") in said

"""The command of the ablations: mistakes before any work, and the page it writes."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from kvkeep.evaluation import ablation
from kvkeep.evaluation.ablation_variants import ablation as named


@pytest.fixture
def call():
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(ablation.main)

    def run(*arguments):
        found = CliRunner().invoke(app, [str(argument) for argument in arguments])
        return found.exit_code, found.stdout, found.stderr

    return run


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("colour",), "there is no ablation 'colour'; there are aggregation, delay, decay, loss, hidden, documents"),
        (("decay", "--budget", "36"), "36"),
        (("decay", "--length", "100"), "no document is longer than the budget"),
    ],
)
def test_a_mistake_is_one_sentence_before_a_model_is_loaded(call, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.setattr(ablation.models, "load", None)
    code, out, err = call(*arguments, "--out", tmp_path / "out", "--report", tmp_path / "pages" / "page.md")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sentence in err
    assert not list(tmp_path.iterdir())


def test_a_mistake_after_a_model_is_loaded(call, folder, tmp_path):
    file = tmp_path / "file"
    file.write_text("text")
    given = ("hidden", "--model", folder, "--length", "90", "--budget", "48")
    cases = {
        ("--out", file): "is a file; it should be a folder",
        ("--out", tmp_path / "out", "--shards", file): "is a file; it should be a folder",
        ("--out", tmp_path / "out", "--report", tmp_path): "is a folder; it should be a file",
        ("--out", tmp_path / "out", "--report", file / "page.md"): "file",
        ("--out", tmp_path / "out", "--length", "99999"): "no document has 99999 tokens",
        ("--out", tmp_path / "out", "--dtype", "float7"): "float7",
    }
    for arguments, sentence in cases.items():
        code, out, err = call(*given, *arguments)
        assert (code, out) == (2, ""), err
        assert sentence in err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == [file]


def test_command_writes_the_page_it_prints(call, folder, tmp_path):
    page = tmp_path / "pages" / "hidden.md"
    sizes = ("--seeds", 1, "--documents", 4, "--budget", 48, "--length", 90, "--steps", 2, "--train-documents", 4)
    code, out, err = call("hidden", "--out", tmp_path / "out", "--model", folder, *sizes, "--report", page)
    assert code == 0, err
    assert page.read_text().strip() == out.strip()
    assert "| hidden 16 | kvpop_mlp | hidden 16 | 4 | 2 | 0 |" in out
    assert "| hidden 256 | 4 | 1 |" in out
    kinds = {document["kind"] for document in json.loads((tmp_path / "out" / "hidden.json").read_text())["settings"][
        "evaluation"]["documents"]}  # fmt: skip
    assert kinds == {"prose", "procedural", "code", "docs"}


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="there is no ablation 'size'; there are aggregation,"):
        named("size")
    assert named("hidden", seeds=5, steps=None) == named("hidden", seeds=5)
    assert named("hidden", seeds=5).seeds == 5

"""The tuned league: three ratios by hand, what is removed, what is refused."""

import json

import pytest

from kvkeep.evaluation.league import league, main, markdown


def result(model, losses, full, kinds=("prose", "code", "procedural")):
    """Losses ``{policy: per document}`` of documents of one kind each, 10 tokens a document."""
    rows = []
    for policy, each in {"full": full, **losses}.items():
        documents = [
            {"document": f"d{i}", "loss": loss, "full_loss": dense, "tokens": 10}
            for i, (loss, dense) in enumerate(zip(each, full, strict=True))
        ]
        for kind in ("all", *kinds):
            chosen = [d for d, its in zip(documents, kinds, strict=True) if kind in ("all", its)]
            scorer = "somewhere" if policy == "kvpop_mlp" else None
            row = {"policy": policy, "label": policy, "scorer": scorer, "budget": 128, "kind": kind}
            rows.append(row | {"per_document": chosen})
    return {"rows": rows, "settings": {"model": model}}


BASE = result("small", {"kvpop_mlp": [1.2, 1.4, 2.0], "streaming": [1.3, 1.6, 2.4]}, [1.0, 1.0, 1.0])
TUNED = result("runs/tuned", {"kvpop_mlp": [1.1, 1.2, 1.3]}, [0.9, 1.0, 1.1])


def test_three_ratios_and_what_is_removed():
    found = {(s.group, s.model, s.policy): s for s in league(BASE, [TUNED])}
    frozen, tuned = found["all", "small", "kvpop_mlp"], found["all", "tuned", "kvpop_mlp"]
    assert frozen.to_original.value == frozen.to_own.value == pytest.approx(4.6 / 3)
    assert frozen.dense.value == 1
    assert frozen.removed is frozen.removed_own is None
    assert tuned.to_original.value == pytest.approx(3.6 / 3)
    assert tuned.to_own.value == pytest.approx(3.6 / 3)
    assert tuned.dense.value == pytest.approx(1.0)
    assert tuned.removed.value == pytest.approx(1.0 / 1.6)  # excess 1.6 to 0.6
    assert tuned.removed_own.value == pytest.approx(1.0 / 1.6)
    prose = found["prose", "tuned", "kvpop_mlp"]
    assert prose.to_own.value == pytest.approx(1.1 / 0.9)
    assert prose.removed.value == pytest.approx(0.5)
    assert prose.removed_own.value == pytest.approx(0.0), "it only learned the text"


def test_natural_text_is_everything_but_procedural():
    found = {(s.group, s.model, s.policy): s for s in league(BASE, [TUNED])}
    natural = found["natural", "tuned", "kvpop_mlp"]
    assert natural.documents == 2
    assert natural.removed.value == pytest.approx(0.3 / 0.6)
    only = result("small", {"streaming": [1.2, 1.4]}, [1.0, 1.0], kinds=("prose", "code"))
    assert "natural" not in {s.group for s in league(only, [])}, "it would repeat all"


def test_other_documents_and_unknown_policies_are_refused():
    other = json.loads(json.dumps(TUNED).replace("d2", "elsewhere"))
    with pytest.raises(ValueError, match="other documents than the base"):
        league(BASE, [other])
    with pytest.raises(ValueError, match="not measured under 'h2o' at 128"):
        league(BASE, [result("t", {"h2o": [1.0, 1.0, 1.0]}, [1.0, 1.0, 1.0])])


def test_page_and_mistakes(tmp_path, capsys):
    names = []
    for name, each in (("base", BASE), ("tuned", TUNED)):
        names.append(str(tmp_path / f"{name}.json"))
        (tmp_path / f"{name}.json").write_text(json.dumps(each))
    main(names)
    page = capsys.readouterr().out
    assert page == markdown(league(BASE, [TUNED]))
    assert "| all (3) | kvpop_mlp | tuned | 1.200 [" in page
    for wrong in ([names[0]], [names[0], str(tmp_path / "none.json")]):
        with pytest.raises(SystemExit) as stopped:
            main(wrong)
        assert stopped.value.code == 2
        assert capsys.readouterr().err.startswith("error: ")

"""Model cards: what they say of a scorer, and that their example runs."""

from __future__ import annotations

import json

import pytest
import yaml

from all_policies import ENTRY, random_scorer
from kvkeep import Budget, scorers
from kvkeep.runtime.models import load
from kvkeep.scorers import checkpoint, model_fingerprint
from test_checkpoint import CONFIG, METADATA, made
from tiny import HANDED


def test_the_card_has_a_header_a_command_and_metrics(tmp_path):
    made().save_pretrained(tmp_path, **METADATA, license="apache-2.0")
    _, header, body = (tmp_path / "README.md").read_text().split("---\n", 2)
    header = yaml.safe_load(header)
    assert header["base_model"] == "someone/tiny"
    assert (header["library_name"], header["license"]) == ("kvkeep", "apache-2.0")
    assert "kvpop" in header["tags"]
    for words in ("kvkeep train kvpop --seed 3", "| loss_ratio | 1.083 | 1.041 to 1.143 |", "| documents | 24 | |"):
        assert words in body
    made("kvpop_mlp").save_pretrained(tmp_path)
    assert "base_model" not in (tmp_path / "README.md").read_text()


def test_a_local_folder_is_nobodys_model_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m" / "llama").mkdir(parents=True)
    for base, known in (("m/llama", False), ("./llama", False), ("m/other", True)):
        card = checkpoint.model_card(checkpoint.describe(made()) | {"base_model": base, "library_version": "0"})
        assert ("base_model" in yaml.safe_load(card.split("---\n")[1])) == known
        assert f"load({json.dumps(base)})" in card


def test_the_card_of_a_tuned_scorer_says_what_it_was_trained_on(tmp_path):
    tuned = {"base_model": "someone/tiny", "base_fingerprint": "0123456789abcdef", "settings": {}}
    scorer = made()
    scorer.save_pretrained(tmp_path, **METADATA)
    assert "tuned" not in (tmp_path / "README.md").read_text()
    scorer.save_pretrained(tmp_path, base_fingerprint="feedfeedfeedfeed", tuned=tuned)
    card = " ".join((tmp_path / "README.md").read_text().split())
    for words in (
        "It was trained on the untuned backbone: `someone/tiny`, weights `0123456789abcdef`.",
        "Decay and what was measured are of that.",
        "belongs to the tuned model in the folder above this one, and to no other",
        "| Base model | `someone/tiny`, tuned, weights `feedfeedfeedfeed` |",
        "## Measured on the untuned model",
        'load("the tuned model")',
    ):
        assert words in card
    assert "fits this base model only" not in card


def test_an_interval_takes_two_documents(tmp_path):
    overlap = {"value": 0.5, "interval": [0.25, 0.75]}
    for count, row in ((1, "| held_out: overlap | 0.5 | |"), (2, "| held_out: overlap | 0.5 | 0.25 to 0.75 |")):
        made().save_pretrained(tmp_path, metrics={"held_out": {"overlap": overlap, "documents": count}})
        assert row in (tmp_path / "README.md").read_text().splitlines()


def test_the_card_of_foresightkv_says_what_it_reads_and_when_it_decides(tmp_path):
    budgets = [Budget(sinks=0, window=32, topk=96, interval=32), Budget(sinks=0, window=64, topk=192, interval=64)]
    best = scorers.features.FeatureSpec.best()
    scorer = scorers.new("foresightkv", CONFIG, budgets, features=best)
    scorer.save_pretrained(tmp_path, stage="dagger", recipe={"preset": "published"})
    lines = (tmp_path / "README.md").read_text().splitlines()
    rows = dict(line.strip("| ").split(" | ", 1) for line in lines if line.startswith("| ") and line != "| | |")
    assert rows["Trained for"] == "160 tokens per KV head (128 at rest), 320 tokens per KV head (256 at rest)"
    assert rows["Stage"] == "`dagger`, preset `published`"
    assert rows["Features"].startswith("`best`: key and value, attention of the last 8 16 32 L queries")
    assert rows["Decides"] == "every interval: 32 tokens at 160, 64 tokens at 320"
    assert "Decay" not in rows
    scorers.new("foresightkv", CONFIG, budgets).save_pretrained(tmp_path)
    assert "| Features | `paper`: key" in (tmp_path / "README.md").read_text()
    own = scorers.features.FeatureSpec(kv=False, cumulative=False, decay=None, age=True)
    scorers.new("foresightkv", CONFIG, budgets, features=own).save_pretrained(tmp_path)
    assert (
        "| Features | attention of the last 8 16 32 L queries (L: the interval), age, normalised"
        in (tmp_path / "README.md").read_text()
    )


@pytest.mark.parametrize("name", scorers.METHODS)
@pytest.mark.skipif(not HANDED, reason="the card's cache= is past_key_values= before transformers 5.24, as it says")
def test_the_cards_example_runs(name, folder, tmp_path, capsys):
    model, _ = load(str(folder))
    budget = Budget(0, 4, 12, 4) if name == "foresightkv" else ENTRY
    scorer = random_scorer(name, model.config, budget)
    scorer.save_pretrained(tmp_path, base_model=str(folder), base_fingerprint=model_fingerprint(model))
    code = (tmp_path / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert f"# {budget.slots + scorer.state_entries} tokens per KV head" in code
    exec(code.replace('"this folder"', repr(str(tmp_path))).replace("=1000", "=20"), {})
    assert capsys.readouterr().out

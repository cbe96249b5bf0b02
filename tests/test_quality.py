"""What the papers' headline says, in kind, on the embedded model and real text."""

import pytest
import torch

from kvkeep import load_scorer, policies
from kvkeep.evaluation import documents
from kvkeep.evaluation.contenders import Contender, line_up
from kvkeep.evaluation.evaluate import evaluate
from kvkeep.evaluation.gaps import gaps
from kvkeep.evaluation.table import role
from kvkeep.runtime import models

LENGTH, AT_REST, INTERVAL = 1024, 128, 32


@pytest.mark.slow
def test_golden_is_far_below_every_rule_on_code_and_procedural_documents():
    """ForesightKV, table 2 in kind: 128 tokens at rest, evicting every 32, loss ratio over 1,024 tokens."""
    torch.set_num_threads(1)
    model, tokenizer = models.load("smollm2-135m")
    chosen = [pair for kind in ("code", "procedural") for pair in pack(kind, tokenizer)[:2]]
    names = [name for name in policies.names() if not policies.describe(name).learned and name != "future_mass"]
    contenders = line_up(names, at_rest=True, overrides={"interval": INTERVAL})
    rows = evaluate(model, chosen, contenders, [AT_REST], LENGTH)["rows"]
    for kind in ("all", "code", "procedural"):
        ratio = {row["policy"]: row["loss_ratio"] for row in rows if row["kind"] == kind}
        rules = [row["policy"] for row in rows if row["kind"] == kind and role(row) in ("rule", "baseline")]
        assert len(rules) == 9
        assert all(ratio["golden"] - 1 < (ratio[rule] - 1) / 2 for rule in rules), ratio
    low, high = (
        {row["policy"]: row[f"{share}_entropy_ratio"] for row in rows if row["kind"] == "all"}
        for share in ("low", "high")
    )
    assert all(low[rule] > high[rule] for rule in rules), "the tokens a model is sure of suffer most (table 1)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "oracle"), [("kvpop_mlp", "future_mass"), ("kvpop", "future_mass"), ("foresightkv", "golden")]
)
def test_shipped_scorer_beats_every_rule_on_held_out_text(method, oracle):
    """128 tokens per KV head: docs/learned.md and docs/foresight.md in small, four documents of three kinds."""
    torch.set_num_threads(1)
    model, tokenizer = models.load("smollm2-135m")
    chosen = [pack("docs", tokenizer)[0], pack("code", tokenizer)[0], *pack("procedural", tokenizer)[:2]]
    contenders = line_up(["streaming", "tova", "h2o_decayed", oracle])
    contenders.append(Contender(method).with_scorer(load_scorer(f"smollm2-135m/{method}"), "shipped"))
    rows = [row for row in evaluate(model, chosen, contenders, [128], LENGTH)["rows"] if row["kind"] == "all"]
    (gap,) = gaps(rows)
    assert gap["closed"] > 0.25
    assert gap["wins"] >= 3


def pack(kind, tokenizer):
    return documents.pack(documents.bundled((kind,), split="eval"), tokenizer, LENGTH)

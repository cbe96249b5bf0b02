"""How much of the gap between the best rule and an oracle each learned policy closes, from rows of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from kvkeep.evaluation import statistics
from kvkeep.evaluation.table import best_rule, empty_table, role


def gaps(rows: Sequence[Mapping[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Gap closed by every learned row, per budget and kind of document.

    The rule is the best at that budget on these very documents, picked after the fact, which favours the rule.

    Args:
        rows: of ``evaluate``.
        seed: of the bootstrap.

    Returns:
        One record per learned row and oracle: budget, kind, label, rule, oracle, documents, ``closed`` = (rule -
        learned) / (rule - oracle) on pooled losses, ``ci`` of a paired bootstrap over documents, and ``wins``, the
        documents on which the learned policy loses less than the rule. Oracles no better than the rule are left out.
    """
    found = []
    for budget, kind in dict.fromkeys((row["budget"], row["kind"]) for row in rows):
        peers = [row for row in rows if (row["budget"], row["kind"]) == (budget, kind)]
        rule = best_rule(peers)
        oracles = [row for row in peers if role(row) == "oracle"]
        for learned in [row for row in peers if role(row) == "learned"]:
            for oracle in oracles if rule is not None else ():
                if oracle["loss"] >= rule["loss"]:
                    continue
                losses = [summed_losses(row) for row in (rule, learned, oracle)]
                closed = statistics.gap_closed(*losses, seed=seed)
                found.append(
                    {
                        "budget": budget,
                        "kind": kind,
                        "label": learned["label"],
                        "rule": rule["label"],
                        "oracle": oracle["label"],
                        "documents": len(losses[0]),
                        "closed": closed.value,
                        "ci": [closed.low, closed.high],
                        "wins": sum(mine < its for mine, its in zip(losses[1], losses[0], strict=True)),
                    }
                )
    return found


def gap_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """The records of all documents together, as a table."""
    found = empty_table("gap closed between the best rule and an oracle")
    for column in ("budget", "rule", "oracle", "closed", "wins"):
        found.add_column(column, no_wrap=True)
    for record in records:
        if record["kind"] == "all":
            low, high = record["ci"]
            closed = f"{record['closed']:.2f} [{low:.2f}, {high:.2f}]"
            wins = f"{record['wins']} of {record['documents']}"
            found.add_row(
                record["label"], "learned", str(record["budget"]), record["rule"], record["oracle"], closed, wins
            )
    return found


def summed_losses(row: Mapping[str, Any]) -> list[float]:
    """Summed token losses of a row of ``evaluate``, one number a document."""
    return [document["loss"] * document["tokens"] for document in row["per_document"]]

"""What training bought, from rows of an evaluation: gaps closed, seeds together, learned against learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
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
        One record per oracle and learned row over all documents, or mean of seeds: budget, kind, label, rule, oracle,
        documents, ``closed`` = (rule - learned) / (rule - oracle) on pooled losses, ``ci`` of a paired bootstrap over
        documents, and ``wins``, the documents on which the learned policy loses less than the rule. Oracles no better
        than the rule are left out.
    """
    found = []
    for budget, kind in dict.fromkeys((row["budget"], row["kind"]) for row in rows):
        peers = [row for row in rows if (row["budget"], row["kind"]) == (budget, kind)]
        rule = best_rule(peers)
        oracles = [row for row in peers if role(row) == "oracle"]
        learned_rows = [row for row in peers if role(row) == "learned"]
        together = seeds_together(learned_rows)
        if kind == "all":  # kinds of documents are told for the seeds together only
            together = [*learned_rows, *(row for row in together if row not in learned_rows)]
        for learned in together:
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


def seeds_together(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one budget and kind, those that differ in nothing but the training seed averaged into one.

    Losses are averaged per document, so that what a bootstrap over documents says holds for a typical seed, not
    for an ensemble. A row that stands alone stays as it is.
    """
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        asked = row["label"].partition(" (")[0]  # the policy with its options, without the scorer
        groups.setdefault((asked, row.get("preset"), row.get("league")), []).append(row)
    found = []
    for (asked, preset, _), group in groups.items():
        if len({row.get("seed") for row in group}) < 2:
            found += map(dict, group)
            continue
        documents = [
            dict(each[0]) | {"loss": sum(document["loss"] for document in each) / len(each)}
            for each in zip(*(row["per_document"] for row in group), strict=True)
        ]
        loss = sum(row["loss"] for row in group) / len(group)
        made = f" ({preset})" if preset else ""
        label = f"{asked}{made}, mean of {len(group)} seeds"
        found.append(dict(group[0]) | {"label": label, "seed": None, "loss": loss, "per_document": documents})
    return found


def comparisons(rows: Sequence[Mapping[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Every pair of learned policies, seeds together, over all documents, and every one with every rule.

    Args:
        rows: of ``evaluate``.
        seed: of the bootstrap.

    Returns:
        One record per budget and pair: ``label``, ``reference``, documents, ``difference`` of the loss ratios (below 0
        where the first loses less), its paired ``ci``, and ``wins``, the documents on which the first loses less.
    """
    found = []
    for budget in dict.fromkeys(row["budget"] for row in rows):
        peers = [row for row in rows if row["budget"] == budget and row["kind"] == "all"]
        learned = seeds_together([row for row in peers if role(row) == "learned"])
        rules = [row for row in peers if role(row) in ("rule", "baseline")]
        pairs = [(row, reference) for reference, row in combinations(learned, 2)]
        pairs += [(row, rule) for row in learned for rule in rules]
        found += [_compared(budget, row, reference, seed) for row, reference in pairs]
    return found


def _compared(budget: int, row: Mapping[str, Any], reference: Mapping[str, Any], seed: int) -> dict[str, Any]:
    full = [document["full_loss"] * document["tokens"] for document in row["per_document"]]
    losses = summed_losses(row), summed_losses(reference)
    difference = statistics.bootstrap_difference(*losses, full, seed=seed)
    return {
        "budget": budget,
        "label": row["label"],
        "reference": reference["label"],
        "documents": len(full),
        "difference": difference.value,
        "ci": [difference.low, difference.high],
        "wins": sum(mine < its for mine, its in zip(*losses, strict=True)),
    }


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

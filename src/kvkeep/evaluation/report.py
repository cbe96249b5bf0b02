"""An evaluation as a page of Markdown: `python -m kvkeep.evaluation.report out.json [more.json ...] > page.md`.

Several results are joined where they measured the same model on the same documents: what was added later, more rules or
more seeds, then stands in one table with what was there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvkeep.evaluation.gaps import comparisons, gaps
from kvkeep.evaluation.table import best_rule, role

RECALL_LINES = {"recall": "recall", "by chance": "recall_chance", "output cosine": "output_cosine"}


def markdown(result: Mapping[str, Any]) -> str:
    """Tables of loss ratios with intervals, by kind, of recall, and of gaps closed, where there are any.

    Every number is from ``result``.

    Args:
        result: what ``evaluate`` returns, or its JSON read back.
    """
    rows, settings = result["rows"], result["settings"]
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    everything = [row for row in rows if row["kind"] == "all"]
    lines = [
        f"Model {settings['model']}, {everything[0]['documents']} documents of {everything[0]['length']} tokens, "
        f"{settings['dtype']}; loss under the policy over loss with the full cache on the same tokens, 95 % bootstrap "
        "interval over documents; * the best policy that is neither learned nor an oracle; low and high: the ratio on "
        "the 80 % of tokens the full model is surest of, and on the rest.",
    ]
    for budget in budgets:
        lines += ["", f"### {budget} tokens per KV head", ""]
        lines += _ratios([row for row in everything if row["budget"] == budget])
        lines += ["", f"By kind of document, at {budget}:", ""]
        lines += _kinds([row for row in rows if row["budget"] == budget])
        lines += _recalls([row for row in everything if row["budget"] == budget])
    records = gaps(rows)
    if records:
        lines += ["", "### Gap closed between the best rule and an oracle", ""]
        lines += _gaps(records)
    pairs = comparisons(rows)
    if pairs:
        lines += ["", "### Learned policies against each other and against rules", ""]
        lines += ["Difference of loss ratios, paired by document; below 0 where the first loses less:", ""]
        lines += _pairs(pairs)
    return "\n".join(lines) + "\n"


def _ratios(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    best, cells = best_rule(list(rows)), []
    for row in rows:
        low, high = row["loss_ratio_ci"]
        ratio = f"{row['loss_ratio']:.3f} [{low:.3f}, {high:.3f}]" + (" *" if row is best else "")
        if role(row) == "no eviction":
            ratio = f"1.000 ({row['full_loss']:.3f} nats)"
        shares = [row["low_entropy_ratio"], row["high_entropy_ratio"]]
        shares = ["-" if share is None else f"{share:.3f}" for share in shares]
        cells.append([row["label"], role(row), ratio, *shares, f"{row['realised_compression']:.2f}"])
    return grid(["policy", "", "loss ratio", "low", "high", "compression"], cells)


def _kinds(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    cells = {(row["label"], row["kind"]): row for row in rows}
    labels = dict.fromkeys(row["label"] for row in rows)
    head = [f"{kind} ({next(row for row in rows if row['kind'] == kind)['documents']})" for kind in kinds]
    lines = [[label, *(f"{cells[label, kind]['loss_ratio']:.3f}" for kind in kinds)] for label in labels]
    return grid(["policy", *head], lines)


def _recalls(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Policies across and layers down: every learned policy stands beside StreamingLLM. Nothing if not measured."""
    rows = [row for row in rows if row.get("recall") is not None]
    if not rows:
        return []
    lines = [[name, *(f"{row[key]:.3f}" for row in rows)] for name, key in RECALL_LINES.items()]
    for layer, found in enumerate(zip(*(row["recall_per_layer"] for row in rows), strict=True)):
        if found[0] is not None:  # a layer that is not bounded
            lines.append([f"layer {layer}", *(f"{recall:.3f}" for recall in found)])
    said = (
        f"What is held of the top-k of KVpop's teacher, at {rows[0]['budget']}, where a policy evicts (by chance: k of "
        "the tokens it chooses from), and the cosine of attention's output with that of the full cache. Monitors, not "
        "goals:"
    )
    return ["", said, "", *grid(["", *(row["label"] for row in rows)], lines)]


def _gaps(records: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = []
    for record in records:
        low, high = record["ci"]
        closed = f"{record['closed']:.2f} [{low:.2f}, {high:.2f}]"
        wins = f"{record['wins']} of {record['documents']}"
        cells.append(
            [record["label"], record["budget"], record["kind"], record["rule"], record["oracle"], closed, wins]
        )
    return grid(["learned", "budget", "kind", "rule", "oracle", "closed", "wins"], cells)


def _pairs(records: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = []
    for record in records:
        low, high = record["ci"]
        difference = f"{record['difference']:+.4f} [{low:+.4f}, {high:+.4f}]"
        wins = f"{record['wins']} of {record['documents']}"
        cells.append([record["label"], record["reference"], record["budget"], difference, wins])
    return grid(["policy", "against", "budget", "difference", "wins"], cells)


def grid(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a table."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows]]
    return [line.replace("|  |", "| |") for line in lines]


SAME = ("model_fingerprint", "dtype", "length", "budgets", "budget_at_rest", "documents")
ONE = ("scorer", "interval", "rest", "slots")  # of rows with one label
CLOSE = 1e-4  # of full-cache losses in nats: another machine rounds otherwise, another text is further away


def joined(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several evaluations of one model on the same documents as one.

    A policy that several have stands there once, where it is the same.

    Raises:
        ValueError: naming what differs between them, or a label that means two things.
    """
    first = results[0]
    rows = {(row["label"], row["budget"], row["kind"]): row for row in first["rows"]}
    full = {key[1:]: row["full_loss"] for key, row in rows.items()}
    for other in results[1:]:
        for part in SAME:
            if other["settings"].get(part) != first["settings"].get(part):
                raise ValueError(f"results with another {part.replace('_', ' ')} cannot be joined")
        for row in other["rows"]:
            if abs(row["full_loss"] - full[row["budget"], row["kind"]]) > CLOSE:
                raise ValueError(f"the full cache loses {row['full_loss']} nats in one result and another in the first")
            mine = rows.setdefault((row["label"], row["budget"], row["kind"]), row)
            if any(mine.get(part) != row.get(part) for part in ONE) or abs(mine["loss"] - row["loss"]) > CLOSE:
                raise ValueError(
                    f"{row['label']!r} at {row['budget']} is not the same in two results: measure both in one command, "
                    "where they have labels of their own"
                )
    order = {key: place for place, key in enumerate(full)}  # budgets and kinds as the first has them
    return dict(first) | {"rows": sorted(rows.values(), key=lambda row: order[row["budget"], row["kind"]])}


def read(name: str) -> dict[str, Any]:
    """What `kvkeep evaluate --json` wrote.

    Raises:
        ValueError: naming a file that is something else.
        OSError: where there is none.
    """
    try:
        found = json.loads(Path(name).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name} is no JSON of kvkeep evaluate: {error}") from error
    if not isinstance(found, dict) or not {"rows", "settings"} <= found.keys():
        raise ValueError(f"{name} is no JSON of kvkeep evaluate: it has no rows and settings")
    return found


def main(arguments: Sequence[str]) -> None:
    """Print the page; exit code 2 where there is none."""
    try:
        if not arguments or {"-h", "--help"} & set(arguments):
            raise ValueError("give the JSON of one evaluation or more: out.json ...")
        print(markdown(joined([read(name) for name in arguments])), end="")
    except (OSError, ValueError) as error:
        print(f"error: this is no report: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main(sys.argv[1:])

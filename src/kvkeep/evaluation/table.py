"""The result of an evaluation as tables for a terminal: one per kind of document, budgets side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvkeep import policies

ROLES = {"full": "no eviction", "random": "baseline", "streaming": "baseline"}
FIXED_WIDTH, WIDTH_PER_BUDGET = 34, 37


def table(result: Mapping[str, Any], width: int = 120) -> Group:
    """Tables of loss ratios with their intervals, and of the ratios on low- and high-entropy tokens.

    The best policy that is neither an oracle nor learned is marked with a star at every budget.

    Args:
        result: what `evaluate` returns, or its JSON read back.
        width: of the terminal; budgets that do not fit beside each other go below each other.
    """
    return Group(*_tables(result["rows"], max(1, (width - FIXED_WIDTH) // WIDTH_PER_BUDGET)))


def by_kind(result: Mapping[str, Any], budget: int) -> Table:
    """One table of loss ratios at one budget: policies down, kinds of document across."""
    rows = [row for row in result["rows"] if row["budget"] == budget]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    cells = {(row["label"], row["kind"]): row for row in rows}
    best = {kind: best_rule([row for row in rows if row["kind"] == kind]) for kind in kinds}
    found = empty_table(f"loss ratio at {budget} by kind of document")
    for kind in kinds:
        found.add_column(kind, no_wrap=True)
    for name in dict.fromkeys(row["label"] for row in rows):
        line = [cells[name, kind] for kind in kinds]
        _add(found, line[0], [_marked(f"{row['loss_ratio']:.3f}", row is best[row["kind"]]) for row in line])
    return found


def recall_table(result: Mapping[str, Any]) -> Table | None:
    """What every policy holds of the teacher's top-k, over all documents; None if it was not measured."""
    rows = [row for row in result["rows"] if row["kind"] == "all" and row.get("recall") is not None]
    if not rows:
        return None
    found = empty_table("recall of KVpop's teacher, cosine of attention's outputs")
    for column in ("budget", "recall", "by chance", "output cosine"):
        found.add_column(column, no_wrap=True)
    for row in rows:
        numbers = [f"{row[name]:.3f}" for name in ("recall", "recall_chance", "output_cosine")]
        _add(found, row, [str(row["budget"]), *numbers])
    return found


def role(row: Mapping[str, Any]) -> str:
    """What a row stands for in a comparison: no eviction, baseline, rule, learned or oracle."""
    method = policies.describe(row["policy"]) if row["policy"] in policies.names() else None
    if method is not None and method.oracle:
        return "oracle"
    if row["scorer"] is not None or (method is not None and method.learned):
        return "learned"
    return ROLES.get(row["policy"], "rule")


def best_rule(rows: list[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The row of the lowest loss ratio among those that any user can run without training anything."""
    rules = [row for row in rows if role(row) in ("rule", "baseline")]
    return min(rules, key=lambda row: row["loss_ratio"], default=None)


def _tables(rows: list[Mapping[str, Any]], beside: int) -> Iterator[Table]:
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for first in range(0, len(budgets), beside):
            shown = budgets[first : first + beside]
            yield _table(kind, shown, [row for row in rows if row["kind"] == kind and row["budget"] in shown])


def _table(kind: str, budgets: list[int], rows: list[Mapping[str, Any]]) -> Table:
    count = rows[0]["documents"]
    found = empty_table(f"{kind}: {count} document{'s' if count > 1 else ''} of {rows[0]['length']} tokens")
    for budget in budgets:
        found.add_column(f"loss ratio at {budget}", no_wrap=True)
        found.add_column("low", no_wrap=True)
        found.add_column("high", no_wrap=True)
    cells = {(row["label"], row["budget"]): row for row in rows}
    best = {budget: best_rule([row for row in rows if row["budget"] == budget]) for budget in budgets}
    for name in dict.fromkeys(row["label"] for row in rows):
        line = []
        for budget in budgets:
            row = cells[name, budget]
            line += [_marked(_ratio(row), row is best[budget]), _share(row, "low"), _share(row, "high")]
        _add(found, row, line)
    return found


def empty_table(title: str) -> Table:
    """A table in the house style whose first two columns name a policy and its role."""
    style = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "show_edge": False, "pad_edge": False}
    found = Table(title=f"\n{title}", title_justify="left", title_style="bold", **style)
    found.add_column("policy", no_wrap=True)
    found.add_column("", no_wrap=True)
    return found


def _add(found: Table, row: Mapping[str, Any], line: list[Text | str]) -> None:
    found.add_row(row["label"], role(row), *line, style="dim" if role(row) in ("oracle", "no eviction") else None)


def _ratio(row: Mapping[str, Any]) -> str:
    if role(row) == "no eviction":
        return f"{row['loss_ratio']:.3f} ({row['full_loss']:.3f} nats)"
    if row["documents"] == 1:  # has no spread to show
        return f"{row['loss_ratio']:.3f}"
    low, high = row["loss_ratio_ci"]
    return f"{row['loss_ratio']:.3f} [{low:.3f}, {high:.3f}]"


def _marked(text: str, is_best: bool) -> Text:
    return Text(f"{text} *" if is_best else text, style="bold green" if is_best else "")


def _share(row: Mapping[str, Any], share: str) -> str:
    ratio = row[f"{share}_entropy_ratio"]
    return "-" if ratio is None else f"{ratio:.2f}"

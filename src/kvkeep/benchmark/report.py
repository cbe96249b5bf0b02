"""A benchmark as tables: `python -m kvkeep.benchmark.report out.json [more.json ...] > page.md`.

The command line prints the same tables. Every number is from the JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvkeep.benchmark.marks import marks
from kvkeep.evaluation.report import grid

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]


class Table(NamedTuple):
    """Cells as text; ``said`` is one line about them."""

    title: str
    said: str
    head: list[str]
    cells: list[list[str]]


def _plain(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row[key] is None else str(row[key])


def _number(key: str, form: str, factor: float = 1.0) -> Callable[[Row], str]:
    return lambda row: "" if row[key] is None else format(row[key] * factor, form)


def _milliseconds(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row[key] is None else f"{row[key]:.{1 if row[key] >= 10 else 2}f}"


def _above_floor(row: Row) -> str:
    return "" if row["floor_ms"] is None else f"{row['ms_median'] / row['floor_ms']:.1f}"


POLICY: list[Column] = [("policy", _plain("policy")), ("budget", _plain("budget"))]
TIMES: list[Column] = [("best ms", _milliseconds("ms_best")), ("median ms", _milliseconds("ms_median"))]
FLOOR: list[Column] = [("floor ms", _milliseconds("floor_ms")), ("x floor", _above_floor)]
KV: Column = ("KV MB", _number("kv_bytes", ".2f", 1e-6))
PEAK: Column = ("peak MB", _number("peak_rss", ".0f", 1e-6))
RATIO: Column = ("ratio", _number("ratio", ".2f"))
FASTER: Column = ("times faster", lambda row: f"{1 / row['ratio']:.2f}")
MICROSECONDS: list[Column] = [
    ("best us", _number("ms_best", ".1f", 1e3)),
    ("median us", _number("ms_median", ".1f", 1e3)),
    ("writes only, best", _number("reference_ms_best", ".1f", 1e3)),
    ("writes only, median", _number("reference_ms", ".1f", 1e3)),
]
WRITES: Column = ("writes ms", _milliseconds("reference_ms"))
OVERHEAD: list[Column] = [
    ("overhead", lambda row: f"{row['ratio'] - 1:+.1%}"),
    ("of bests", lambda row: f"{row['ms_best'] / row['reference_ms_best'] - 1:+.1%}"),
]
HELD: list[Column] = [
    ("bytes", _plain("kv_bytes")),
    ("side state", _plain("side_bytes")),
    ("grown", _plain("grown_bytes")),
]
AT: list[Column] = [("context", _plain("context")), ("batch", _plain("batch"))]

COLUMNS: dict[str, tuple[str, list[Column]]] = {
    "decode": (
        "Milliseconds per step; ratio of medians to the first evicting policy at the shortest context, same batch.",
        [*POLICY, *AT, *TIMES, ("tokens/s", _number("tokens_per_second", ".1f")), RATIO, *FLOOR, KV, PEAK],
    ),
    "overhead": (
        "A whole step, on average over an interval, over one that only writes slots and attends.",
        [*POLICY, ("", _plain("part")), *TIMES, WRITES, *OVERHEAD, *FLOOR],
    ),
    "parts": (
        "In one layer, microseconds. layer: an ordinary step; score: what is computed to choose; replace: all of a "
        "step but attention; statistics: watching a query; evict: dropping an interval of tokens by given scores.",
        [*POLICY, ("part", _plain("part")), *MICROSECONDS],
    ),
    "prefill": (
        "One layer reading a prompt, against causal attention over all of it (sdpa).",
        [*POLICY, ("length", _plain("context")), *TIMES, FASTER, PEAK],
    ),
    "labels": (
        "One KV head with its query heads, row blocks against S x S.",
        [("label", _plain("part")), ("", _plain("policy")), ("length", _plain("context")), *TIMES, FASTER, PEAK],
    ),
    "running_topk": (
        "After compilation.",
        [("backend", _plain("policy")), ("rows", _plain("batch")), ("length", _plain("context")), *TIMES],
    ),
    "memory": (
        "Bytes of a full cache, its side state, and what it has grown by after so many tokens more.",
        [*POLICY, ("tokens", _plain("context")), *HELD],
    ),
    "capacity": (
        "The largest batch whose cache fits into a fixed memory, and what it decodes; ratio of throughputs to the "
        "first full cache.",
        [*POLICY, *AT, *TIMES, ("tokens/s", _number("tokens_per_second", ".1f")), RATIO, *FLOOR, KV],
    ),
}
STEPS = ("step", "evicting step")  # parts of overhead that are a whole model's


def tables(rows: Sequence[Row]) -> list[Table]:
    """Rows by what was measured; columns that would be empty are left out."""
    found = []
    for what, (said, columns) in COLUMNS.items():
        some = [row for row in rows if _section(row) == what]
        if some:
            cells = {name: [form(row) for row in some] for name, form in columns}
            shown = [name for name, column in cells.items() if any(column)]
            lines = [list(line) for line in zip(*(cells[name] for name in shown), strict=True)]
            found.append(Table(what.replace("_", " "), said, shown, lines))
    return found


def _section(row: Row) -> str:
    return "parts" if row["what"] == "overhead" and row["part"] not in STEPS else row["what"]


def described(settings: Mapping[str, Any]) -> str:
    """Where and how it was measured, in a line or two."""
    threads = f"{settings['threads']} thread" + ("s" if settings["threads"] != 1 else "")
    parts = [
        f"{settings['model']}, {settings['dtype']}, {settings['device']} ({settings['processor']})",
        f"{threads}, {settings['clock']}",
        f"load average {settings['load_average']} before and {settings['load_average_after']} after",
        f"torch {settings['torch']}, transformers {settings['transformers']}, Python {settings['python']}",
    ]
    if "bandwidth_gb_per_s" in settings:
        parts.append(
            f"weights {settings['weight_bytes'] / 1e6:.0f} MB, read bandwidth {settings['bandwidth_gb_per_s']} GB/s "
            f"({settings['bandwidth_by']})"
        )
    return "; ".join(parts)


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """Tables of several results below each other, and the marks that they reach or miss.

    Args:
        results: what :func:`kvkeep.benchmark.suite.measure` returns, or its JSON read back.
    """
    lines = ["| mark | found | |", "| --- | --- | --- |"]
    for result in results:
        for mark in marks(result["rows"]):
            lines.append(f"| {mark.demand} | {mark.found} | {'reached' if mark.reached else 'not reached'} |")
    lines = ["### Marks", "", *lines] if len(lines) > 2 else []
    for result in results:
        for table in tables(result["rows"]):
            dtype, lengths = result["settings"]["dtype"], table.said
            lines += ["", f"### {table.title}, {dtype}", "", lengths, "", *grid(table.head, table.cells)]
        lines += ["", f"({described(result['settings'])}.)"]
    return "\n".join(lines).lstrip("\n") + "\n"


def main(arguments: Sequence[str]) -> None:
    """Print the page; exit code 2 where there is none."""
    try:
        if not arguments:
            raise ValueError("give the JSON of one benchmark or more: out.json ...")
        print(markdown([json.loads(Path(name).read_text(encoding="utf-8")) for name in arguments]), end="")
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: this is no report: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main(sys.argv[1:])

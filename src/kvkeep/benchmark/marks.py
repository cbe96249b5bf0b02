"""The marks that a benchmark is held to, and whether its rows reach them. Reads rows only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]

FLAT, LONG, SHORT = 1.05, 32_768, 1024
GAINS = [(("full",), 8192, 1.7), (("full",), 32_768, 4.0), (("full_preallocated", "static"), 32_768, 1.5)]
OVERHEADS = {"kvpop_mlp": 0.03, "kvpop": 0.05, "foresightkv": 0.03}
PREFILLS = {4096: 2.0, 8192: 5.0}
LABEL_LENGTH, LABELS = 8192, 4.0
TOPK_MILLISECONDS = 1000.0


class Mark(NamedTuple):
    """One demand and what was found."""

    demand: str
    found: str
    reached: bool


def marks(rows: Sequence[Row]) -> list[Mark]:
    """Every mark that the rows say something about."""
    return [*_decode(rows), *_overhead(rows), *_prefill(rows), *_labels(rows), *_memory(rows)]


def _of(rows: Sequence[Row], what: str) -> list[Row]:
    return [row for row in rows if row["what"] == what]


def _decode(rows: Sequence[Row]) -> Iterator[Mark]:
    rows = _of(rows, "decode")
    for batch in dict.fromkeys(row["batch"] for row in rows):
        group = [row for row in rows if row["batch"] == batch]
        bounded = {row["context"]: row for row in reversed(group) if row["budget"] is not None and _first(group, row)}
        if SHORT in bounded and LONG in bounded:
            median, best = (bounded[LONG][key] / bounded[SHORT][key] for key in ("ms_median", "ms_best"))
            name = f"{bounded[LONG]['policy']} {bounded[LONG]['budget']}, batch {batch}"
            demand = f"{name}: a step at {LONG} tokens at most {FLAT} times one at {SHORT}"
            yield Mark(demand, f"{median:.3f} (best {best:.3f})", median <= FLAT)
        for names, context, wanted in GAINS:
            some = [row for row in group if row["policy"] in names and row["context"] == context]
            if not some or context not in bounded:
                continue
            full = min(some, key=lambda row: row["ms_median"])  # the strongest of those that do not concatenate
            median, best = (full[key] / bounded[context][key] for key in ("ms_median", "ms_best"))
            who = f"{full['policy']} over {bounded[context]['policy']}"
            demand = f"{who} at {context} tokens, batch {batch}: at least {wanted}"
            yield Mark(f"{demand} ({full['dtype']})", f"{median:.2f} (best {best:.2f})", median >= wanted)


def _first(group: Sequence[Row], row: Row) -> bool:
    return row["policy"] == next(other["policy"] for other in group if other["budget"] is not None)


def _overhead(rows: Sequence[Row]) -> Iterator[Mark]:
    for row in _of(rows, "overhead"):
        if row["part"] == "step" and row["policy"] in OVERHEADS:
            wanted, extra = OVERHEADS[row["policy"]], row["ratio"] - 1
            best = row["ms_best"] / row["reference_ms_best"] - 1
            demand = f"{row['policy']} over writing slots only, {row['dtype']}: at most {wanted:.0%} of a step"
            yield Mark(demand, f"{extra:+.1%} (best {best:+.1%})", extra <= wanted)


def _prefill(rows: Sequence[Row]) -> Iterator[Mark]:
    for row in _of(rows, "prefill"):
        if row["budget"] is not None and row["context"] in PREFILLS:
            wanted, faster = PREFILLS[row["context"]], 1 / row["ratio"]
            demand = f"sparse prefill of {row['policy']} at {row['context']}, {row['dtype']}: at least {wanted:g} times"
            yield Mark(f"{demand} faster than sdpa", f"{faster:.2f}", faster >= wanted)


def _labels(rows: Sequence[Row]) -> Iterator[Mark]:
    for row in _of(rows, "labels"):
        if row["policy"] != "dense" and row["context"] == LABEL_LENGTH:
            faster = 1 / row["ratio"]
            demand = f"{row['part']} at {LABEL_LENGTH}, {row['dtype']}: at least {LABELS:g} times faster than dense"
            yield Mark(demand, f"{faster:.2f}", faster >= LABELS)
    for row in _of(rows, "running_topk")[:1]:
        demand = f"running top-k {row['batch']} x {row['context']}: under {TOPK_MILLISECONDS / 1000:g} s"
        yield Mark(demand, f"{row['ms_median'] / 1000:.3f} s", row["ms_median"] < TOPK_MILLISECONDS)


def _memory(rows: Sequence[Row]) -> Iterator[Mark]:
    for row in _of(rows, "memory"):
        demand = f"{row['policy']}: not one byte more after {row['context']} tokens"
        yield Mark(demand, f"{row['grown_bytes']} bytes", row["grown_bytes"] == 0)

"""`kvkeep benchmark`: what a token costs, as ratios measured in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

from kvkeep import policies as registry
from kvkeep.benchmark.decode import FULL, check, decode
from kvkeep.cli import common
from kvkeep.evaluation.store import require_writable, write_atomic

BatchesFlag = Annotated[str, typer.Option("--batches", help="Rows decoded together, like 1,4.")]
RepetitionsFlag = Annotated[int, typer.Option("--repetitions", min=5, help="Measured tokens per row.")]


def run(
    model: common.ModelFlag = common.DEFAULT_MODEL,
    policy_names: Annotated[
        str, typer.Option("--policies", help=f"Names; also {FULL[0]}, {FULL[1]} (without concatenation).")
    ] = "full,full_preallocated,streaming,h2o_decayed,snapkv",
    budget: common.BudgetFlag = 512,
    lengths: Annotated[str, typer.Option("--lengths", help="Tokens seen before, like 2048,8192.")] = "2048,8192",
    batches: BatchesFlag = "1",
    repetitions: RepetitionsFlag = 9,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Result.")] = None,
    dtype: common.DtypeFlag = None,
    device: common.DeviceFlag = None,
    seed: common.SeedFlag = 0,
) -> None:
    """Time decoding with caches filled to a length.

    All caches run through the same attention function and take turns, a token each. One thread.
    """
    names, contexts = common.names(policy_names), common.numbers(lengths, "--lengths")
    for name in names:
        if name not in FULL:
            registry.create(name, budget)
    check(names, budget, contexts, repetitions)
    require_writable(out, "--json")
    torch.set_num_threads(1)
    language_model, _ = common.load(model, dtype, device)
    with common.progress_bar() as progress:
        result = decode(
            language_model,
            names,
            budget,
            contexts,
            common.numbers(batches, "--batches"),
            repetitions,
            seed,
            lambda done, total: progress("decoding", done, total),
        )
    if out is not None:
        write_atomic(out, json.dumps(result, indent=1) + "\n")
    common.output().print(table(result))


def table(result: dict[str, Any]) -> Table:
    """Rows side by side; the ratio is of medians, to the first evicting cache at the shortest length."""
    settings = result["settings"]
    title = f"{settings['model']}, {settings['threads']} thread, load average {settings['load_average']}"
    grid = Table(box=box.SIMPLE_HEAD, title=title)
    for column in ("policy", "budget", "context", "batch", "best ms", "median ms", "ratio", "KV MB"):
        grid.add_column(column, justify="left" if column == "policy" else "right")
    for row in result["rows"]:
        cells = [row["policy"], row["budget"] or "", row["context"], row["batch"]]
        cells += [f"{row['ms_best']:.1f}", f"{row['ms_median']:.1f}", f"{row['ratio']:.2f}"]
        grid.add_row(*map(str, [*cells, f"{row['kv_bytes'] / 1e6:.1f}"]))
    return grid

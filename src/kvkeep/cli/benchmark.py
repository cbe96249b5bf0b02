"""`kvkeep benchmark`: what a token, a prompt, a label and an eviction cost, as ratios measured in one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

from kvkeep import policies
from kvkeep.benchmark import plot, shapes, suite
from kvkeep.benchmark.caches import FULL, contenders, evicting, untrained
from kvkeep.benchmark.report import described, markdown, tables
from kvkeep.cli import common
from kvkeep.evaluation.contenders import Contender, split_budget
from kvkeep.evaluation.store import require_writable, write_atomic

DEFAULT_POLICIES = "full,full_preallocated,streaming,h2o_decayed,snapkv"

WhatFlag = Annotated[str, typer.Option("--what", help=f"Any of {', '.join(suite.WHATS)}; or all.")]
PoliciesFlag = Annotated[
    str, typer.Option("--policies", help=f"Names, or all; also {', '.join(FULL)}: caches that keep everything.")
]
LengthsFlag = Annotated[
    str | None, typer.Option("--lengths", help="Tokens seen before, or read, like 2048,8192 (the default of decode).")
]
BatchesFlag = Annotated[str, typer.Option("--batches", help="Rows decoded together, like 1,4.")]
RepetitionsFlag = Annotated[
    int | None, typer.Option("--repetitions", min=5, help="Measured turns; by default 9 of decode, 32 of overhead, 5.")
]
MemoryFlag = Annotated[int, typer.Option("--kv-memory", min=1, help="Megabytes of cache that capacity may fill.")]
TokensFlag = Annotated[int, typer.Option("--tokens", min=1, help="That memory puts through every cache.")]
PeakFlag = Annotated[bool, typer.Option("--peak", help="Also peak memory of each row: one process a row, slow.")]
PlotFlag = Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="Time and bytes over the context.")]
ReportFlag = Annotated[Path | None, typer.Option("--report", metavar="FILE.md", help="The tables, and marks reached.")]


def run(
    model: Annotated[
        str, typer.Option("--model", help="As elsewhere; or random:qwen3-4b, random:qwen3-8b: no weights needed.")
    ] = common.DEFAULT_MODEL,
    what: WhatFlag = "decode",
    policy_names: PoliciesFlag = DEFAULT_POLICIES,
    budget: common.BudgetFlag = 512,
    lengths: LengthsFlag = None,
    batches: BatchesFlag = "1",
    repetitions: RepetitionsFlag = None,
    kv_memory: MemoryFlag = 512,
    tokens: TokensFlag = suite.memory.TOKENS,
    peak: PeakFlag = False,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Result.")] = None,
    picture: PlotFlag = None,
    report: ReportFlag = None,
    sinks: common.SinksFlag = None,
    window: common.WindowFlag = None,
    interval: common.IntervalFlag = None,
    budget_at_rest: common.AtRestFlag = False,
    scorer: common.ScorersFlag = None,
    dtype: common.DtypeFlag = None,
    device: common.DeviceFlag = None,
    seed: common.SeedFlag = 0,
) -> None:
    """Measure speed and memory: decoding, eviction, prompts, training labels.

    Everything that is compared takes turns in one process, on one thread; what is printed are ratios.
    docs/speed.md says what each row means.
    """
    everything = what == "all"
    plan = suite.Plan(
        suite.WHATS if everything else tuple(common.names(what)),
        contenders(
            _all_policies() if policy_names == "all" else common.names(policy_names),
            seed=seed,
            at_rest=budget_at_rest,
            overrides={"sinks": sinks, "window": window, "interval": interval},
            given=common.scorers(scorer or []),
        ),
        budget,
        None if lengths is None else common.numbers(lengths, "--lengths"),
        common.numbers(batches, "--batches"),
        repetitions,
        seed,
        kv_memory * 10**6,
        tokens,
        peak,
    )
    common.require_intervals(interval, evicting(plan.contenders))
    plan.check()
    for contender in evicting(plan.contenders):
        if contender.scorer is None and policies.describe(contender.name).learned:
            split_budget(contender.name, budget, budget_at_rest, contender.overrides)
        else:
            contender.policy(budget)
    for path, flag in ((out, "--json"), (picture, "--plot"), (report, "--report")):
        require_writable(path, flag)
    if picture is not None:
        plot.check(picture, plan.what, plan.lengths_of("decode"))
    random = shapes.is_random(model)
    torch.set_num_threads(1)
    if random:
        language_model = shapes.load(model, None if dtype is None else dtype.value, device)
    else:
        language_model, _ = common.load(model, dtype, device)
    plan = replace(plan, contenders=[_equipped(one, language_model, budget, random) for one in plan.contenders])
    with common.progress_bar() as progress:
        result = suite.measure(plan, language_model, model, progress)
    if out is not None:
        write_atomic(out, json.dumps(result, indent=1, allow_nan=False) + "\n")
    if report is not None:
        write_atomic(report, markdown([result]))
    if picture is not None:
        write_atomic(picture, plot.svg(result))
    show(result)


def _all_policies() -> list[str]:
    """Caches that keep everything, and every policy that decodes."""
    names = [name for name in policies.names() if name != "full" and not policies.describe(name).oracle]
    return [*FULL, *names]


def _equipped(contender: Contender, model: Any, budget: int, random: bool) -> Contender:
    """With the scorer shipped for the model; for random weights with one as random."""
    if contender.name in FULL:
        return contender
    return untrained(contender, model.config, budget) if random else common.equipped(contender, model)


def show(result: Mapping[str, Any]) -> None:
    """Prints the tables."""
    console = common.output()
    console.print(described(result["settings"]))
    for found in tables(result["rows"]):
        grid = Table(box=box.SIMPLE_HEAD, title=found.title, caption=found.said, caption_justify="left")
        for place, name in enumerate(found.head):
            left = place == 0 or name in ("", "part")
            grid.add_column(name, justify="left" if left else "right", no_wrap=True)
        for cells in found.cells:
            grid.add_row(*cells)
        console.print(grid)

"""`kvkeep train`: a scorer for your model, from your documents."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep import scorers
from kvkeep.cli import common
from kvkeep.cli.evaluate import DataFlag, in_turn
from kvkeep.evaluation import documents
from kvkeep.training import kvpop

MethodArgument = Annotated[str, typer.Argument(metavar="METHOD", help=f"{' or '.join(kvpop.METHODS)}.")]
OutFlag = Annotated[Path, typer.Option("--out", metavar="DIR", help="The checkpoint; the run lives in DIR/run.")]
CountFlag = Annotated[int | None, typer.Option("--documents", min=2, help="At most so many, of all kinds in turn.")]
PresetFlag = Annotated[str, typer.Option("--preset", help=f"{', '.join(kvpop.PRESETS)}.")]
StepsFlag = Annotated[int | None, typer.Option("--steps", min=1, help="Optimiser steps; the preset's by default.")]
ShardsFlag = Annotated[
    Path | None, typer.Option("--shards", metavar="DIR", help="Where read documents are kept, to share between runs.")
]


def run(
    method: MethodArgument,
    out: OutFlag,
    more: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="More files for --data.")] = None,
    model: common.ModelFlag = common.DEFAULT_MODEL,
    data: DataFlag = None,
    count: CountFlag = None,
    length: Annotated[int, typer.Option("--length", min=3, help="Tokens of every document.")] = 1024,
    budgets: Annotated[str, typer.Option("--budgets", help="Tokens per KV head, like 128,256.")] = "128,256",
    preset: PresetFlag = "best",
    steps: StepsFlag = None,
    hidden: Annotated[int | None, typer.Option("--hidden", min=1, help="Width of the scoring network.")] = None,
    loss: Annotated[str | None, typer.Option("--loss", help="regression or boundary.")] = None,
    decay: Annotated[str | None, typer.Option("--decay", help="calibrated, learned or off.")] = None,
    group: Annotated[str | None, typer.Option("--group", help="Target over a group: max, mean_log, log_mean.")] = None,
    delay: Annotated[bool, typer.Option(help="kvpop reads its memory when a token leaves, or when it enters.")] = True,
    shards: ShardsFlag = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    dtype: common.DtypeFlag = None,
    device: common.DeviceFlag = None,
    seed: common.SeedFlag = 0,
) -> None:
    """Train a scorer; the backbone stays as it is.

    Reads every document once, fits the scorer to the attention that tokens receive later, chooses the decay by
    loss on a few of them, and saves a checkpoint for --scorer. Killed runs go on with --resume.
    """
    if method not in kvpop.METHODS:
        raise ValueError(f"train takes {' or '.join(kvpop.METHODS)}, not {method!r}")
    options: dict[str, Any] = {} if delay else {"options": {"delay": False}}
    settings = kvpop.recipe(preset, steps, hidden=hidden, loss=loss, decay=decay, group=group, **options)
    bounds = common.numbers(budgets, "--budgets")
    files = [*(data or []), *(more or [])]
    texts = documents.read(files) if files else documents.bundled(split="train")
    language_model, tokenizer = common.load(model, dtype, device)
    scorers.new(method, language_model.config, bounds)  # complains about budgets before anything slow
    packed = in_turn(documents.pack(texts, tokenizer, length), count)
    with common.progress_bar() as progress:
        scorer = kvpop.train(
            method,
            language_model,
            packed,
            bounds,
            out,
            settings,
            seed=seed,
            resume=resume,
            base_model=model,
            command=shlex.join(["kvkeep", *sys.argv[1:]]),
            shards=shards,
            progress=progress,
        )
    report(scorer, len(packed), out)


def report(scorer: scorers.Scorer, count: int, out: Path) -> None:
    """What was learned, in a few lines."""
    metrics = scorer.metadata["metrics"]
    held_out = metrics["held_out"]
    if held_out:
        recall = (
            f", recall {held_out['recall']:.2f} (by chance {held_out['chance']:.2f})" if "recall" in held_out else ""
        )
        typer.echo(f"held-out loss {held_out['loss']:.4f}{recall}")
    for decay, ratio in metrics.get("calibration", {}).items():
        typer.echo(f"decay {decay} per {scorer.decay_step} tokens: loss ratio {ratio:.4f} on training documents")
    budgets = ", ".join(str(budget.slots + scorer.state_entries) for budget in scorer.budgets)
    typer.echo(f"{scorer.method} scorer for budgets {budgets}, from {count} documents, in {out}")

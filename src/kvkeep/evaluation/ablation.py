"""What is each part of the recipe worth? One command a question, several seeds, intervals over documents.

    python -m kvkeep.evaluation.ablation decay --out DIR --seeds 3 --report docs/ablations/decay.md

The variants of a question (:mod:`kvkeep.evaluation.ablation_variants`) train their scorers with the same seeds, on the
same documents where these are not the question; then all read the same held-out documents, beside rules and an oracle.
The first variant is the reference that the others are compared with, paired by document and by seed. What is finished
in DIR is not done again, and several questions may share it: a scorer is kept under what decides it, not under the
question, so that the reference of most of them is trained and evaluated once.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel

from kvkeep.evaluation import documents
from kvkeep.evaluation.ablation_report import report, summary
from kvkeep.evaluation.ablation_training import monitor, require_trainable, trained
from kvkeep.evaluation.ablation_variants import ABLATIONS, Experiment, ablation
from kvkeep.evaluation.contenders import Contender, line_up
from kvkeep.evaluation.evaluate import evaluate
from kvkeep.evaluation.store import require_writable, write_atomic
from kvkeep.runtime import models
from kvkeep.runtime.heap import keep_freed_memory
from kvkeep.training.corpus import Texts
from kvkeep.training.state import jsonable

Told = Callable[[str, int, int], None]


def run(
    experiment: Experiment,
    model: PreTrainedModel,
    train: Texts,
    test: Texts,
    out: str | Path,
    shards: str | Path | None = None,
    told: Told | None = None,
) -> dict[str, Any]:
    """Run an ablation, or what of it is not done yet.

    Args:
        experiment: what to run.
        model: frozen.
        train: documents to train on, of ``experiment.length`` tokens.
        test: held out, of the same length.
        out: everything lives here: checkpoints in ``scorers``, what was measured in ``evaluated``, and ``NAME.json``.
            Other experiments may share it.
        shards: where read documents are kept, to share with other ablations; None = ``out/shards``.
        told: called with (stage, done, total).

    Returns:
        ``variants``, ``others`` (see :func:`summary`), ``settings``, and ``rows``, those of ``evaluate`` over all
        documents. JSON-friendly.

    Raises:
        ValueError: for too few documents, a budget too small, or an ``out`` that is a file.
    """
    out, told = Path(out), told or (lambda stage, done, total: None)
    folder = out / "shards" if shards is None else Path(shards)
    require_trainable(experiment, model, train, test)
    for place in (out, folder):
        if place.exists() and not place.is_dir():
            raise ValueError(f"{place} is a file; it should be a folder")
    out.mkdir(parents=True, exist_ok=True)
    made, places = {}, {}
    for seed in range(experiment.seeds):  # a stop then leaves whole comparisons behind
        for variant in experiment.variants:
            title = variant.title(seed)
            given = (experiment, variant, seed, model, train, out / "scorers", folder, told)
            made[title], places[title] = trained(*given)
    contenders = line_up(experiment.others)
    for seed in range(experiment.seeds):
        for variant in experiment.variants:
            plain = Contender(variant.method, label=variant.title(seed), options=variant.policy)
            contenders.append(plain.with_scorer(made[plain.label], places[plain.label]))
    found = evaluate(
        model,
        test,
        contenders,
        [experiment.budget],
        experiment.length,
        resume_dir=out / "evaluated",
        progress=lambda stage, done, total: told(f"evaluate: {stage}", done, total),
        settings={"model": experiment.model},
    )
    monitored = {title: monitor(model, scorer, test, folder) for title, scorer in made.items()}
    rows = [row for row in found["rows"] if row["kind"] == "all"]
    result = summary(experiment, rows, monitored)
    for variant, row in zip(experiment.variants, result["variants"], strict=True):
        scorer = made[variant.title(0)]
        row |= {"trained_on": scorer.metadata["documents"], "steps": scorer.metadata["steps"]}
        row |= {"memory": scorer.state_entries}
    settings = {part: value for part, value in asdict(experiment).items() if part != "variants"}
    result = jsonable(result | {"settings": settings | {"evaluation": found["settings"]}, "rows": rows})
    write_atomic(out / f"{experiment.name}.json", json.dumps(result, indent=1, allow_nan=False))
    return result


def main(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"{', '.join(ABLATIONS)}.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Everything lives here; done work is kept.")],
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Training runs of every variant.")] = Experiment.seeds,
    count: Annotated[int, typer.Option("--documents", min=2, help="Held-out documents, of all kinds in turn.")] = 8,
    budget: Annotated[int, typer.Option("--budget", min=1, help="Tokens per KV head.")] = Experiment.budget,
    length: Annotated[int, typer.Option("--length", min=3, help="Tokens of a document.")] = Experiment.length,
    model_name: Annotated[str, typer.Option("--model", help="An alias, folder or hub id.")] = Experiment.model,
    shards: Annotated[Path | None, typer.Option("--shards", metavar="DIR", help="Read documents, to share.")] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Of every training; the recipe's if none.")
    ] = None,
    train_count: Annotated[int | None, typer.Option("--train-documents", min=2, help="At most so many.")] = None,
    calibrate_on: Annotated[
        int, typer.Option("--calibrate-on", min=1, help="Documents that every decay is calibrated on.")
    ] = Experiment.calibrate_on,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Of the model, trained and evaluated with; its own if none.")
    ] = None,
    page: Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write a page of markdown.")] = None,
) -> None:
    """Train the variants of a question, several seeds each, and compare what they lose under eviction."""
    started = time.perf_counter()
    try:
        experiment = ablation(
            name,
            seeds=seeds,
            budget=budget,
            length=length,
            model=model_name,
            steps=steps,
            train_documents=train_count,
            calibrate_on=calibrate_on,
            dtype=dtype,
        )
        experiment.check()
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None)

            def told(stage: str, done: int, total: int) -> None:
                bar.update(task, description=stage, completed=done, total=total or None)

            keep_freed_memory()
            model, tokenizer = models.load(model_name, dtype, progress=told)
            packed = (documents.pack(documents.bundled(split=split), tokenizer, length) for split in ("train", "eval"))
            numbers = (experiment.train_documents, count)
            train, test = (documents.in_turn(texts, most) for texts, most in zip(packed, numbers, strict=True))
            if page is not None:
                page.parent.mkdir(parents=True, exist_ok=True)
            require_writable(page, "--report")
            result = run(experiment, model, train, test, out, shards, told)
    except (ValueError, OSError, NotImplementedError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error
    text = report(result, command(experiment, count))
    typer.echo(text)
    typer.echo(f"{time.perf_counter() - started:.0f} s", err=True)
    if page is not None:
        write_atomic(page, text)


def command(experiment: Experiment, count: int) -> str:
    """What runs an experiment on ``count`` held-out documents."""
    flags = {
        "--out": "DIR",
        "--seeds": experiment.seeds,
        "--documents": count,
        "--budget": experiment.budget,
        "--length": experiment.length,
        "--train-documents": experiment.train_documents,
        "--calibrate-on": experiment.calibrate_on,
        "--model": experiment.model,
    }
    given = {"--steps": experiment.steps, "--dtype": experiment.dtype}
    flags |= {flag: value for flag, value in given.items() if value is not None}
    given = [str(part) for flag in flags.items() for part in flag]
    return shlex.join(["python", "-m", "kvkeep.evaluation.ablation", experiment.name, *given])


if __name__ == "__main__":
    typer.run(main)

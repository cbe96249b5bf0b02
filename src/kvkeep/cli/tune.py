"""`kvkeep train --backbone lora|full`: tune a backbone under a policy, after its scorer if it has one."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import kvkeep
from kvkeep.cli import common
from kvkeep.evaluation import documents
from kvkeep.runtime import models
from kvkeep.training import kvpop
from kvkeep.training.rows import PACKINGS, pack_rows
from kvkeep.training.student import require_peft
from kvkeep.training.tune import Settings, tunable, tune

METHODS = ("streaming", *kvpop.METHODS)


class Backbone(StrEnum):
    """What becomes of the backbone."""

    frozen = "frozen"
    lora = "lora"
    full = "full"


Packing = StrEnum("Packing", [(name, name) for name in PACKINGS])

BackboneFlag = Annotated[Backbone, typer.Option("--backbone", help="frozen, lora (adapters) or full (all weights).")]
ScorerFlag = Annotated[
    Path | None, typer.Option("--scorer", metavar="DIR", help="To tune the backbone under; else one is trained first.")
]
RateFlag = Annotated[
    float | None, typer.Option("--lr", min=0.0, help="Peak: 1e-3 for lora, 8e-5 for full, 3e-3 for a scorer.")
]
RankFlag = Annotated[int, typer.Option("--rank", min=1, help="Of the adapters.")]
TargetsFlag = Annotated[str, typer.Option("--targets", help="Linear layers that get adapters, like q_proj,v_proj.")]
KLFlag = Annotated[
    str, typer.Option("--kl", help="tail: a bucket for the rest of the vocabulary; renorm: the paper's.")
]
PackingFlag = Annotated[
    Packing,
    typer.Option(
        "--packing", help="cut: a document a row; documents joined in rows: concat, one mask; reset, one each."
    ),
]
CheckpointingFlag = Annotated[
    bool, typer.Option("--gradient-checkpointing", help="Less memory: layers are computed again in backward.")
]
ComputeFlag = Annotated[str, typer.Option("--compute", help="bfloat16: matrix products of a tuned backbone in it.")]
AlongFlag = Annotated[bool, typer.Option("--train-scorer", help="The scorer learns along with the backbone.")]


def settings(
    method: str,
    backbone: Backbone,
    scorer: Path | None,
    steps: int | None,
    targets: str,
    packing: str,
    train_scorer: bool,
    **given: Any,
) -> Settings | None:
    """The settings of the flags; None where the backbone stays frozen.

    Raises:
        ValueError: for flags that do not go together, before anything is loaded.
    """
    if backbone == Backbone.frozen:
        if method == "streaming":
            raise ValueError("streaming is a rule without a scorer: it trains the backbone, --backbone lora or full")
        if scorer is not None or train_scorer or packing != "cut":
            raise ValueError("--scorer, --train-scorer and --packing are for a tuned backbone, --backbone lora or full")
        return None
    if method == "streaming" and (scorer is not None or train_scorer):
        raise ValueError("streaming is a rule and takes no scorer")
    if backbone == Backbone.lora:
        require_peft()
    made = {"backbone": backbone.value, "targets": tuple(common.names(targets)), "packing": str(packing)}
    if steps is not None:
        made["steps"] = steps
    return Settings(**made, train_scorer=train_scorer, **given)


def loaded_scorer(method: str, folder: Path | None, bounds: Sequence[int]) -> Any:
    """The scorer of --scorer, checked against the method and the budgets; None where none is given."""
    if folder is None:
        return None
    scorer = kvkeep.load_scorer(folder)
    tunable(method, bounds, scorer)
    return scorer


def run(
    method: str,
    language_model: Any,
    tokenizer: Any,
    packed: Sequence[tuple[Any, Any]],
    bounds: Sequence[int],
    out: Path,
    made: Settings,
    scorer: Any,
    recipe: kvpop.Recipe,
    **options: Any,
) -> None:
    """Tune, after training a scorer in OUT/run/scorer where the method needs one and none is given."""
    with common.progress_bar() as progress:
        if scorer is None and method in kvpop.METHODS:
            length = None if made.packing == "cut" else made.length
            scorer = _trained_first(method, language_model, packed, bounds, out, recipe, progress, options, length)
        base = options["base_model"]
        if base not in models.ALIASES and Path(base).expanduser().is_dir():
            options["base_model"] = str(Path(base).expanduser().resolve())  # adapters are loaded from anywhere
        record = tune(
            language_model,
            method,
            packed,
            bounds,
            out,
            made,
            scorer,
            tokenizer=tokenizer,
            progress=progress,
            **options,
        )
    report(record, len(packed), out)


def _trained_first(method, language_model, packed, bounds, out: Path, recipe, progress, options, length: int | None):
    """A scorer for the frozen backbone, from the documents or, where a length is given, rows of them."""
    folder = out / "run" / "scorer"
    if length is not None:
        packed = [(row, row.pieces[0]) for row in pack_rows(packed, "concat", length)]
    if options["resume"] and (folder / "config.json").exists():
        return kvkeep.load_scorer(folder)
    kvpop.train(method, language_model, packed, bounds, folder, recipe, progress=progress, **options)
    return kvkeep.load_scorer(folder)


def whole(texts: Sequence[Any], tokenizer: Any) -> list[tuple[Any, torch.Tensor]]:
    """Pairs of a document and all of its ids, for packing."""
    return [(document, torch.tensor(documents.token_ids(document, tokenizer))) for document in texts]


def report(record: dict[str, Any], count: int, out: Path) -> None:
    """What was learned, in a few lines."""
    metrics = record["metrics"]
    if metrics:
        before, after = metrics["held_out_kl_before"], metrics["held_out_kl"]
        typer.echo(
            f"held-out KL to the untuned model with the full cache: {before:.4f} nats a token before, {after:.4f}"
        )
    budgets = ", ".join(str(budget["sinks"] + budget["window"] + budget["topk"]) for budget in record["budgets"])
    what = "adapters" if record["settings"]["backbone"] == "lora" else "model"
    typer.echo(f"{what} tuned under {record['policy']} at {budgets} tokens, {record['settings']['steps']} steps")
    with_scorer = "" if record["scorer"] is None else f" --scorer {record['policy']}={out / 'scorer'}"
    typer.echo(f"kvkeep evaluate --model {out} --policies {record['policy']}{with_scorer}")

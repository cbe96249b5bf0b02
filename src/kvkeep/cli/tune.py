"""`kvkeep train --backbone lora|full`: tune a backbone under a policy, after its scorer if it has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import kvkeep
from kvkeep import scorers
from kvkeep.cli import common
from kvkeep.evaluation import documents
from kvkeep.runtime import models
from kvkeep.training import kvpop
from kvkeep.training.rows import PACKINGS, pack_rows
from kvkeep.training.state import require_own
from kvkeep.training.student import require_peft
from kvkeep.training.tune import Settings, prepare, tunable, tune

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
RateFlag = Annotated[float | None, typer.Option("--lr", help="Peak: 1e-3 for lora, 8e-5 for full, 3e-3 for a scorer.")]
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


def job(
    method: str, bounds: Sequence[int], scorer: Path | None, recipe: kvpop.Recipe, chosen: dict[str, Any]
) -> Callable[..., None]:
    """What to do with a model, documents, a place for the result and a tokenizer.

    Args:
        method, bounds: the policy, and what ``--budgets`` says.
        scorer: the folder of --scorer.
        recipe: of the scorer that is trained first where the method needs one and none is given.
        chosen: fields of :class:`~kvkeep.training.tune.Settings`, None where a flag was not given.

    Raises:
        ValueError: for flags that do not go together, a scorer of another method, or budgets that cannot be split,
            before anything is loaded.
    """
    if chosen["backbone"] == Backbone.lora:
        require_peft()
    made = Settings(**{name: value for name, value in chosen.items() if value is not None})
    given = None if scorer is None else kvkeep.load_scorer(scorer)
    if given is not None or method not in kvpop.METHODS:
        tunable(method, bounds, given)
    return partial(run, method, bounds, made, given, recipe)


def run(
    method: str,
    bounds: Sequence[int],
    made: Settings,
    scorer: Any,
    recipe: kvpop.Recipe,
    language_model: Any,
    packed: Sequence[tuple[Any, Any]],
    out: Path,
    tokenizer: Any,
    half: bool,
    **options: Any,
) -> None:
    """Tune, after training a scorer in OUT/run/scorer where the method needs one and none is given."""
    base = options["base_model"]
    with common.progress_bar() as progress:
        options["progress"] = progress
        if scorer is None and method in kvpop.METHODS:
            untrained = scorers.new(method, language_model.config, bounds, hidden=recipe.hidden, **recipe.options)
            prepare(language_model, method, packed, bounds, made, untrained)
            require_room(out, options["resume"])
            scorer = _trained_first(method, language_model, packed, bounds, out, recipe, made, options)
        if base not in models.ALIASES and Path(base).expanduser().is_dir():
            options["base_model"] = str(Path(base).expanduser().resolve())  # adapters are loaded from anywhere
        record = tune(
            language_model, method, packed, bounds, out, made, scorer, tokenizer=tokenizer, half=half, **options
        )
    report(record, len(packed), out)


def scorer_folder(out: Path) -> Path:
    """Where the scorer is trained that a backbone is tuned under."""
    return out / "run" / "scorer"


def require_room(out: Path, resume: bool) -> None:
    """Raise ValueError where OUT cannot be that of a run with a scorer of its own, before that scorer is trained."""
    require_own(out)
    begun, tuning = scorer_folder(out).exists(), (out / "run" / "run.json").exists()
    if (begun or tuning) and not resume:
        raise ValueError(f"{out} holds a run already: give --resume to go on with it, or another folder")
    if tuning and not begun:
        raise ValueError(f"{out} holds a run that trained no scorer of its own; it cannot be resumed")


def _trained_first(method, language_model, packed, bounds, out: Path, recipe, made: Settings, options):
    """A scorer for the untuned backbone, from what it is tuned on: the documents, or rows of them."""
    if made.packing != Packing.cut:
        packed = [(row, row.pieces[0]) for row in pack_rows(packed, "concat", made.length)]
    kvpop.train(method, language_model, packed, bounds, scorer_folder(out), recipe, reuse=True, **options)
    return kvkeep.load_scorer(scorer_folder(out))


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
    sizes = [
        budget["sinks"] + budget["window"] + budget["topk"] + record["state_entries"] for budget in record["budgets"]
    ]
    budgets = ", ".join(map(str, sizes))
    what = "adapters" if record["settings"]["backbone"] == "lora" else "model"
    typer.echo(f"{what} tuned under {record['policy']} at {budgets} tokens, {record['settings']['steps']} steps")
    with_scorer = "" if record["scorer"] is None else f" --scorer {record['policy']}={out / 'scorer'}"
    typer.echo(f"kvkeep evaluate --model {out} --policies {record['policy']}{with_scorer}")

"""`kvkeep train foresightkv`: a scorer from what golden eviction knows of your documents."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import kvkeep
from kvkeep import scorers
from kvkeep.budget import Budget
from kvkeep.cli import common
from kvkeep.evaluation.contenders import split_budget
from kvkeep.scorers.features import FeatureSpec
from kvkeep.training import foresightkv

Stage = StrEnum("Stage", [(name, name) for name in foresightkv.STAGES])
INPUTS = {
    "paper": FeatureSpec.paper(),
    "released": FeatureSpec.released(),
    "best": FeatureSpec.best(),
    "kv": FeatureSpec(windows=(), cumulative=False, decay=None),
    "attention": FeatureSpec(kv=False),
}
Inputs = StrEnum("Inputs", [(name, name) for name in INPUTS])

StageFlag = Annotated[
    Stage | None, typer.Option("--stage", help="Of foresightkv: sft, golden's traces; dagger, a scorer's own.")
]
InputsFlag = Annotated[
    Inputs | None, typer.Option("--inputs", help="What a foresightkv scorer reads; the preset's by default.")
]
ONLY_HERE = "is for foresightkv, which decides every interval"


NOT_HERE = ("decay", "group", "delay", "features", "scorer", "packing", "train_scorer", "checkpointing")


def require_its_own(context: typer.Context, frozen: bool) -> None:
    """Raise ValueError for a flag of ``train`` that means something for KVpop or a tuned backbone only."""
    if not frozen:
        raise ValueError("foresightkv is trained on a frozen backbone: leave --backbone out")
    for name in NOT_HERE:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ValueError(f"--{name.replace('_', '-')} is not for foresightkv")


def settings(preset: str, steps: int | None, inputs: Inputs | None, **given: Any) -> foresightkv.Recipe:
    """The recipe of the flags.

    Raises:
        ValueError: for an unknown preset or a value that a recipe does not take.
    """
    features = None if inputs is None else INPUTS[inputs.value]
    return foresightkv.recipe(preset, steps, features=features, **given)


def start_from(stage: Stage | None, folder: Path | None) -> tuple[str, scorers.Scorer | None]:
    """The stage and the scorer it goes on from.

    Raises:
        ValueError: for a stage without its scorer, or a scorer without such a stage.
    """
    name = "sft" if stage is None else stage.value
    if (folder is None) != (name == "sft"):
        needs = "needs --start DIR, the scorer to go on from" if folder is None else "starts from nothing: no --start"
        raise ValueError(f"--stage {name} {needs}")
    return name, None if folder is None else kvkeep.load_scorer(folder)


def split(bounds: Sequence[int], interval: int | None, at_rest: bool) -> list[Budget]:
    """What ``--budgets`` means, as `kvkeep evaluate` splits it."""
    return [split_budget(foresightkv.METHOD, bound, at_rest, {"interval": interval}) for bound in bounds]


def run(language_model: Any, packed: Sequence[Any], out: Path, **options: Any) -> None:
    """Train and say what was learned."""
    with common.progress_bar() as progress:
        scorer = foresightkv.train(language_model, packed, out=out, progress=progress, **options)
    found = scorer.metadata["metrics"]["held_out"]
    if "overlap" in found:
        value = {name: found[name]["value"] for name in ("overlap", "chance", "tau")}
        low_high = "[{:.3f}, {:.3f}]".format(*found["overlap"]["interval"])
        typer.echo(
            f"held-out overlap with golden {value['overlap']:.3f} {low_high} (by chance {value['chance']:.2f}), "
            f"tau {value['tau']:.3f} over {found['traces']} traces"
        )
    budgets = ", ".join(f"{budget.slots} ({budget.rest} at rest)" for budget in scorer.budgets)
    typer.echo(f"foresightkv scorer for budgets {budgets}, from {len(packed)} documents, in {out}")

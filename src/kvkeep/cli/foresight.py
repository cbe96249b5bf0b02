"""`kvkeep train foresightkv`: a scorer from what golden eviction knows of your documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import kvkeep
from kvkeep import scorers
from kvkeep.cli import common
from kvkeep.evaluation.contenders import split_budget
from kvkeep.scorers.features import FeatureSpec
from kvkeep.training import foresightkv
from kvkeep.training.reinforce_schedule import CHOICES

Stage = StrEnum("Stage", [(name, name) for name in foresightkv.STAGES])
INPUTS = {
    "paper": FeatureSpec.paper(),
    "released": FeatureSpec.released(),
    "best": FeatureSpec.best(),
    "kv": FeatureSpec(windows=(), cumulative=False, decay=None),
    "attention": FeatureSpec(kv=False),
}
Inputs = StrEnum("Inputs", [(name, name) for name in INPUTS])

REWARDS = CHOICES["variant"]
StageFlag = Annotated[
    Stage | None,
    typer.Option(
        "--stage", help="Of foresightkv: sft, traces along --follow; dagger, along a scorer's own; rl, reinforcement."
    ),
]
RolloutFlag = Annotated[
    str | None, typer.Option("--rollout", help="Of rl: trace, along the documents; generate, what the model writes.")
]
GroupSizeFlag = Annotated[
    int | None, typer.Option("--group-size", help="Of rl: trajectories of a document that are compared (8).")
]
RewardFlag = Annotated[str | None, typer.Option("--reward", help=f"Of rl: {', '.join(REWARDS)}.")]
BetaFlag = Annotated[float | None, typer.Option("--beta", help="Of rl: weight of the KL to the scorer it began as.")]
InputsFlag = Annotated[
    Inputs | None, typer.Option("--inputs", help="What a foresightkv scorer reads; the preset's by default.")
]

FollowFlag = Annotated[
    str | None,
    typer.Option(
        "--follow", help="Of sft, and beside its own of dagger: whose evictions are labelled, golden's or a rule's."
    ),
]
RestartFlag = Annotated[
    bool, typer.Option("--restart", help="Of dagger: new weights on all traces, instead of those of --start.")
]


def job(
    bounds: Sequence[int],
    interval: int | None,
    window: int | None,
    at_rest: bool,
    preset: str,
    steps: int | None,
    stage: str,
    start: Path | None,
    inputs: Inputs | None,
    fitted: dict[str, Any],
) -> Callable[..., None]:
    """What to do with a model, documents and a place for the result.

    Args:
        bounds, interval, window, at_rest: what ``--budgets`` means, split as `kvkeep evaluate` does; a later stage has
            the intervals of the scorer that it goes on from.
        preset, steps, stage, start, inputs: of the flags of these names.
        fitted: fields of the recipe, None where a flag was not given.

    Raises:
        ValueError: for an unknown preset, a value that a recipe does not take, or a stage without its scorer.
    """
    features = None if inputs is None else INPUTS[inputs.value]
    settings = foresightkv.recipe(preset, steps, stage, features=features, window=window, **fitted)
    begun = start_from(stage, start)
    budgets = []
    for bound in bounds:
        known = {"window": settings.window} if begun is None else begun.parts_at(bound, at_rest)
        parts = known | ({} if interval is None else {"interval": interval})
        budgets.append(split_budget(foresightkv.METHOD, bound, at_rest, parts))
    return partial(run, budgets=budgets, settings=settings, stage=stage, start=begun)


def start_from(stage: str, folder: Path | None) -> scorers.Scorer | None:
    """The scorer that a stage goes on from.

    Raises:
        ValueError: for a stage without its scorer, or a scorer without such a stage.
    """
    if (folder is None) != (stage == "sft"):
        needs = "needs --start DIR, the scorer to go on from" if folder is None else "starts from nothing: no --start"
        raise ValueError(f"--stage {stage} {needs}")
    return None if folder is None else kvkeep.load_scorer(folder)


def run(language_model: Any, packed: Sequence[Any], out: Path, **options: Any) -> None:
    """Train and say what was learned."""
    with common.progress_bar() as progress:
        scorer = foresightkv.train(language_model, packed, out=out, progress=progress, **options)
    found = scorer.metadata["metrics"]["held_out"]
    if "train_reward_gain" in found:
        for where, prefix in (("the traces trained on", "train_"), ("held-out traces", "")):
            if f"{prefix}reward_gain" in found:
                gain = found[f"{prefix}reward_gain"]
                low_high = common.interval_over(found[f"{prefix}documents"], gain["interval"], "+.5f")
                typer.echo(f"reward on {where} {gain['value']:+.5f}{low_high} over the scorer it began as")
    if "overlap" in found:
        value = {name: found[name]["value"] for name in ("overlap", "chance", "tau")}
        low_high = common.interval_over(found["documents"], found["overlap"]["interval"], ".3f")
        typer.echo(
            f"held-out overlap with golden {value['overlap']:.3f}{low_high} (by chance {value['chance']:.2f}), "
            f"tau {value['tau']:.3f} over {found['documents']} documents"
        )
    budgets = ", ".join(f"{budget.slots} ({budget.rest} at rest)" for budget in scorer.budgets)
    typer.echo(f"foresightkv scorer for budgets {budgets}, from {len(packed)} documents, in {out}")

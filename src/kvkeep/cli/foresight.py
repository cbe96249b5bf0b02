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

REWARDS = foresightkv.reinforce.CHOICES["variant"]
StageFlag = Annotated[
    Stage | None,
    typer.Option("--stage", help="Of foresightkv: sft, golden's traces; dagger, a scorer's own; rl, reinforcement."),
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


def settings(
    preset: str,
    steps: int | None,
    stage: Stage | None,
    inputs: Inputs | None,
    hidden: int | None,
    loss: str | None,
    lr: float | None,
    reinforced: dict[str, Any],
) -> foresightkv.Recipe:
    """The recipe of the flags.

    Args:
        reinforced: flags of the stage "rl" alone, flag -> (field of its schedule, value).

    Raises:
        ValueError: for an unknown preset, a value that a recipe does not take, or a flag of another stage.
    """
    name = "sft" if stage is None else stage.value
    given = {flag: value for flag, (_, value) in reinforced.items() if value is not None}
    if name != "rl" and given:
        raise ValueError(f"{min(given)} is for --stage rl")
    own = dict(reinforced.values()) if name == "rl" else {"loss": loss}
    if name == "rl" and loss is not None:
        raise ValueError("--loss is for the stages before rl, which has a --reward")
    if name != "sft":
        for flag, value in {"--inputs": inputs, "--hidden": hidden}.items():
            if value is not None:
                raise ValueError(f"{flag} is for --stage sft: a later stage keeps what the scorer of --start has")
    features = None if inputs is None else INPUTS[inputs.value]
    return foresightkv.recipe(preset, steps, name, features=features, hidden=hidden, lr=lr, **own)


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
    if "train_reward_gain" in found:
        for where, prefix in (("the traces trained on", "train_"), ("held-out traces", "")):
            if f"{prefix}reward_gain" in found:
                gain = found[f"{prefix}reward_gain"]
                low_high = "[{:+.5f}, {:+.5f}]".format(*gain["interval"])
                typer.echo(f"reward on {where} {gain['value']:+.5f} {low_high} over the scorer it began as")
    if "overlap" in found:
        value = {name: found[name]["value"] for name in ("overlap", "chance", "tau")}
        low_high = "[{:.3f}, {:.3f}]".format(*found["overlap"]["interval"])
        typer.echo(
            f"held-out overlap with golden {value['overlap']:.3f} {low_high} (by chance {value['chance']:.2f}), "
            f"tau {value['tau']:.3f} over {found['traces']} traces"
        )
    budgets = ", ".join(f"{budget.slots} ({budget.rest} at rest)" for budget in scorer.budgets)
    typer.echo(f"foresightkv scorer for budgets {budgets}, from {len(packed)} documents, in {out}")

"""Which flags of `kvkeep train` mean something for what is trained: one table, and a sentence for those that do not."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass

import typer

from kvkeep.training import foresightkv, kvpop


@dataclass(frozen=True)
class Asked:
    """What is to be trained.

    Attributes:
        method: as the command takes it.
        backbone: "frozen", "lora" or "full".
        finished: whether a trained scorer is given with --scorer.
        stage: of foresightkv.
    """

    method: str
    backbone: str = "frozen"
    finished: bool = False
    stage: str = "sft"

    @property
    def foresees(self) -> bool:
        return self.method == foresightkv.METHOD

    @property
    def tuned(self) -> bool:
        return self.backbone != "frozen"

    @property
    def scored(self) -> bool:
        """Whether the method has a scorer."""
        return self.method != "streaming"

    @property
    def fits_scorer(self) -> bool:
        """Whether a scorer is trained here."""
        return self.scored and not self.finished

    def __str__(self) -> str:
        if self.foresees:
            return f"the {self.stage} stage of foresightkv"
        if not self.scored:
            return f"{self.method}, a rule"
        if not self.tuned:
            return f"{self.method} on a frozen backbone"
        return f"{self.method} with {'--scorer' if self.finished else f'--backbone {self.backbone}'}"


@dataclass(frozen=True)
class Rule:
    """Parameters of the command, what they are for, and where that is."""

    names: str
    what: str
    fits: Callable[[Asked], bool]


# A parameter that stands in no rule means something always. Of several rules that refuse, the first one speaks.
RULES = (
    Rule("rank targets", "adapters, --backbone lora", lambda asked: asked.backbone == "lora"),
    Rule(
        "kl packing checkpointing compute scorer train_scorer",
        "a tuned backbone, --backbone lora or full",
        lambda asked: asked.tuned,
    ),
    Rule("scorer train_scorer half", "a method that has a scorer", lambda asked: asked.scored),
    Rule(
        "stage inputs follow restart interval window at_rest rollout group_size reward beta",
        "foresightkv, which decides every interval",
        lambda asked: asked.foresees,
    ),
    Rule("rollout group_size reward beta", "--stage rl", lambda asked: asked.stage == "rl"),
    Rule("restart", "--stage dagger", lambda asked: asked.stage == "dagger"),
    Rule("loss", "the stages before rl, which has a --reward", lambda asked: asked.stage != "rl"),
    Rule("shards follow", "the stages before rl, which reads no traces", lambda asked: asked.stage != "rl"),
    Rule(
        "inputs hidden window",
        "--stage sft, since a later stage keeps what the scorer of --start has",
        lambda asked: asked.stage == "sft",
    ),
    Rule("decay", "kvpop and kvpop_mlp", lambda asked: asked.method in kvpop.METHODS),
    Rule("group", "a scorer that is fitted to attention", lambda asked: asked.scored and asked.stage != "rl"),
    Rule("delay features", "the memory of kvpop", lambda asked: asked.method == "kvpop"),
    Rule(
        "start",
        "kvpop on a frozen backbone, or a later --stage of foresightkv",
        lambda asked: asked.foresees or (asked.method == "kvpop" and not asked.tuned),
    ),
    Rule(
        "preset hidden loss decay group delay features patience",
        "a scorer that is trained here",
        lambda asked: asked.fits_scorer,
    ),
)


def require_meant(context: typer.Context, asked: Asked) -> None:
    """Raise ValueError for a backbone that the method does not train, or a flag that would change nothing."""
    if asked.foresees and asked.tuned:
        raise ValueError("foresightkv is trained on a frozen backbone: leave --backbone out")
    if not asked.scored and not asked.tuned:
        raise ValueError("streaming is a rule without a scorer: it trains the backbone, --backbone lora or full")
    for rule in RULES:
        if rule.fits(asked):
            continue
        for name in rule.names.split():
            source = context.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                raise ValueError(f"{_flag(context, name)} is for {rule.what}; it means nothing for {asked}")


def _flag(context: typer.Context, name: str) -> str:
    """The flag of a parameter as it was given: a switch may have been turned off."""
    (option,) = (option for option in context.command.params if option.name == name)
    off = option.secondary_opts and context.params[name] is False
    return (option.secondary_opts if off else option.opts)[0]


def require_rate(lr: float | None) -> None:
    """Raise ValueError for a learning rate that teaches nothing."""
    if lr is not None and not (math.isfinite(lr) and lr > 0):
        raise ValueError(f"--lr must be a finite number above 0, not {lr:g}")


def recorded(command: str | None) -> str | None:
    """The command line as a checkpoint records it: whether a run was stopped in between changes nothing of it."""
    if command is None:
        return None
    return shlex.join(part for part in shlex.split(command) if part != "--resume")

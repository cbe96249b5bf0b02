"""What the commands share: the flags of a policy, the consoles, and loading with a progress bar."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

import kvkeep
from kvkeep import policies
from kvkeep.evaluation.contenders import Contender, split_budget
from kvkeep.runtime import models
from kvkeep.scorers import model_fingerprint
from kvkeep.scorers.shipped import shipped

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_POLICY = "h2o_decayed"
DEFAULT_BUDGET = 256
WIDTH_OF_A_PIPE = 120


class Prefill(StrEnum):
    """How a prompt enters the cache."""

    sparse = "sparse"
    dense = "dense"


class Dtype(StrEnum):
    """Number formats a model can be loaded in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


ModelFlag = Annotated[str, typer.Option("--model", help="An alias (see `kvkeep models`), a local folder or a hub id.")]
PolicyFlag = Annotated[str, typer.Option("--policy", help="What to keep; see `kvkeep policies`.")]
BudgetFlag = Annotated[int, typer.Option("--budget", min=1, help="Tokens per KV head, the hard bound.")]
SinksFlag = Annotated[int | None, typer.Option("--sinks", min=0, help="First tokens that always stay.")]
WindowFlag = Annotated[int | None, typer.Option("--window", min=0, help="Newest tokens that always stay.")]
IntervalFlag = Annotated[int | None, typer.Option("--interval", min=1, help="Tokens between two evictions.")]
AtRestFlag = Annotated[
    bool, typer.Option("--budget-at-rest", help="The budget counts tokens after an eviction, as in ForesightKV.")
]
ScorerFlag = Annotated[Path | None, typer.Option("--scorer", metavar="DIR", help="The scorer of a learned policy.")]
ScorersFlag = Annotated[
    list[str] | None,
    typer.Option("--scorer", metavar="NAME=DIR", help="For a learned policy; several of a NAME are compared."),
]
PrefillFlag = Annotated[
    Prefill,
    typer.Option("--prefill", help="sparse: as if decoded token by token; dense: full attention, pruned once."),
]
DtypeFlag = Annotated[Dtype | None, typer.Option("--dtype", help="Number format; the checkpoint's own by default.")]
DeviceFlag = Annotated[str | None, typer.Option("--device", help="Where the model runs; cpu by default.")]
SeedFlag = Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Of every random choice.")]
NewTokensFlag = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens to generate at most.")]
TemperatureFlag = Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.")]


def output() -> Console:
    """Standard output; wide enough for the tables where it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_PIPE, highlight=False, soft_wrap=False)


def generating_policy(
    name: str,
    budget: int,
    sinks: int | None,
    window: int | None,
    interval: int | None,
    at_rest: bool,
    scorer: Path | None,
    seed: int,
) -> Contender:
    """The policy of the common flags, for a command that generates, checked as far as it can be without the model.

    Raises:
        ValueError: for an unknown policy, a budget that cannot be split, an oracle, which needs the future, or a
            scorer that does not belong to the policy.
    """
    method = policies.describe(name)
    if method.oracle:
        raise ValueError(f"policy {name!r} is an oracle: it reads the future, so only `kvkeep evaluate` can run it")
    overrides = {"sinks": sinks, "window": window, "interval": interval}
    options = {"seed": seed} if "seed" in inspect.signature(method.__init__).parameters else {}
    module = None if scorer is None else kvkeep.load_scorer(scorer)
    contender = Contender(name, options=options, overrides=overrides, at_rest=at_rest, scorer=module)
    if method.learned and module is None:
        split_budget(name, budget, at_rest, overrides)
    else:
        contender.policy(budget)
    return contender


def equipped(contender: Contender, model: Any) -> Contender:
    """The contender, with the scorer shipped for the model where it is learned and was given none.

    Raises:
        ValueError: if none is shipped, or the one given was made for another model.
    """
    if contender.scorer is not None:
        contender.scorer.require_fits(model.config, model_fingerprint(model))
        return contender
    if not policies.describe(contender.name).learned:
        return contender
    scorer = shipped(contender.name, model.config, model_fingerprint(model))
    if scorer is None:
        raise ValueError(
            f"no {contender.name} scorer is shipped for this model: train one (kvkeep train {contender.name}) and give "
            "it with --scorer"
        )
    return contender.with_scorer(scorer, "shipped")


def scorers(given: Sequence[str]) -> dict[str, list[tuple[Any, str]]]:
    """`NAME=DIR` of --scorer as policy -> (scorer, where it was read from), several of a policy in order.

    Raises:
        ValueError: for another form, an unknown policy, or a folder that holds no scorer.
    """
    found: dict[str, list[tuple[Any, str]]] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not equals or not name or not folder:
            raise ValueError(f"--scorer takes NAME=DIR, not {text!r}")
        policies.describe(name)
        found.setdefault(name, []).append((kvkeep.load_scorer(folder), folder))
    return found


def require_intervals(interval: int | None, contenders: Sequence[Contender]) -> None:
    """Raise ValueError where an interval is given and nobody has one."""
    if interval is not None and not any(policies.describe(one.name).kind == "attention" for one in contenders):
        raise ValueError(f"--interval {interval} is for policies that decide every interval; none is among these")


def standard_input() -> Iterator[str]:
    """Lines of standard input.

    Raises:
        ValueError: for bytes that are not UTF-8 text.
    """
    try:
        for line in sys.stdin:
            line.encode("utf-8")  # bytes that did not decode stand in it as lone surrogates
            yield line
    except UnicodeError as error:
        raise ValueError("standard input is not UTF-8 text") from error


def numbers(text: str, flag: str) -> list[int]:
    """`128,256` as numbers, each once.

    Raises:
        ValueError: if a part is no positive integer.
    """
    parts = names(text)
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{flag} takes numbers like 128,256, not {text!r}")
    return list(dict.fromkeys(map(int, parts)))


def interval_over(count: int, ends: Sequence[float], form: str) -> str:
    """`` [low, high]`` in a format like ``.3f``; nothing where fewer than two documents say anything of a spread."""
    return f" [{format(ends[0], form)}, {format(ends[1], form)}]" if count > 1 else ""


def tell_skipped(packed: Any, length: int) -> None:
    """Say on standard error how many documents were too short, if any were."""
    if packed.skipped:
        count = "1 document has" if len(packed.skipped) == 1 else f"{len(packed.skipped)} documents have"
        print(f"kvkeep: {count} fewer than {length} tokens, skipped", file=sys.stderr)


def names(text: str) -> list[str]:
    """`a,b` or `a b` as a list."""
    return text.replace(",", " ").split()


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error, on a terminal only: yields `show(stage, done, total)`; a total of 0 is "no idea"."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total or None)

        yield show


def load(name: str, dtype: Dtype | None = None, device: str | None = None) -> tuple[Any, Any]:
    """Model and tokenizer, with a progress bar."""
    with progress_bar() as show:
        show(f"loading {name}", 0, 0)
        return models.load(name, dtype=None if dtype is None else dtype.value, device=device, progress=show)

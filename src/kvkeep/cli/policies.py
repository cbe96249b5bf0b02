"""`kvkeep policies`: what can be kept, and how a budget is split for it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from kvkeep import policies
from kvkeep.budget import Budget
from kvkeep.cli import common

LEGEND = """
entry: decides token by token; attention: decides every interval.
oracle: reads the future, for `kvkeep evaluate` only; learned: needs a scorer.
"""
ROW = "{:<20}{:<19}{}"


def run(
    budget: Annotated[int, typer.Option("--budget", min=1, help="Show how this many tokens are split.")] = 256,
) -> None:
    """List what can be kept.

    Per policy: kind, default split of a budget, what it keeps, and the paper.
    """
    splits = {name: policies.budget(name, budget) for name in policies.names()}
    console = common.output()
    console.print(ROW.format("policy", "kind", f"{budget} = sinks + window + top-k + interval"), style="bold")
    for name, split in splits.items():
        method = policies.describe(name)
        kind = method.kind + ", oracle" * method.oracle + ", learned" * method.learned
        console.print(ROW.format(name, kind, "everything" if method.kind == "full" else _parts(split)))
        paper = f" ({method.paper})" if method.paper else ""
        console.print(Padding(Text(first_line(method.__doc__) + paper, style="dim"), (0, 0, 0, 4)))
    console.print(LEGEND)


def first_line(docstring: str | None) -> str:
    """The first line of a docstring, without its markup."""
    return next(iter((docstring or "").strip().splitlines()), "").replace("`", "")


def _parts(split: Budget) -> str:
    return f"{split.sinks} + {split.window} + {split.topk} + {split.interval}"

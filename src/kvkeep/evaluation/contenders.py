"""Who takes part in a comparison, and with how many tokens: the options a policy is run with, before any model is."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvkeep import policies
from kvkeep.budget import Budget
from kvkeep.policies.base import Policy

NONE: Mapping[str, Any] = MappingProxyType({})
PARTS = ("sinks", "window", "interval")  # of a budget, which a policy may have its own of in a comparison


def split_budget(
    name: str, tokens: int, at_rest: bool = False, overrides: Mapping[str, int | None] = NONE
) -> Budget | None:
    """The budget that a user's number of tokens means for a policy.

    Args:
        name: a registered policy.
        tokens: the hard bound, or with `at_rest` the tokens held after an eviction, as ForesightKV's tables count.
        at_rest: an attention policy then gets one interval of slots more, the interval it has by default at `tokens`.
        overrides: any of sinks, window, interval; None means not given.

    Returns:
        None for "full".

    Raises:
        ValueError: for an unknown policy or a split that does not work out, naming policy and numbers.

    >>> split_budget("golden", 128, at_rest=True)
    Budget(sinks=0, window=32, topk=96, interval=32)
    """
    overrides = {part: size for part, size in overrides.items() if size is not None}
    kind = policies.describe(name).kind
    if kind == "full":
        return None
    try:
        if at_rest and kind == "attention":
            overrides.setdefault("interval", policies.budget(name, tokens).interval)
            tokens += overrides["interval"]
        return policies.budget(name, tokens, **overrides)
    except ValueError as error:
        raise ValueError(str(error) if repr(name) in str(error) else f"policy {name!r}: {error}") from error


@dataclass(frozen=True)
class Contender:
    """A policy with everything a comparison needs to make it at any budget.

    Attributes:
        name: a registered policy.
        label: what tables call it.
        options: the policy's own options.
        overrides: parts of the budget that are fixed.
        at_rest: whether budgets count tokens at rest.
        scorer: the trained module of a learned policy.
        scorer_source, preset, seed, league: where the scorer comes from and how it was trained, for the rows: the
            preset with a later stage behind it, like "best, rl"; `seed` is the policy's own for a policy that draws.
    """

    name: str
    label: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, int | None] = field(default_factory=dict)
    at_rest: bool = False
    scorer: Any = None
    scorer_source: str | None = None
    preset: str | None = None
    seed: int | None = None
    league: str | None = None

    @property
    def title(self) -> str:
        """What it is known by: the label, or the policy's name."""
        return self.label or self.name

    def with_scorer(self, scorer: Any, source: str, alone: bool = True) -> Contender:
        """The contender with a scorer and what its checkpoint says of its making; a label where it is not alone."""
        told = scorer.metadata
        how = told.get("recipe", {}).get("preset"), told.get("stage")
        return replace(
            self,
            label=self.label if alone else f"{self.title} ({Path(source).name})",
            scorer=scorer,
            scorer_source=source,
            preset=", ".join(part for part in how if part not in (None, "sft")) or None,
            seed=told.get("seed"),
            league=told.get("league"),
        )

    def policy(self, tokens: int) -> Policy:
        """A fresh policy at a budget of `tokens`."""
        parts = dict(self.overrides)
        if policies.describe(self.name).learned and self.scorer is not None:
            given = {part: size for part, size in parts.items() if size is not None}
            parts = self.scorer.parts_at(tokens, self.at_rest) | given
        budget = split_budget(self.name, tokens, self.at_rest, parts)
        return policies.create(self.name, budget, scorer=self.scorer, **self.options)


def require_distinct(contenders: Sequence[Contender]) -> None:
    """Raise ValueError where there is none, or two would stand under the same title in a table."""
    titles = [contender.title for contender in contenders]
    if not titles:
        raise ValueError("no policy is named")
    repeated = sorted({title for title in titles if titles.count(title) > 1})
    if repeated:
        raise ValueError(f"policy {repeated[0]!r} is named twice")


def with_options(text: str) -> tuple[str, dict[str, Any]]:
    """A policy as users write it, its options after colons: numbers, ``true``, ``false``, ``none`` or words.

    Raises:
        ValueError: for an option without a value, or given twice.

    >>> with_options("golden:lookahead=1:labels=own")
    ('golden', {'lookahead': 1, 'labels': 'own'})
    """
    name, *parts = text.split(":")
    options = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if not option or not equals or not value:
            raise ValueError(f"options of a policy are written NAME:option=value, not {text!r}")
        if option in options:
            raise ValueError(f"{option} is given twice in {text!r}")
        options[option] = _value(value)
    return name, options


def _value(text: str) -> Any:
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def line_up(
    names: Sequence[str],
    seed: int = 0,
    at_rest: bool = False,
    overrides: Mapping[str, int | None] = NONE,
    scorers: Mapping[str, Sequence[tuple[Any, str]]] = NONE,
) -> list[Contender]:
    """Contenders from names, each given what its kind has a use for.

    Args:
        names: registered policies, each once; options of their own after colons, like ``golden:lookahead=1`` or
            ``snapkv:observation=16:kernel=5``, and the same policy may stand there with other options. Parts of the
            budget are written alike, ``h2o:interval=16``, and go before those of `overrides`.
        seed: for those that draw.
        at_rest: see `split_budget`.
        overrides: sinks and window go to every policy, interval to attention policies.
        scorers: name -> one or several (scorer, where it was read from); several stand beside each other.

    Raises:
        ValueError: for no name, an unknown or a repeated one, or a scorer for a policy that does not take part.
    """
    require_distinct([Contender(name) for name in names])
    named = [(text, *with_options(text)) for text in names]
    idle = sorted(set(scorers) - {name for _, name, _ in named})
    if idle:
        raise ValueError(f"a scorer is given for {idle[0]!r}, which is not among the policies {', '.join(names)}")
    contenders = []
    for text, name, options in named:
        method = policies.describe(name)
        draws = "seed" in inspect.signature(method.__init__).parameters
        shared = {"full": (), "entry": PARTS[:2], "attention": PARTS}[method.kind]
        parts = {part: overrides.get(part) for part in shared}
        parts |= {part: options.pop(part) for part in PARTS if part in options and method.kind != "full"}
        plain = Contender(
            name,
            label=text if ":" in text else None,
            options=({"seed": seed} if draws else {}) | options,
            overrides=parts,
            at_rest=at_rest,
            seed=options.get("seed", seed) if draws else None,
        )
        given = scorers.get(name, ())
        contenders += [plain.with_scorer(*one, alone=len(given) == 1) for one in given] or [plain]
    require_distinct(contenders)
    return contenders

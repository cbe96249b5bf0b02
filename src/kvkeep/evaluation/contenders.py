"""Who takes part in a comparison, and with how many tokens: the options a policy is run with, before any model is."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kvkeep import policies
from kvkeep.budget import Budget
from kvkeep.policies.base import Policy

NONE: Mapping[str, Any] = MappingProxyType({})


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
        scorer_source, preset, seed, league: where the scorer comes from and how it was trained, for the rows; `seed`
            is the policy's own for a policy that draws.
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

    def policy(self, tokens: int) -> Policy:
        """A fresh policy at a budget of `tokens`."""
        parts = dict(self.overrides)
        if policies.describe(self.name).learned and self.scorer is not None:
            parts["state_entries"] = self.scorer.state_entries  # what its memory costs, in tokens
        budget = split_budget(self.name, tokens, self.at_rest, parts)
        return policies.create(self.name, budget, scorer=self.scorer, **self.options)


def line_up(
    names: Sequence[str],
    seed: int = 0,
    at_rest: bool = False,
    overrides: Mapping[str, int | None] = NONE,
    scorers: Mapping[str, tuple[Any, str]] = NONE,
) -> list[Contender]:
    """Contenders from names, each given what its kind has a use for.

    Args:
        names: registered policies, each once.
        seed: for those that draw.
        at_rest: see `split_budget`.
        overrides: sinks and window go to every policy, interval to attention policies.
        scorers: name -> (module, where it was read from).

    Raises:
        ValueError: for no name, an unknown or a repeated one, or a scorer for a policy that does not take part.
    """
    if not names:
        raise ValueError("no policy is named")
    repeated = sorted({name for name in names if list(names).count(name) > 1})
    if repeated:
        raise ValueError(f"policy {repeated[0]!r} is named twice")
    idle = sorted(set(scorers) - set(names))
    if idle:
        raise ValueError(f"a scorer is given for {idle[0]!r}, which is not among the policies {', '.join(names)}")
    contenders = []
    for name in names:
        method = policies.describe(name)
        draws = "seed" in inspect.signature(method.__init__).parameters
        parts = {} if method.kind == "full" else {"sinks": overrides.get("sinks"), "window": overrides.get("window")}
        if method.kind == "attention":
            parts["interval"] = overrides.get("interval")
        scorer, source = scorers.get(name, (None, None))
        contenders.append(
            Contender(
                name,
                options={"seed": seed} if draws else {},
                overrides=parts,
                at_rest=at_rest,
                scorer=scorer,
                scorer_source=source,
                seed=seed if draws else None,
            )
        )
    return contenders

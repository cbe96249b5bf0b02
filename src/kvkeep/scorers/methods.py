"""The learned methods by name, and a fresh scorer for any of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvkeep.budget import Budget
from kvkeep.scorers.base import DECAY_STEP, SHARE, LayerScorer, Scorer, ScorerError
from kvkeep.scorers.foresight import Foresight
from kvkeep.scorers.layout import Layout
from kvkeep.scorers.mlp import MLP
from kvkeep.scorers.mlstm import MLSTM

METHODS: dict[str, type[LayerScorer]] = {kind.method: kind for kind in (MLP, MLSTM, Foresight)}


def method(name: str) -> type[LayerScorer]:
    """The layer scorer of a method.

    Raises:
        ScorerError: for a name that is not in ``METHODS``.
    """
    if name not in METHODS:
        raise ScorerError(f"no scorer is called {name!r}; this version has {', '.join(METHODS)}")
    return METHODS[name]


def make_options(name: str, given: dict[str, Any]):
    """The ``Options`` of a method.

    Raises:
        ScorerError: for one that the method does not have, or a bad value.
    """
    kind = method(name)
    lists = {option: tuple(value) if isinstance(value, list) else value for option, value in given.items()}
    try:
        return kind.Options(**lists)
    except TypeError as error:
        raise ScorerError(f"scorer {name!r}: {str(error).split('() ')[-1]}") from error


def new(
    name: str,
    config,
    budget: Budget | int | Sequence[Budget | int],
    seed: int = 0,
    state_entries: int | None = None,
    decay_step: int = DECAY_STEP,
    **options: Any,
) -> Scorer:
    """An untrained scorer for a learned policy; it scores next to nothing, so the newest tokens stay.

    Args:
        name: the policy.
        config: of the model, or anything with its attributes.
        budget: what it is to be trained for, one or several: a number of slots, which its memory is taken from, or a
            budget, which its memory comes on top of. The memory is sized by the smallest.
        seed: of the initial weights.
        state_entries: what the memory is charged as, in tokens; None computes it.
        decay_step: tokens per step of the decay.
        options: the method's own, see :class:`~kvkeep.scorers.mlp.MLPOptions`,
            :class:`~kvkeep.scorers.mlstm.MLSTMOptions` and :class:`~kvkeep.scorers.foresight.ForesightOptions`.

    Raises:
        ValueError: for an unknown method or option, a config without attention, or a budget too small.

    Example:
        >>> scorer = kvkeep.scorers.new("kvpop", model.config, 128)
        >>> scorer.options["features"], scorer.state_entries, scorer.budgets
        (8, 9, (Budget(sinks=4, window=32, topk=83, interval=0),))
    """
    kind, layout = method(name), Layout.of(config)
    given = [budget] if isinstance(budget, Budget) or not isinstance(budget, Sequence) else list(budget)
    if not given:
        raise ScorerError("a scorer needs a budget to be made for")
    bounds = [None if isinstance(one, Budget) else _slots(one) for one in given]
    made = make_options(name, options)
    budgets = [one if bound is None else kind.split(bound, made) for one, bound in zip(given, bounds, strict=True)]
    room = min(one.slots / (1 - SHARE) if bound is None else bound for one, bound in zip(budgets, bounds, strict=True))
    window = max(one.window for one in budgets)
    complete = kind.complete(made, layout, room, window)
    scorer = Scorer(kind, layout, complete, budgets, state_entries, decay_step, seed)
    scorer.budgets = tuple(
        one if bound is None else charge(one, scorer.state_entries) for one, bound in zip(budgets, bounds, strict=True)
    )
    return scorer


def charge(budget: Budget, state_entries: int) -> Budget:
    """Take what a memory costs from the top-k places.

    Raises:
        ValueError: naming the numbers, where nothing is left.
    """
    if state_entries >= budget.topk:
        raise ValueError(f"a memory that costs {state_entries} tokens leaves nothing of the {budget.topk} top-k places")
    return replace(budget, topk=budget.topk - state_entries)


def _slots(bound: Any) -> int:
    try:
        return operator.index(bound)
    except TypeError:
        raise ScorerError(f"a budget is a number of slots or a kvkeep.Budget, not {bound!r}") from None

"""What to keep: one file a method, one protocol (:mod:`kvkeep.policies.base`), one registry."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from kvkeep.budget import Budget
from kvkeep.policies.base import AttentionPolicy, EntryPolicy, Policy
from kvkeep.policies.expected_attention import ExpectedAttention
from kvkeep.policies.foresightkv import ForesightKV
from kvkeep.policies.full import Full
from kvkeep.policies.future_mass import FutureMass
from kvkeep.policies.golden import Golden
from kvkeep.policies.h2o import H2O, DecayedH2O
from kvkeep.policies.keydiff import KeyDiff
from kvkeep.policies.kvpop import KVpop
from kvkeep.policies.kvpop_mlp import KVpopMLP
from kvkeep.policies.learned import Learned
from kvkeep.policies.random import Random
from kvkeep.policies.rkv import RKV
from kvkeep.policies.snapkv import SnapKV
from kvkeep.policies.streaming import Streaming
from kvkeep.policies.tova import Tova

_RULES = (Full, Random, Streaming, Tova, H2O, DecayedH2O, SnapKV, RKV, ExpectedAttention, KeyDiff)
_METHODS = (*_RULES, KVpopMLP, KVpop, ForesightKV, Golden, FutureMass)
REGISTRY: dict[str, type[Policy]] = {method.name: method for method in _METHODS}

__all__ = ["REGISTRY", "AttentionPolicy", "EntryPolicy", "Policy", "budget", "create", "describe", "names"]


def names() -> list[str]:
    """The registered policies, in the order of the documentation."""
    return list(REGISTRY)


def describe(name: str) -> type[Policy]:
    """The class of a policy: its docstring, ``name``, ``kind``, ``oracle`` and ``paper``.

    Raises:
        ValueError: for a name that is not registered, with the nearest that is.
    """
    if name not in REGISTRY:
        near = get_close_matches(name, REGISTRY, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known policies: {', '.join(REGISTRY)}"
        raise ValueError(f"unknown policy {name!r}; {hint}")
    return REGISTRY[name]


def budget(name: str, slots: int, **overrides: int) -> Budget:
    """Split a bound of ``slots`` tokens per KV head the way the policy wants it.

    ``full`` ignores any budget; its split is that of a policy which decides at every token.

    Args:
        name: a registered policy.
        slots: the hard bound, what ``--budget`` means.
        overrides: any of ``sinks``, ``window``, ``interval``, and for a learned policy ``state_entries``, the tokens
            that its scorer's memory is charged as (by default those of a memory sized for ``slots``); None means not
            given.

    Raises:
        ValueError: for an unknown policy, a part that the kind of policy does not have, or slots too few for the
            parts, naming the numbers.
    """
    method = describe(name)
    overrides = {part: size for part, size in overrides.items() if size is not None}
    for part, size in {"slots": slots, **overrides}.items():
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise ValueError(f"{part} must be an integer, not {size!r}")
    unknown = set(overrides) - {"sinks", "window", "interval"} - ({"state_entries"} if method.learned else set())
    if unknown:
        raise ValueError(f"a budget has sinks, window and interval to override, not {', '.join(sorted(unknown))}")
    if method.kind == "full":
        overrides.pop("interval", None)
        return EntryPolicy.default_budget(slots, **overrides)
    split = method.default_budget(slots, **overrides)
    _check_kind(method, split)
    return split


def create(name: str, budget_or_slots: Budget | int | None = None, scorer=None, **options) -> Policy:
    """Make a policy.

    Args:
        name: a registered policy.
        budget_or_slots: a :class:`~kvkeep.Budget`, obeyed as given, or a number of slots, split by the policy's
            defaults and what its scorer was trained with; the memory of a scorer costs top-k places. Not needed for
            ``full``.
        scorer: of a learned policy, from :func:`kvkeep.load_scorer` or :func:`kvkeep.scorers.new`; None for a rule.
        options: the policy's own, see its class; and ``protect``, how many of the newest tokens may not go, which is
            the budget's window under the name that other libraries use (top-k gives or takes the difference).

    Raises:
        ValueError: for an unknown policy or option, a missing or impossible budget, a scorer where none is used, none
            where one is, or one of another method.
    """
    method = describe(name)
    protect = options.pop("protect", None)
    if method.learned:
        Learned.require_scorer(name, scorer)
        options["scorer"] = scorer
    elif scorer is not None:
        raise ValueError(f"policy {name!r} is a rule and takes no scorer")
    if method.kind != "full" and budget_or_slots is None:
        raise ValueError(f"policy {name!r} needs a budget: a kvkeep.Budget or a number of slots")
    split = budget_or_slots if isinstance(budget_or_slots, Budget) else None
    if split is None and budget_or_slots is not None:
        split = budget(name, budget_or_slots, **(scorer.parts_at(budget_or_slots) if method.learned else {}))
    if protect is not None and split is not None:
        split = replace(split, window=protect, topk=split.topk + split.window - protect)
    _check_kind(method, split)
    try:
        return method(split, **options)
    except TypeError as error:
        raise ValueError(f"policy {name!r}: {str(error).split('() ')[-1]}") from error


def _check_kind(method: type[Policy], split: Budget | None) -> None:
    if method.kind == "entry" and split.interval:
        raise ValueError(f"policy {method.name!r} decides at every token: interval must be 0, not {split.interval}")
    if method.kind == "attention" and not split.interval:
        raise ValueError(f"policy {method.name!r} decides every interval of tokens: interval must be at least 1")

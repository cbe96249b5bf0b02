"""The tuned league: what tuning a backbone under a mask bought, against the model it began as.

    kvkeep evaluate --policies full,streaming,kvpop_mlp ... --json base.json
    kvkeep evaluate --model TUNED --policies full,kvpop_mlp ... --json tuned.json
    python -m kvkeep.evaluation.league base.json tuned.json [more.json ...] > page.md

A tuned model may look good because it knows the training texts better, so one ratio says little. Every row has three:
to the original's loss with the full cache, to the student's own with the full cache, and that of these two, what tuning
did to the dense model. What was removed of the frozen model's excess loss is paired by document.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvkeep.evaluation.gaps import summed_losses
from kvkeep.evaluation.report import grid
from kvkeep.evaluation.statistics import Interval, bootstrap_ratio, gap_closed
from kvkeep.evaluation.table import role

NATURAL = ("prose", "code", "docs")


class Standing(NamedTuple):
    """One policy of one model at one budget, on one group of documents."""

    budget: int
    group: str  # "all", "natural" or a kind
    documents: int
    policy: str
    model: str
    to_original: Interval
    to_own: Interval
    dense: Interval  # the model's own full-cache loss over the original's
    removed: Interval | None  # of the frozen model's excess under the same policy; None for the frozen model
    removed_own: Interval | None  # the same, each model's excess taken over its own full-cache loss


def league(base: Mapping[str, Any], tuned: Sequence[Mapping[str, Any]]) -> list[Standing]:
    """All standings, budget after budget and group after group, the frozen model first.

    Args:
        base: of the original model, what ``evaluate`` returns or its JSON read back.
        tuned: of models tuned from it, on the same documents, at budgets and under policies that ``base`` has.

    Raises:
        ValueError: where a tuned model was measured on other documents, or under a policy or budget the base was not.
    """
    found = []
    kinds = list(dict.fromkeys(row["kind"] for row in base["rows"]))
    groups = {kind: (kind,) for kind in kinds}
    natural = tuple(kind for kind in kinds if kind in NATURAL)
    if natural and len(natural) < len(kinds) - 1:  # something besides them, and besides "all"
        groups = {"all": ("all",), "natural": natural} | groups
    for budget in dict.fromkeys(row["budget"] for row in base["rows"]):
        for group, members in groups.items():
            frozen = _losses(base, budget, members)
            found += [_standing(budget, group, base, policy, mine, mine) for policy, mine in frozen.items()]
            for result in tuned:
                for policy, mine in _losses(result, budget, members).items():
                    if policy not in frozen:
                        raise ValueError(f"the base was not measured under {policy!r} at {budget} tokens")
                    found.append(_standing(budget, group, result, policy, mine, frozen[policy]))
    return found


class _Losses(NamedTuple):
    """Per document, in order of their names: summed losses under a policy and with the full cache."""

    names: list[str]
    loss: list[float]
    full: list[float]


def _losses(result: Mapping[str, Any], budget: int, kinds: Sequence[str]) -> dict[str, _Losses]:
    policies: dict[str, list[tuple[str, float, float]]] = {}
    for row in result["rows"]:
        if row["budget"] == budget and row["kind"] in kinds and role(row) != "no eviction":
            full = [document["full_loss"] * document["tokens"] for document in row["per_document"]]
            names = [document["document"] for document in row["per_document"]]
            policies.setdefault(row["label"], []).extend(zip(names, summed_losses(row), full, strict=True))
    return {label: _Losses(*map(list, zip(*sorted(rows), strict=True))) for label, rows in policies.items()}


def _standing(
    budget: int, group: str, result: Mapping[str, Any], policy: str, mine: _Losses, frozen: _Losses
) -> Standing:
    model = str(result["settings"]["model"])
    if mine.names != frozen.names:
        raise ValueError(f"{model} was measured on other documents than the base")
    removed = removed_own = None
    if mine is not frozen:
        removed = gap_closed(frozen.loss, mine.loss, frozen.full)
        excess = [[a - b for a, b in zip(each.loss, each.full, strict=True)] for each in (frozen, mine)]
        removed_own = gap_closed(*excess, [0.0] * len(mine.loss))
    return Standing(
        budget,
        group,
        len(mine.names),
        policy,
        Path(model).name,
        bootstrap_ratio(mine.loss, frozen.full),
        bootstrap_ratio(mine.loss, mine.full),
        bootstrap_ratio(mine.full, frozen.full),
        removed,
        removed_own,
    )


def markdown(standings: Sequence[Standing]) -> str:
    """The standings as tables, one per budget."""
    lines = [
        "Loss over the original model's loss with the full cache, over the model's own with the full cache, and the "
        "one of these over the other (dense: above 1 is damage); how much of the frozen model's excess loss under the "
        "same policy is gone, measured against the original and against the model's own full cache. 95 % bootstrap "
        "intervals, paired by document.",
    ]
    head = ["documents", "policy", "model", "to original", "to own", "dense", "excess removed", "removed, own"]
    for budget in dict.fromkeys(standing.budget for standing in standings):
        rows = [standing for standing in standings if standing.budget == budget]
        cells = [
            [f"{row.group} ({row.documents})", row.policy, row.model]
            + [_interval(each, 3) for each in (row.to_original, row.to_own, row.dense)]
            + ["" if each is None else _interval(each, 2) for each in (row.removed, row.removed_own)]
            for row in rows
        ]
        lines += ["", f"### {budget} tokens per KV head", "", *grid(head, cells)]
    return "\n".join(lines) + "\n"


def _interval(found: Interval, digits: int) -> str:
    return f"{found.value:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def main(arguments: Sequence[str]) -> None:
    """Print the page for the JSON of a base and of one or more tuned models; exit code 2 where they do not fit."""
    if len(arguments) < 2:
        _refuse("give the JSON of the original and of one or more tuned models: base.json tuned.json ...")
    try:
        base, *tuned = (json.loads(Path(name).read_text(encoding="utf-8")) for name in arguments)
        print(markdown(league(base, tuned)), end="")
    except (OSError, ValueError, KeyError, TypeError) as error:
        _refuse(f"this is no league: {error}")


def _refuse(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])

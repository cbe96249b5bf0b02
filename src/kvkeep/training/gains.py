"""What reinforcement gained: rewards and losses of a scorer and of the one it began as, trace by trace."""

from __future__ import annotations

from collections.abc import Sequence

from kvkeep.evaluation.statistics import Interval, bootstrap_difference, bootstrap_ratio
from kvkeep.training.rollout import Measured, Task


def compared(traces: Sequence[Task], before: Sequence[Measured], after: Sequence[Measured]) -> dict[str, Interval]:
    """Rewards and loss ratios of a scorer and the one it began as, with intervals over documents."""
    if not traces:
        return {}
    found = {}
    start, loss, full = (
        list(per_document(traces, column).values())
        for column in ([e.loss for e in before], [e.loss for e in after], [e.full_loss for e in after])
    )
    first, last = (per_document(traces, [each.reward for each in column]) for column in (before, after))
    if first:
        gain = [last[document] - first[document] for document in first]
        for name, column in (("reward", list(last.values())), ("reward_gain", gain)):
            found[name] = bootstrap_ratio(column, [1.0] * len(column))
    return found | {
        "loss_ratio": bootstrap_ratio(loss, full),
        "loss_ratio_change": bootstrap_difference(loss, start, full),
    }


def per_document(traces: Sequence[Task], values: Sequence[float | None]) -> dict[int, float]:
    """The mean over budgets, for documents that have one: they are what is drawn again, not budgets of one text."""
    found: dict[int, list[float]] = {}
    for task, value in zip(traces, values, strict=True):
        if value is not None:
            found.setdefault(task.document, []).append(value)
    return {document: sum(each) / len(each) for document, each in found.items()}

"""What an ablation says: its numbers from the rows of an evaluation, and a page of markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvkeep.evaluation import statistics
from kvkeep.evaluation.ablation_variants import Experiment, differs
from kvkeep.evaluation.gaps import gaps, summed_losses
from kvkeep.evaluation.report import grid
from kvkeep.evaluation.table import role
from kvkeep.training.foresightkv import METHOD

LEGEND = (
    "**Loss ratio**: loss under the policy over loss with the full cache on the same tokens. Every document's loss is "
    "averaged over seeds first, then a 95 % bootstrap interval over documents. {monitor} **Gap closed**: of that "
    "between the best rule, named, and `{oracle}`."
)
RECALL = (
    "**Recall**: of the top-k of KVpop's teacher (undecayed, the largest attention of a group's heads) what the "
    "undecayed scores hold on the held-out documents, mean over seeds, beside chance."
)
OVERLAP = (
    "**Overlap**: of what golden drops, along golden's evictions of the held-out documents, what the scorer would "
    "drop, mean over seeds, beside chance."
)


def summary(
    experiment: Experiment, rows: Sequence[Mapping[str, Any]], recalls: Mapping[str, tuple[float, float]]
) -> dict[str, Any]:
    """What an evaluation says of the variants.

    Args:
        experiment: that it is of.
        rows: of ``evaluate``, over all documents, those of a variant labelled with ``Variant.title``.
        recalls: of these, with recall by chance.

    Returns:
        ``variants``: ``loss_ratio`` with its interval over documents, every document's loss averaged over seeds first;
        ``gap``, closed between the best rule and the oracle, None where the oracle is no better; ``difference`` to the
        reference, None for the reference: of loss ratios, with a paired interval over documents, by seed, and the
        documents on which less is lost. ``others``: policies that are not trained.
    """
    by_label = {row["label"]: row for row in rows}
    others = [row for row in rows if role(row) != "learned"]
    runs = {v.name: [by_label[v.title(seed)] for seed in range(experiment.seeds)] for v in experiment.variants}
    mean = {name: _over_seeds(name, each) for name, each in runs.items()}
    closed = {record["label"]: record for record in gaps([*others, *mean.values()])}
    reference, found = experiment.variants[0], []
    for variant in experiment.variants:
        name, held = variant.name, [recalls[variant.title(seed)] for seed in range(experiment.seeds)]
        pairs = zip(runs[name], runs[reference.name], strict=True)
        by_seed = [one["loss_ratio"] - its["loss_ratio"] for one, its in pairs]
        found.append(
            {
                "variant": name,
                "method": variant.method,
                "differs": differs(variant, reference),
                "documents": mean[name]["documents"],
                "seeds": experiment.seeds,
                "recall": float(np.mean([one for one, _ in held])),
                "recall_by_seed": [one for one, _ in held],
                "recall_chance": held[0][1],
                "loss_ratio": [mean[name]["loss_ratio"], *mean[name]["loss_ratio_ci"]],
                "loss_ratio_by_seed": [row["loss_ratio"] for row in runs[name]],
                "gap": _gap(closed.get(name)),
                "difference": None if variant is reference else _difference(mean[name], mean[reference.name], by_seed),
            }
        )
    told = [
        {"policy": r["label"], "role": role(r), "loss_ratio": [r["loss_ratio"], *r["loss_ratio_ci"]]} for r in others
    ]
    return {"variants": found, "others": told}


def _over_seeds(label: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows of several seeds as one, every document's loss their mean."""
    losses = np.mean([[document["loss"] for document in row["per_document"]] for row in rows], 0).tolist()
    each = [one | {"loss": loss} for one, loss in zip(rows[0]["per_document"], losses, strict=True)]
    row = dict(rows[0]) | {"label": label, "seed": None, "per_document": each}
    row["loss"] = float(np.mean([one["loss"] for one in rows]))
    ratio = statistics.bootstrap_ratio(summed_losses(row), _full(row))
    return row | {"loss_ratio": ratio.value, "loss_ratio_ci": [ratio.low, ratio.high]}


def _full(row: Mapping[str, Any]) -> list[float]:
    return [document["full_loss"] * document["tokens"] for document in row["per_document"]]


def _gap(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """For JSON: ends that no draw pins down are None."""
    if record is None:
        return None
    ends = [end if math.isfinite(end) else None for end in record["ci"]]
    return {part: record[part] for part in ("closed", "rule", "oracle", "wins")} | {"ci": ends}


def _difference(row: Mapping[str, Any], reference: Mapping[str, Any], by_seed: list[float]) -> dict[str, Any]:
    mine, its = summed_losses(row), summed_losses(reference)
    return {
        "loss_ratio": list(statistics.bootstrap_difference(mine, its, _full(row))),
        "by_seed": by_seed,
        "won": sum(one < other for one, other in zip(mine, its, strict=True)),
    }


# ---- the page


def report(result: Mapping[str, Any], command: str) -> str:
    """The result as markdown.

    Args:
        result: what :func:`kvkeep.evaluation.ablation.run` returns, or its JSON read back.
        command: what printed it.
    """
    variants, others = result["variants"], result["others"]
    foreseeing = variants[0]["method"] == METHOD
    name, oracle = variants[0]["variant"], next(row["policy"] for row in others if row["role"] == "oracle")
    lines = [f"# Ablation: {result['settings']['name']}", "", f"Printed by `{command}`.", "", *_asked(result), ""]
    head = ["variant", "method", f"differs from `{name}` in", "training documents", "steps", "memory"]
    lines += [
        *grid(head, [_made(row) for row in variants]),
        "",
        LEGEND.format(oracle=oracle, monitor=OVERLAP if foreseeing else RECALL),
        "",
    ]
    head = [
        "variant",
        "documents",
        "seeds",
        "overlap" if foreseeing else "recall",
        "loss ratio",
        "by seed",
        "gap closed",
    ]
    lines += [
        *grid(head, [_found(row) for row in variants]),
        "",
        f"Difference in loss ratio to `{name}`, below 0 where less is lost. Paired by document for the interval and by "
        "seed for the range, for documents are not the only source of noise:",
        "",
    ]
    head = ["variant", "difference", "range over seeds", "documents won"]
    lines += [
        *grid(head, [_compared(row) for row in variants[1:]]),
        "",
        *(f"* {verdict(row, name)}" for row in variants[1:]),
        "",
        "What is not trained, on the same documents:",
        "",
        *grid(["policy", "", "loss ratio"], [[r["policy"], r["role"], _interval(r["loss_ratio"])] for r in others]),
    ]
    return "\n".join(lines) + "\n"


def _asked(result: Mapping[str, Any]) -> list[str]:
    settings, seeds = result["settings"], result["settings"]["seeds"]
    return [
        settings["question"],
        "",
        f"Model {settings['model']}, {settings['evaluation']['dtype']}; {settings['budget']} tokens per KV head for "
        f"every policy, the memory of a scorer included; {result['variants'][0]['documents']} held-out documents of "
        f"{settings['length']} tokens; {seeds} training run{'s' if seeds > 1 else ''} of every variant.",
    ]


def verdict(row: Mapping[str, Any], reference: str) -> str:
    """What the difference of a variant to the reference shows, in a sentence."""
    (value, low, high), by_seed = row["difference"]["loss_ratio"], row["difference"]["by_seed"]
    names = f"`{row['variant']}` and `{reference}`"
    if low <= 0 <= high:
        return f"{names}: no difference shown, the interval includes zero."
    found = f"`{row['variant']}` loses {'less' if value < 0 else 'more'} than `{reference}`"
    if len(by_seed) == 1:
        return f"{found}; how much of it is the luck of one seed is not known."
    if min(by_seed) <= 0 <= max(by_seed):
        return f"{names}: no difference shown, the seeds disagree, though the interval over documents excludes zero."
    return f"{found}, with every seed."


def _made(row: Mapping[str, Any]) -> list[Any]:
    parts = ", ".join(f"{part} {value}" for part, value in row["differs"].items() if part != "training documents")
    return [row["variant"], row["method"], parts, row["trained_on"], row["steps"], row["memory"]]


def _found(row: Mapping[str, Any]) -> list[Any]:
    by_seed, gap = " ".join(f"{ratio:.4f}" for ratio in row["loss_ratio_by_seed"]), row["gap"]
    closed = "-"
    if gap is not None:
        ends = ", ".join("?" if end is None else f"{end:.2f}" for end in gap["ci"])
        closed = f"{gap['closed']:.2f} [{ends}] ({gap['rule']})"
    held = f"{row['recall']:.3f} ({row['recall_chance']:.3f})"
    return [row["variant"], row["documents"], row["seeds"], held, _interval(row["loss_ratio"]), by_seed, closed]


def _compared(row: Mapping[str, Any]) -> list[Any]:
    difference = row["difference"]
    by_seed = difference["by_seed"]
    value, low, high = difference["loss_ratio"]
    return [
        row["variant"],
        f"{value:+.4f} [{low:+.4f}, {high:+.4f}]",
        f"{min(by_seed):+.4f} to {max(by_seed):+.4f}",
        f"{difference['won']} of {row['documents']}",
    ]


def _interval(ratio: Sequence[float]) -> str:
    value, low, high = ratio
    return f"{value:.4f} [{low:.4f}, {high:.4f}]"

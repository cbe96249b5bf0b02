"""KVpop (arXiv 2607.05061) on a frozen backbone: documents in, a scorer checkpoint out.

Four stages, each resumable: read the documents once (:mod:`~kvkeep.training.harvest`), fit the scorers to the labels
(:mod:`~kvkeep.training.fit`), calibrate the decay by loss (:mod:`~kvkeep.training.decay`), write the checkpoint.

Presets
    ``published``  the paper's scorer recipe: boundary loss against the k-th best, margin and class balance, decay
                   learned by gradient per head from 0.99, AdamW from 1e-3; what it leaves open is as the fields say.
    ``best``       the default: scores and a decay per head fitted to the attention by age
                   (:mod:`~kvkeep.training.losses.intensity`), standardised inputs, then a factor of the decays
                   for every budget, calibrated by loss.
    ``mini``       ``best`` in a few steps, to see that everything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kvkeep import scorers
from kvkeep.budget import Budget
from kvkeep.training.corpus import Texts, data_fingerprint, mixed, require_long_enough, trained_on
from kvkeep.training.decay import FACTORS, GRID, calibrate_decay
from kvkeep.training.fit import Fit, Schedule
from kvkeep.training.harvest import STORAGE, TARGET_SOURCES, harvest
from kvkeep.training.state import jsonable, open_run

METHODS = ("kvpop", "kvpop_mlp")
GROUPS = ("max", "mean_log", "log_mean")


@dataclass(frozen=True)
class Recipe:
    """Everything a run needs besides model and data; JSON-friendly, recorded in the checkpoint.

    Attributes:
        preset: the one it began as.
        schedule: of the fit.
        hidden: width of the scoring network.
        group, count_normalised, eps, target_source: of the target, see :func:`kvkeep.training.harvest.harvest`.
        held_out: share of the documents kept for held-out evaluation and early stop.
        calibrate_on: training documents that the decay is calibrated on.
        decays: the grid of that calibration; None = ``FACTORS`` of a fitted decay, ``GRID`` otherwise.
        options: further options of the scorer, see :mod:`kvkeep.scorers`.
        storage: of harvested keys and values.
    """

    preset: str = "best"
    schedule: Schedule = field(default_factory=Schedule)
    hidden: int = 64
    group: str = "max"
    count_normalised: bool = True
    eps: float = 1e-6
    target_source: str = "dense"
    held_out: float = 0.1
    calibrate_on: int = 12
    decays: tuple[float, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    storage: str = "float16"

    def __post_init__(self) -> None:
        if self.group not in GROUPS or self.target_source not in TARGET_SOURCES or self.storage not in STORAGE:
            raise ValueError(
                f"group is one of {', '.join(GROUPS)}, target_source of {', '.join(TARGET_SOURCES)} and storage of "
                f"{', '.join(STORAGE)}, not {self.group!r}, {self.target_source!r} and {self.storage!r}"
            )
        if self.hidden < 1 or self.calibrate_on < 1 or not 0 <= self.held_out < 1:
            raise ValueError(
                f"hidden {self.hidden} and calibrate_on {self.calibrate_on} must be at least 1, held_out "
                f"{self.held_out} in [0, 1)"
            )


PRESETS = {
    "best": Recipe(),
    "published": Recipe(
        preset="published",
        schedule=Schedule(
            loss="boundary",
            batch=1,
            tokens=None,
            lr=1e-3,
            clip=1.0,
            standardise=False,
            boundary="kth",
            decay="learned",
            gamma=0.99,
        ),
    ),
    "mini": Recipe(
        preset="mini", schedule=Schedule(steps=40, warmup=4, evaluate_every=20, save_every=20), calibrate_on=1
    ),
}


def recipe(preset: str, steps: int | None = None, **overrides: Any) -> Recipe:
    """A preset with parts replaced.

    Args:
        preset: a name of ``PRESETS``.
        steps: optimiser steps; None keeps the preset's.
        overrides: fields of :class:`Recipe` or :class:`~kvkeep.training.fit.Schedule`; None keeps the preset's.

    Raises:
        ValueError: for an unknown preset or field.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; there are {', '.join(PRESETS)}")
    base, given = (
        PRESETS[preset],
        {name: value for name, value in {"steps": steps, **overrides}.items() if value is not None},
    )
    timing = {name: given.pop(name) for name in list(given) if name in Schedule.__dataclass_fields__}
    if timing.get("loss", "intensity") != "intensity":  # what only the intensity has follows its absence
        timing = {"tokens": None, "batch": 1, "decay": "calibrated"} | timing
    unknown = set(given) - set(Recipe.__dataclass_fields__)
    if unknown:
        raise ValueError(f"a recipe has no {', '.join(sorted(unknown))}")
    return replace(base, schedule=replace(base.schedule, **timing), **given)


def train(
    method: str,
    model: PreTrainedModel,
    documents: Texts,
    budgets: Sequence[Budget | int],
    out: str | Path,
    settings: Recipe | None = None,
    seed: int = 0,
    resume: bool = False,
    base_model: str | None = None,
    command: str | None = None,
    shards: str | Path | None = None,
    half: bool = False,
    start: scorers.Scorer | None = None,
    reuse: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> scorers.Scorer:
    """Train a scorer and save it in ``out``.

    Args:
        method: "kvpop_mlp" or "kvpop".
        model: the frozen backbone.
        documents: pairs of a document and its ids ``[S]``, longer than every budget.
        budgets: slots or budgets, all with the same window.
        out: the checkpoint folder; ``out/run`` holds the log, the state and the shards while it is made.
        settings: see :func:`recipe`; None = the preset ``best``.
        seed: of initial weights and order.
        resume: go on where an earlier run in ``out`` was stopped; without it an unfinished run is refused.
        base_model: recorded as the model's name; None takes the config's.
        command: recorded in the model card.
        half: store weight matrices in float16, half the size.
        start: a trained ``kvpop_mlp`` scorer of the same width that ``kvpop`` starts from, its memory silent.
        reuse: with ``resume``, a finished scorer of the same run in ``out`` is returned as it is.
        shards: where harvested documents live; several runs may share them. None = ``out/run/shards``.
        progress: called with (stage, done, total).

    Raises:
        ValueError: for an unknown method, documents too short or too few, or an ``out`` that holds another
            run or files of somebody else.
    """
    if method not in METHODS:
        raise ValueError(f"train takes {' or '.join(METHODS)}, not {method!r}")
    settings = PRESETS["best"] if settings is None else settings
    scorer = scorers.new(method, model.config, list(budgets), seed=seed, hidden=settings.hidden, **settings.options)
    windows = {budget.window for budget in scorer.budgets}
    if len(windows) != 1:
        raise ValueError(f"the budgets of one scorer share their window, not {sorted(windows)}: labels depend on it")
    require_long_enough(documents, max(budget.rest for budget in scorer.budgets))
    schedule, record = settings.schedule, _record(method, settings, scorer.budgets, seed, documents, model)
    if start is not None:
        start.require_fits(model.config, scorers.model_fingerprint(model))
        for shape in scorer.geometry:
            scorer.layer(shape.index).start_from(start.layer(shape.index))
        schedule = replace(schedule, standardise=False)  # the inputs stay as it knows them
        record["start"] = start.fingerprint()
    out = Path(out)
    run = open_run(out, record, resume)
    if reuse and resume and (out / "config.json").exists():
        return scorers.load_scorer(out)
    fingerprint, documents = data_fingerprint(documents), mixed(documents)
    folder = run / "shards" if shards is None else Path(shards)
    target = {"group": settings.group, "count_normalised": settings.count_normalised, "eps": settings.eps}
    pieces = harvest(
        model,
        documents,
        windows.pop(),
        folder,
        target_source=settings.target_source,
        storage=settings.storage,
        ages=settings.schedule.loss == "intensity",
        progress=progress,
        **target,
    )
    cut = trained_on(len(pieces), settings.held_out)
    fit = Fit(scorer, pieces[:cut], pieces[cut:], schedule, run, resume, seed, progress)
    held_out = {name: {"value": found.value, "interval": [found.low, found.high]} for name, found in fit.run().items()}
    metrics: dict[str, Any] = {"held_out": held_out | {"documents": len(pieces) - cut}}
    if settings.schedule.decay in ("fitted", "calibrated"):
        fitted = settings.schedule.decay == "fitted"
        grid = settings.decays or (FACTORS if fitted else GRID)
        ratios = calibrate_decay(model, scorer, documents[:cut][: settings.calibrate_on], grid, fitted, progress)
        metrics["calibration"] = {
            f"{rest} tokens": {str(decay): ratio for decay, ratio in found.items()} for rest, found in ratios.items()
        }
    scorer.save_pretrained(
        out,
        half=half,
        base_model=base_model or model.config.name_or_path,
        base_fingerprint=scorers.model_fingerprint(model),
        data_fingerprint=fingerprint,
        metrics=metrics,
        recipe=jsonable(asdict(replace(settings, schedule=schedule))),
        start=record.get("start"),
        seed=seed,
        league="frozen backbone",
        steps=fit.step,
        documents=len(documents),
        command=command,
    )
    return scorer


def _record(method: str, settings: Recipe, budgets, seed: int, documents, model) -> dict[str, Any]:
    return jsonable(
        {
            "method": method,
            "recipe": asdict(settings),
            "budgets": [asdict(budget) for budget in budgets],
            "seed": seed,
            "data": data_fingerprint(documents),
            "model": scorers.model_fingerprint(model),
            "dtype": str(model.dtype),
        }
    )

"""ForesightKV (arXiv 2602.03203) on a frozen backbone: traces in, a scorer checkpoint out.

Stages
    ``sft``     read every document once along the evictions of golden, or of a rule (:mod:`~kvkeep.training.traces`),
                fit the scorer to what golden knows (:mod:`~kvkeep.training.rank`).
    ``dagger``  go on from such a scorer: the oracle also labels the states that the scorer's own evictions reach.
    ``rl``      go on from such a scorer: draws that spare the model surprises become more likely
                (:mod:`~kvkeep.training.reinforce`).

Presets
    ``published``  the paper's: six statistics, 16 hidden units, ranking loss with margin 0.01, learning rate 1e-2 with
                   a cosine over 1,000 steps, 8 traces a step; reinforced in groups of 8, 4 traces a step.
    ``best``       the default: along the evictions of ``h2o_decayed``; all but the 8 newest may go; statistics on a log
                   scale and the age, 64 hidden units, the expected alpha, weighed by the value and the age; reinforced
                   by what is still to come of a reward.
    ``mini``       ``best`` in a few steps, to see that everything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kvkeep import scorers
from kvkeep.budget import Budget
from kvkeep.runtime.geometry import rotary, text_config
from kvkeep.scorers.features import FeatureSpec
from kvkeep.training import reinforce
from kvkeep.training.corpus import Texts, data_fingerprint, mixed, require_long_enough, trained_on
from kvkeep.training.loop import Progress
from kvkeep.training.rank import Rank, Schedule
from kvkeep.training.state import jsonable, open_run
from kvkeep.training.traces import SPACING, harvest, require_followed

METHOD = "foresightkv"
STAGES = ("sft", "dagger", "rl")


@dataclass(frozen=True)
class Recipe:
    """Everything a run needs besides model and data; JSON-friendly, recorded in the checkpoint.

    Attributes:
        preset: the one it began as.
        schedule: of the fit, in stages "sft" and "dagger".
        reinforcement: the schedule of stage "rl".
        hidden: width of the scoring network.
        features: what it reads.
        held_out: share of the documents kept for held-out evaluation and early stop.
        storage: of harvested keys, values and sums.
        follow: whose evictions the traces of stage "sft" follow, and of "dagger" those beside the scorer's own:
            "golden", the paper's, or an attention policy without a scorer.
        window: newest tokens that may not go; None = an interval, the paper's.
        head_reduce: of the query heads of a group in golden's labels: "mean", the paper's, or "max".
        value_power, age_power: of :meth:`kvkeep.scorers.foresight.Foresight.keep`, where such a feature is read; the
            paper's are 0.
        restart: whether "dagger" begins with new weights, as the algorithm of that name does, instead of going on with
            those of the scorer whose states it adds.

    Raises:
        ValueError: for a policy that cannot be followed, or another reduction.
    """

    preset: str = "best"
    schedule: Schedule = field(default_factory=Schedule)
    reinforcement: reinforce.Schedule = field(default_factory=reinforce.Schedule)
    hidden: int = 64
    features: FeatureSpec = field(default_factory=FeatureSpec.best)
    held_out: float = 0.1
    storage: str = SPACING
    follow: str = "h2o_decayed"
    window: int | None = 8
    head_reduce: str = "mean"
    value_power: float = 0.5
    age_power: float = 0.2
    restart: bool = False

    def __post_init__(self):
        require_followed(self.follow)
        if self.head_reduce not in ("mean", "max"):
            raise ValueError(f"the group of a foresightkv scorer is mean or max, not {self.head_reduce!r}")

    @property
    def options(self) -> dict[str, Any]:
        """Of the scorer, without powers of what it does not read."""
        powers = {"value_power": self.value_power * self.features.kv, "age_power": self.age_power * self.features.age}
        return {"hidden": self.hidden, "features": self.features, "window": self.window} | powers


PRESETS = {
    "best": Recipe(reinforcement=reinforce.Schedule(credit="to_go")),
    "published": Recipe(
        preset="published",
        schedule=Schedule(loss="ranking", steps=1000, batch=8, lr=1e-2, warmup=10, weight_decay=0.0, clip=1.0),
        hidden=16,
        features=FeatureSpec.paper(),
        follow="golden",
        window=None,
        value_power=0.0,
        age_power=0.0,
    ),
    "mini": Recipe(
        preset="mini",
        schedule=Schedule(steps=40, warmup=4, evaluate_every=20, save_every=20),
        reinforcement=reinforce.Schedule(
            steps=4, batch=2, group=4, credit="to_go", warmup=1, evaluate_every=4, save_every=2
        ),
        hidden=16,
    ),
}


def recipe(preset: str, steps: int | None = None, stage: str = "sft", **overrides: Any) -> Recipe:
    """A preset with parts replaced.

    Args:
        preset: a name of ``PRESETS``.
        steps: optimiser steps of the stage; None keeps the preset's.
        stage: whose schedule the overrides are of.
        overrides: fields of :class:`Recipe`, and of :class:`~kvkeep.training.rank.Schedule` or, for the stage "rl", of
            :class:`~kvkeep.training.reinforce.Schedule`; None keeps the preset's. The ranking loss comes without powers
            of value and age unless they are given.

    Raises:
        ValueError: for an unknown preset, stage or field.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; there are {', '.join(PRESETS)}")
    _require_stage(stage)
    part = "reinforcement" if stage == "rl" else "schedule"
    base = PRESETS[preset]
    given = {name: value for name, value in {"steps": steps, **overrides}.items() if value is not None}
    if given.get("loss") == "ranking":  # scores without a scale: next to a power of anything they would say nothing
        given = {"value_power": 0.0, "age_power": 0.0} | given
    timing = {name: given.pop(name) for name in list(given) if name in vars(getattr(base, part))}
    unknown = set(given) - set(Recipe.__dataclass_fields__)
    if unknown:
        raise ValueError(f"a recipe has no {', '.join(sorted(unknown))}")
    return replace(base, **{part: replace(getattr(base, part), **timing)}, **given)


def _require_stage(stage: str) -> None:
    if stage not in STAGES:
        raise ValueError(f"stage is one of {', '.join(STAGES)}, not {stage!r}")


def train(
    model: PreTrainedModel,
    documents: Texts,
    budgets: Sequence[Budget | int],
    out: str | Path,
    settings: Recipe | None = None,
    stage: str = "sft",
    start: scorers.Scorer | None = None,
    seed: int = 0,
    resume: bool = False,
    base_model: str | None = None,
    command: str | None = None,
    shards: str | Path | None = None,
    half: bool = False,
    progress: Progress | None = None,
) -> scorers.Scorer:
    """Train a scorer and save it in ``out``.

    Args:
        model: the frozen backbone.
        documents: pairs of a document and its ids ``[S]``, longer than every budget's slots.
        budgets: slots, or budgets with an interval.
        out: the checkpoint folder; ``out/run`` holds the log, the state and the shards while it is made.
        settings: see :func:`recipe`; None = the preset ``best``.
        stage: "sft", "dagger" or "rl".
        start: the scorer that a later stage goes on from, with its features and width.
        seed: of initial weights and order.
        resume: go on where an earlier run in ``out`` was stopped; without it an unfinished run is refused.
        base_model: recorded as the model's name; None takes the config's.
        command: recorded in the model card.
        shards: where harvested traces live; several runs may share them. None = ``out/run/shards``.
        half: store weight matrices in float16, half the size.
        progress: called with (stage, done, total).

    Raises:
        ValueError: for an unknown stage, a start that is missing or not wanted, documents too short or too few, or an
            ``out`` that holds another run.
    """
    settings = PRESETS["best"] if settings is None else settings
    _require_stage(stage)
    if (start is None) != (stage == "sft"):
        raise ValueError(
            f"stage {stage!r} goes on from a scorer of stage 'sft': start from one"
            if start is None
            else "stage 'sft' starts from nothing, so it takes no scorer"
        )
    scorer = _fresh(model, budgets, settings, seed, start)
    begins = start is None or (stage == "dagger" and settings.restart)
    if start is not None and not begins:
        scorer.load_state_dict(start.state_dict())
    require_long_enough(documents, max(budget.slots for budget in scorer.budgets))
    record = {
        "method": METHOD,
        "stage": stage,
        "recipe": asdict(settings),
        "budgets": [asdict(budget) for budget in scorer.budgets],
        "seed": seed,
        "data": data_fingerprint(documents),
        "model": scorers.model_fingerprint(model),
        "dtype": str(model.dtype),
        "start": None if start is None else start.fingerprint(),
    }
    run = open_run(Path(out), jsonable(record), resume)
    documents = mixed(documents)
    cut = trained_on(len(documents), settings.held_out)
    shared = {"resume": resume, "seed": seed, "progress": progress}
    if stage == "rl":
        rl = reinforce.Reinforce(model, scorer, documents[:cut], documents[cut:], settings.reinforcement, run, **shared)
        found, steps = rl.run(), rl.step
        compared = len({task.document for task in rl.train[: settings.reinforcement.compare_on]})
        counted = {"train": compared, "held_out": len(documents) - cut}
    else:
        folder = run / "shards" if shards is None else Path(shards)
        reading = {"spec": scorer.layer(scorer.geometry[0].index).features, "storage": settings.storage}
        reading |= {"head_reduce": settings.head_reduce, "progress": progress}
        traces = [
            harvest(model, part, scorer.budgets, folder, follow=settings.follow, **reading)
            for part in (documents[:cut], documents[cut:])
        ]
        if start is not None:
            own = harvest(model, documents[:cut], scorer.budgets, folder, follow=start, **reading)
            traces[0] += own
        fit = Rank(scorer, *traces, settings.schedule, run, rotaries(model, scorer), fresh=begins, **shared)
        found, steps, counted = fit.run(), fit.step, {"held_out": len(documents) - cut}
    metrics = {part: {"documents": count} for part, count in counted.items()}
    for name, each in found.items():
        part = "train" if name.startswith("train_") else "held_out"
        metrics[part][name.removeprefix("train_")] = {"value": each.value, "interval": [each.low, each.high]}
    scorer.save_pretrained(
        out,
        half=half,
        base_model=base_model or model.config.name_or_path,
        base_fingerprint=scorers.model_fingerprint(model),
        data_fingerprint=record["data"],
        metrics=metrics,
        recipe=jsonable(asdict(settings)),
        stage=stage,
        start=record["start"],
        seed=seed,
        league="frozen backbone",
        steps=steps,
        documents=len(documents),
        command=command,
    )
    return scorer


def _fresh(model, budgets, settings: Recipe, seed: int, start: scorers.Scorer | None) -> scorers.Scorer:
    """A new scorer, with the options of the one that it goes on from."""
    if start is None:
        return scorers.new(METHOD, model.config, list(budgets), seed=seed, **settings.options)
    if start.method != METHOD:
        raise ValueError(f"later stages go on from a {METHOD} scorer, not a {start.method} scorer")
    start.require_fits(model.config, scorers.model_fingerprint(model))
    return scorers.new(METHOD, model.config, list(budgets), seed=seed, **start.options)


def rotaries(model: PreTrainedModel, scorer: scorers.Scorer) -> dict[int, Any]:
    """The rotary embedding of every layer that the scorer works in."""
    config = text_config(model.config)
    return {shape.index: rotary(config, shape.index, shape.head_dim) for shape in scorer.geometry}

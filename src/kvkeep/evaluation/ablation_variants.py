"""The questions that ablations ask: what each variant trains and runs, and how it differs from its reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvkeep.evaluation.contenders import line_up, split_budget
from kvkeep.evaluation.evaluate import first_measured
from kvkeep.scorers.features import FeatureSpec
from kvkeep.training import foresightkv, kvpop

OTHERS = ("full", "streaming", "tova", "h2o_decayed", "future_mass")  # no eviction, rules, an oracle
POWERS = {"value_power": 0.0, "age_power": 0.0}  # of a ForesightKV scorer that is what its network says
AT_INTERVALS = ("full", "streaming", "tova", "h2o_decayed", "snapkv", "rkv", "golden")  # the same for ForesightKV


@dataclass(frozen=True)
class Variant:
    """One answer to the question.

    Attributes:
        name: what tables call it.
        overrides: arguments of :func:`kvkeep.training.kvpop.recipe` or :func:`kvkeep.training.foresightkv.recipe`;
            the preset is "best" if none is given.
        method: the policy whose scorer is trained.
        documents: to train on, of all kinds in turn; None = all that the experiment has.
        stage: of ForesightKV's training; a later one goes on from the same variant's "sft".
        policy: options that the policy is run with.
    """

    name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    method: str = "kvpop_mlp"
    documents: int | None = None
    stage: str = "sft"
    policy: Mapping[str, Any] = field(default_factory=dict)

    def supervised(self) -> Variant:
        """What a later stage of ForesightKV goes on from; reinforcement has a schedule of its own."""
        mine = ("preset", "features", "hidden", *POWERS) if self.stage == "rl" else tuple(self.overrides)
        return replace(
            self, stage="sft", overrides={part: self.overrides[part] for part in mine if part in self.overrides}
        )

    @property
    def foreseeing(self) -> bool:
        """Whether it is ForesightKV's."""
        return self.method == foresightkv.METHOD

    def recipe(self, steps: int | None = None, calibrate_on: int | None = None) -> kvpop.Recipe | foresightkv.Recipe:
        if self.foreseeing:
            return foresightkv.recipe(**{"preset": "best", "steps": steps, "stage": self.stage, **self.overrides})
        return kvpop.recipe(**{"preset": "best", "steps": steps, "calibrate_on": calibrate_on, **self.overrides})

    def title(self, seed: int) -> str:
        """Of one training run: its row in an evaluation."""
        return f"{self.name}, seed {seed}"

    def parts(self) -> dict[str, Any]:
        """All that it is made of, flat; ``documents`` None = all."""
        made = self.recipe()
        recipe = asdict(made)
        if self.foreseeing:  # of what is not read there is no power
            recipe |= {power: made.options[power] for power in POWERS}
        schedules = {"schedule": recipe.pop("schedule"), "reinforcement": recipe.pop("reinforcement", {})}
        inner = (
            schedules["reinforcement" if self.stage == "rl" else "schedule"]
            | recipe.pop("options", {})
            | recipe.pop("features", {})
            | dict(self.policy)
        )
        own = {"method": self.method, "training documents": self.documents, "stage": self.stage}
        return own | recipe | inner


@dataclass(frozen=True)
class Experiment:
    """A question and how it is asked.

    Attributes:
        name: of the ablation.
        question: a sentence for the page.
        variants: the first is the reference.
        train_documents: at most so many to train on.
        budget: tokens per KV head.
        length: tokens of every document.
        seeds: training runs of every variant.
        steps: of every training run; None keeps the recipe's.
        calibrate_on: documents that every decay is calibrated on, fewer than the recipe's: most of an ablation's time
            would go there.
        model: its name, for the page and the checkpoints.
        dtype: of the model; None = its own.
        others: policies that are not trained, for comparison.
    """

    name: str
    question: str
    variants: tuple[Variant, ...]
    train_documents: int = 48
    budget: int = 128
    length: int = 1024
    seeds: int = 3
    steps: int | None = None
    calibrate_on: int = 4
    model: str = "smollm2-135m"
    dtype: str | None = None
    others: tuple[str, ...] = OTHERS

    def check(self) -> None:
        """Raise ValueError for a budget that cannot be split or leaves nothing to measure, before a model is loaded."""
        first_measured(line_up(self.others), self.budget, self.length)
        for variant in self.variants:
            split_budget(variant.method, self.budget)


def _decay(name: str) -> Variant:
    return Variant(name, {"loss": "intensity", "decay": name})


def _foresight(name: str, *, policy: Mapping[str, Any] | None = None, stage: str = "sft", **overrides: Any) -> Variant:
    return Variant(name, overrides, foresightkv.METHOD, stage=stage, policy=policy or {})


FEW = {"steps": 30, "batch": 4, "group": 16, "lr": 1e-3, "compare_on": 2}  # of reinforcement, on a CPU
KV_ONLY = FeatureSpec(windows=(), cumulative=False, decay=None)
FORESIGHT = tuple(
    Experiment(*asked, others=AT_INTERVALS)
    for asked in (
        (
            "foresight-best",
            "ForesightKV: what does each departure from the paper's recipe bring? One is taken back at a time.",
            (
                _foresight("best"),
                _foresight("published", preset="published"),
                _foresight("along golden", follow="golden"),
                _foresight("window 32", window=32),
                _foresight("no log, no age", features=FeatureSpec.paper()),
                _foresight("no age", features=FeatureSpec(normalize="log")),
                _foresight("no power of value or age", **POWERS),
                _foresight("hidden 16", hidden=16),
                _foresight("hidden 128", hidden=128),
                _foresight("ranking loss", loss="ranking"),
            ),
        ),
        (
            "foresight-loss",
            "ForesightKV: pairwise ranking, the expected log of the future attention, or the log of what is expected?",
            tuple(_foresight(loss, loss=loss) for loss in ("tweedie", "regression", "ranking")),
        ),
        (
            "foresight-inputs",
            "ForesightKV: does the scorer need keys and values, the attention received, or both? (The paper's table of "
            "inputs.)",
            (
                _foresight("both", **POWERS),
                _foresight("attention only", features=FeatureSpec(kv=False, age=True, normalize="log"), **POWERS),
                _foresight("keys and values only", features=KV_ONLY, **POWERS),
            ),
        ),
        (
            "foresight-sampling",
            "ForesightKV: is what goes the lowest, a draw among the 2L lowest, or a draw among all? (The paper's table "
            "of sampling; one scorer.)",
            (
                _foresight("top-L", preset="published"),
                _foresight("top-2L, sampled", preset="published", policy={"evict": "sample"}),
                _foresight("sampled over all", preset="published", policy={"evict": "sample", "pool": None}),
            ),
        ),
        (
            "foresight-stages",
            "ForesightKV: what do later stages add to the supervised scorer?",
            (
                _foresight("sft"),
                _foresight("dagger", stage="dagger"),
                _foresight("dagger, new weights", stage="dagger", restart=True),
                _foresight("rl", stage="rl", **FEW),
            ),
        ),
        (
            "foresight-rewards",
            "ForesightKV: which increases of the loss should reinforcement punish? (The paper's table of rewards.)",
            tuple(
                _foresight(name, stage="rl", variant=variant, **FEW)
                for name, variant in {
                    "large, low entropy, squared": "spike",
                    "large, low entropy": "low_large",
                    "low entropy": "low",
                    "high entropy": "high",
                    "all": "all",
                }.items()
            ),
        ),
    )
)

ABLATIONS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "aggregation",
            "Several query heads read one KV head. Is what a scorer foresees the attention of the head that pays most, "
            "or their mean? (The loss counts attention, so that the mean of logs is not asked.)",
            (Variant("max", {"group": "max"}), Variant("log_mean", {"group": "log_mean"})),
        ),
        Experiment(
            "delay",
            "Does it help to judge a token when it leaves the window, with a memory of what came after it? One feature "
            "a head: more cost slots.",
            (
                Variant("delay on", {"options": {"delay": True, "features": 1}}, "kvpop"),
                Variant("delay off", {"options": {"delay": False, "features": 1}}, "kvpop"),
                Variant("kvpop_mlp"),
            ),
        ),
        Experiment(
            "decay",
            "Is a decay fitted to every head's own attention better than one number for all heads, or none?",
            (_decay("fitted"), _decay("calibrated"), _decay("off")),
        ),
        Experiment(
            "loss",
            "Which loss teaches the scores? Only the intensity can fit a decay of its own; with the others one number "
            "is calibrated, and the ablation `decay` tells what that costs by itself.",
            (
                Variant("intensity", {"loss": "intensity", "decay": "fitted"}),
                Variant("regression", {"loss": "regression", "decay": "calibrated"}),
                Variant("boundary", {"loss": "boundary", "decay": "calibrated"}),
            ),
        ),
        Experiment(
            "hidden",
            "How wide must the scoring network be?",
            tuple(Variant(f"hidden {width}", {"hidden": width}) for width in (64, 16, 256)),
        ),
        Experiment(
            "documents",
            "How many training documents does a scorer need? Fewer are among more; the decay is calibrated on some of "
            "each variant's own.",
            (Variant("all documents"), *(Variant(f"{count} documents", documents=count) for count in (36, 12))),
            train_documents=108,
        ),
        Experiment(
            "preset",
            "What do the departures from the paper's recipe bring together?",
            (Variant("best", {"preset": "best"}), Variant("published", {"preset": "published"})),
        ),
        *FORESIGHT,
    )
}


def ablation(name: str, **changes: Any) -> Experiment:
    """A named experiment with fields replaced; None keeps them.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in ABLATIONS:
        raise ValueError(f"there is no ablation {name!r}; there are {', '.join(ABLATIONS)}")
    return replace(ABLATIONS[name], **{field: value for field, value in changes.items() if value is not None})


def differs(variant: Variant, reference: Variant) -> dict[str, Any]:
    """What sets a variant apart from the reference, what follows from its overrides included: part -> value."""
    its = reference.parts()
    return {part: value for part, value in variant.parts().items() if part not in its or value != its[part]}

"""The questions that ablations ask: what each variant trains, and how it differs from its reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvkeep.evaluation.contenders import line_up, split_budget
from kvkeep.evaluation.evaluate import first_measured
from kvkeep.training import kvpop

OTHERS = ("full", "streaming", "tova", "h2o_decayed", "future_mass")  # no eviction, rules, an oracle


@dataclass(frozen=True)
class Variant:
    """One answer to the question.

    Attributes:
        name: what tables call it.
        overrides: arguments of :func:`kvkeep.training.kvpop.recipe`; its preset is "best" if none is given.
        method: the policy whose scorer is trained.
        documents: to train on, of all kinds in turn; None = all that the experiment has.
    """

    name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    method: str = "kvpop_mlp"
    documents: int | None = None

    def recipe(self, steps: int | None = None, calibrate_on: int | None = None) -> kvpop.Recipe:
        return kvpop.recipe(**{"preset": "best", "steps": steps, "calibrate_on": calibrate_on, **self.overrides})

    def title(self, seed: int) -> str:
        """Of one training run: its row in an evaluation."""
        return f"{self.name}, seed {seed}"

    def parts(self) -> dict[str, Any]:
        """All that it is made of, flat; ``documents`` None = all."""
        recipe = asdict(self.recipe())
        inner = recipe.pop("schedule") | recipe.pop("options")
        return {"method": self.method, "training documents": self.documents} | recipe | inner


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

    def check(self) -> None:
        """Raise ValueError for a budget that cannot be split or leaves nothing to measure, before a model is loaded."""
        first_measured(line_up(OTHERS), self.budget, self.length)
        for variant in self.variants:
            split_budget(variant.method, self.budget)


def _decay(name: str) -> Variant:
    return Variant(name, {"loss": "intensity", "decay": name})


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
    return {part: value for part, value in variant.parts().items() if value != its.get(part)}

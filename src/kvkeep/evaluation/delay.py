"""Does it help to judge a token when it leaves the window rather than when it enters? A task made to tell.

    python -m kvkeep.evaluation.delay --out DIR --seeds 3 --report docs/delay.md

The episodes of :mod:`kvkeep.evaluation.hints` say only *after* an item, while it is in the window, whether it will be
asked for. A tiny model learns from scratch to answer; then scorers are trained on it, frozen, from the attention that
items get later (:mod:`kvkeep.training.kvpop`), several seeds each, and every policy answers the same held-out episodes
from a cache that cannot hold all items. What is finished in DIR is not done again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import ArrayLike
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel

from kvkeep import policies, scorers
from kvkeep.budget import Budget
from kvkeep.evaluation.delay_report import report
from kvkeep.evaluation.documents import Document
from kvkeep.evaluation.hints import Hints
from kvkeep.evaluation.statistics import CONFIDENCE, DRAWS, Interval
from kvkeep.evaluation.store import Store, claim, key, write_atomic
from kvkeep.policies.base import Policy
from kvkeep.runtime.replay import replay
from kvkeep.training import from_scratch, kvpop

RULES = ("full", "streaming", "random", "h2o_decayed")
ORACLES = ("future_mass", "golden")
LEARNED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "kvpop_mlp": ("kvpop_mlp", {}),
    "kvpop, delay off": ("kvpop", {"delay": False}),
    "kvpop, delay on": ("kvpop", {"delay": True}),
}
ROWS = 64  # episodes that are replayed at a time
TRAIN_SEED, TEST_SEED = 2**40, 2**41  # far from the seeds that the model itself learns from

Told = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a result.

    Attributes:
        task: the episodes.
        model: the tiny model and its training.
        ramp: share of that training over which its episodes grow from one block to all.
        other: weight of predictions other than answers in its loss.
        slots: tokens per KV head that every policy gets, a scorer's memory included.
        sinks: protected first tokens; the window is the task's.
        features: of the mLSTM; 1, the least there is, holds the last hint, and costs 2 of the slots.
        forget_bias: of the mLSTM, for a memory as short as the window.
        hidden: width of the scoring networks.
        presets: of :mod:`kvkeep.training.kvpop`, those to run.
        learned: which scorers to train, out of ``LEARNED``.
        steps, batch: of fitting a scorer; batch in episodes.
        lr: of the preset "best"; "published" keeps its own.
        train, test: episodes to fit scorers on, and held out. On a few hundred episodes both scorers learn them by
            heart instead.
        seeds: of scorer training, and of the random policy.
    """

    task: Hints = field(default_factory=Hints)
    model: from_scratch.Tiny = field(default_factory=from_scratch.Tiny)
    ramp: float = 0.3
    other: float = 0.02
    slots: int = 22
    sinks: int = 1
    features: int = 1
    forget_bias: tuple[float, float] = (1.0, 2.0)
    hidden: int = 64
    presets: tuple[str, ...] = ("best", "published")
    learned: tuple[str, ...] = tuple(LEARNED)
    steps: int = 800
    batch: int = 8
    lr: float = 1e-2
    train: int = 2048
    test: int = 256
    seeds: int = 3

    def budget(self, config, method: str, options: Mapping[str, Any]) -> Budget:
        """Of a learned method: what its memory costs comes out of top-k."""
        least = Budget(self.sinks, self.task.window, 1)
        memory = scorers.new(method, config, least, **self.scorer_options(method, options)).state_entries
        return scorers.charge(Budget(self.sinks, self.task.window, self._topk), memory)

    def scorer_options(self, method: str, options: Mapping[str, Any]) -> dict[str, Any]:
        own = {"features": self.features, "forget_bias": self.forget_bias, **options}
        return own if method == "kvpop" else {}

    def policy(self, name: str, seed: int) -> Policy:
        """A rule or an oracle at these slots; attention policies split them as they do by default."""
        method = policies.describe(name)
        if method.kind == "entry":
            budget = Budget(self.sinks, self.task.window, self._topk)
            return policies.create(name, budget, **({"seed": seed} if name == "random" else {}))
        return policies.create(name, None if name == "full" else policies.budget(name, self.slots))

    @property
    def _topk(self) -> int:
        return self.slots - self.sinks - self.task.window


def run(experiment: Experiment, out: str | Path, told: Told | None = None) -> dict[str, Any]:
    """Run the experiment, or what of it is not done yet.

    Args:
        experiment: what to run.
        out: everything lives here: the model, scorers, results.
        told: called with (stage, done, total).

    Returns:
        ``rows``, one per policy; ``differences`` between delay on and off, one per preset; ``memory``, tokens that the
        memory of a learned policy costs; ``settings``. JSON-friendly.

    Raises:
        ValueError: if ``out`` holds another experiment, or a budget that cannot be split.
    """
    out, settings = Path(out), json.loads(json.dumps(asdict(experiment)))
    fixed = {
        name: value for name, value in settings.items() if name not in ("presets", "learned", "seeds")
    }  # these may grow
    claim(out, fixed)
    model = tiny_model(experiment, out / "model", told)
    test = torch.from_numpy(experiment.task.episodes(experiment.test, TEST_SEED))
    store, found = Store(out / "measured"), {}
    for label, seed, make in _contenders(experiment, model, out, told):
        name = key(label=label, seed=seed, settings=fixed, model=scorers.model_fingerprint(model))
        measured = store.get(name)
        if measured is None:
            measured = measure(model, experiment.task, make(), test, experiment.slots)
            store.put(name, measured)
        found.setdefault(label, []).append(measured)
        if told is not None:
            told(f"measured {label}", seed + 1, experiment.seeds)
    memory = {
        label: experiment.slots - experiment.budget(model.config, method, options).slots
        for label, (method, options) in LEARNED.items()
    }
    result = summary(experiment, found) | {"memory": memory, "settings": settings}
    write_atomic(out / "result.json", json.dumps(result, indent=1))
    return result


def tiny_model(experiment: Experiment, out: Path, told: Told | None = None) -> PreTrainedModel:
    """The tiny model, trained unless ``out`` holds it: short episodes first, and every item is asked for.

    A model that were asked for kept items only would learn the same answers more slowly; that it is asked for all of
    them leaves it no reason to prefer kept ones, so all foresight is the scorer's.
    """
    task, ramp = experiment.task, max(experiment.ramp * experiment.model.steps, 1)

    def draw(count: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = min(task.blocks, 1 + int(step / ramp * task.blocks))
        rows = task.episodes(count, experiment.model.seed * 1_000_003 + step, blocks, ask_all=True)
        weights = torch.full((rows.shape[1] - 1,), experiment.other)
        weights[-2 * blocks * task.block + 1 :: 2] = 1  # a question predicts its answer
        return torch.from_numpy(rows), weights

    longest = task.length + 2 * (task.keys - task.questions)
    made_by = {"task": asdict(task), "ramp": experiment.ramp, "other": experiment.other}
    return from_scratch.train(task.vocabulary, longest, draw, out, experiment.model, made_by, told)


def _contenders(
    experiment: Experiment, model: PreTrainedModel, out: Path, told: Told | None
) -> Iterator[tuple[str, int, Callable[[], Policy]]]:
    """Label, seed and how to make it, of every policy that answers."""
    for name in RULES + ORACLES:
        for seed in range(experiment.seeds if name == "random" else 1):
            yield name, seed, lambda name=name, seed=seed: experiment.policy(name, seed)
    rows = experiment.task.episodes(experiment.train, TRAIN_SEED)
    episodes = [
        (Document(f"episode {index}", "hints", input_ids=tuple(ids)), torch.tensor(ids))
        for index, ids in enumerate(rows.tolist())
    ]
    for preset in experiment.presets:
        for label in experiment.learned:
            method, options = LEARNED[label]
            budget = experiment.budget(model.config, method, options)
            settings = kvpop.recipe(
                preset,
                experiment.steps,
                batch=experiment.batch,
                whole=experiment.batch,
                lr=experiment.lr if preset == "best" else None,
                hidden=experiment.hidden,
                storage="float32",
                calibrate_on=16,
                options=experiment.scorer_options(method, options),
            )
            for seed in range(experiment.seeds):

                def make(method=method, budget=budget, settings=settings, seed=seed, label=label, preset=preset):
                    folder = out / "scorers" / f"{label.replace(', delay ', '-')}-{preset}-{seed}"
                    shards = out / "shards"
                    if not (folder / "config.json").exists():
                        kvpop.train(
                            method, model, episodes, [budget], folder, settings, seed, True, "tiny", None, shards, told
                        )
                    scorer = scorers.load_scorer(folder)
                    return policies.create(method, budget, scorer=scorer)

                yield f"{label} ({preset})", seed, make


def measure(model: PreTrainedModel, task: Hints, policy: Policy, episodes: torch.Tensor, past: int) -> dict[str, Any]:
    """What a policy makes of episodes.

    Args:
        model: answers.
        task: that the episodes are of.
        policy: any.
        episodes: int64 ``[n, length]``.
        past: the loss is summed over predictions from this position on.

    Returns:
        Lists with an entry per episode: ``accuracy``, share of questions answered right; ``answer_loss``, mean nats;
        ``loss``, summed nats; and ``held``, the share of asked items that a KV head holds when they are asked for,
        ``[n][layers][heads]``.
    """
    at = torch.tensor(task.asked_at)
    parts: dict[str, list] = {"accuracy": [], "answer_loss": [], "loss": [], "held": []}
    for rows in episodes.split(ROWS):
        seen = replay(model, rows, policy, return_logits=True)
        right = seen.logits[:, at].argmax(-1) == rows[:, at + 1]
        parts["accuracy"] += right.double().mean(-1).tolist()
        parts["answer_loss"] += seen.token_loss[:, at].double().mean(-1).tolist()
        parts["loss"] += seen.token_loss[:, past:].double().sum(-1).tolist()
        places = torch.from_numpy(task.items_asked(rows.numpy()))  # [n, questions]
        held = []
        for evicted_at in seen.evicted_at:
            index = places[:, None].expand(-1, evicted_at.shape[1], -1)
            held.append((evicted_at.gather(-1, index) > at).double().mean(-1))
        parts["held"] += torch.stack(held, 1).tolist()
    return parts


# ---- what it says


def summary(experiment: Experiment, found: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Rows and differences from what was measured, ``{label: [a measurement per seed]}``."""
    full = np.array([each["loss"] for each in found["full"]])
    table = {label: np.array([each["accuracy"] for each in runs]) for label, runs in found.items()}
    rows = [
        {
            "label": label,
            "seeds": len(runs),
            "episodes": experiment.test,
            "accuracy": interval(table[label]),
            "accuracy_by_seed": table[label].mean(1).tolist(),
            "answer_loss": interval([each["answer_loss"] for each in runs]),
            "loss_ratio": interval([each["loss"] for each in runs], full),
            "held": np.mean([each["held"] for each in runs], 1).max(-1).mean(0).tolist(),
        }
        for label, runs in found.items()
    ]
    pairs = [(f"kvpop, delay on ({preset})", f"kvpop, delay off ({preset})") for preset in experiment.presets]
    differences = [
        {"on": on, "off": off, "accuracy": interval(table[on] - table[off])}
        for on, off in pairs
        if {on, off} <= set(table)
    ]
    return {"rows": rows, "differences": differences}


def interval(values: ArrayLike, base: ArrayLike | None = None, seed: int = 0) -> Interval:
    """The mean, or the ratio of pooled sums, with a percentile interval over resampled seeds and episodes.

    Args:
        values: ``[seeds, episodes]``; both are drawn with replacement, the same episodes for every seed.
        base: ``[1, episodes]``, what the sums are divided by; None = 1 each, which gives the mean.
        seed: of the draws; the same seed draws the same episodes in every row of a table.

    Example:
        >>> interval([[0.5, 0.5], [0.5, 0.5]])
        Interval(value=0.5, low=0.5, high=0.5)
    """
    values = np.asarray(values, np.float64)
    base = np.ones((1, values.shape[1])) if base is None else np.asarray(base, np.float64)
    columns, rows = (np.random.default_rng([seed, axis]) for axis in (1, 0))
    episodes = columns.multinomial(values.shape[1], np.full(values.shape[1], 1 / values.shape[1]), DRAWS)
    seeds = rows.multinomial(len(values), np.full(len(values), 1 / len(values)), DRAWS)
    drawn = np.einsum("ds,se,de->d", seeds, values, episodes) / (len(values) * (episodes @ base[0]))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Interval(float(values.sum() / (len(values) * base.sum())), float(low), float(high))


def main(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Everything lives here; done work is kept.")],
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Training runs of every scorer.")] = 3,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimiser steps of a scorer.")] = Experiment.steps,
    episodes: Annotated[int, typer.Option("--episodes", min=2, help="Held-out episodes.")] = Experiment.test,
    presets: Annotated[str, typer.Option("--presets", help="Recipes, a,b.")] = ",".join(Experiment.presets),
    markdown: Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write a report.")] = None,
) -> None:
    """Train a tiny model and scorers that judge a token early or late, and compare what they keep."""
    started = time.perf_counter()
    experiment = Experiment(seeds=seeds, steps=steps, test=episodes, presets=tuple(presets.split(",")))
    command = (
        f"python -m kvkeep.evaluation.delay --out DIR --seeds {seeds} --steps {steps} --episodes {episodes} "
        f"--presets {presets}"
    )
    console = Console(stderr=True)
    try:
        with Progress(console=console, transient=True) as bar:
            stages: dict[str, Any] = {}

            def told(stage: str, done: int, total: int) -> None:
                if stage not in stages:
                    stages[stage] = bar.add_task(stage)
                bar.update(stages[stage], completed=done, total=total)

            result = run(experiment, out, told)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    text = report(result, command)
    typer.echo(text)
    typer.echo(f"{time.perf_counter() - started:.0f} s", err=True)
    if markdown is not None:
        write_atomic(markdown, text)


if __name__ == "__main__":
    typer.run(main)

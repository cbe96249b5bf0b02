"""The loop that every fit goes through: seeded order, warm-up and cosine, held-out evaluation, early stop, resumption.

Step i takes the documents that a seeded shuffle of its epoch puts there, so nothing of the order has to be saved, and a
run that was killed and resumed sees the same documents, losses and weights as one that was not.

Where a run may stop early (``patience``), the weights of its best held-out evaluation are kept on disk beside the state
and are what it ends with; without, the last ones are.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from kvkeep.training.state import Log, load_state, save_state

Progress = Callable[[str, int, int], None]


class Timing(Protocol):
    """What the loop must know of a schedule.

    Attributes:
        steps: optimiser steps.
        lr, warmup, betas, weight_decay, clip: AdamW with a linear warm-up, then cosine to 0; clip = gradient norm.
        evaluate_every, patience: held-out evaluation, and how many without improvement end the run (0 = never); with a
            patience the best weights are kept, else the last.
        save_every: steps between two saved states.
    """

    steps: int
    lr: float
    warmup: int
    betas: tuple[float, float]
    weight_decay: float
    clip: float
    evaluate_every: int
    patience: int
    save_every: int


@dataclass
class Group:
    """Parameters with a peak learning rate of their own."""

    parameters: list[nn.Parameter]
    peak: float


class Loop:
    """Subclasses fill in :meth:`update` and :meth:`evaluate`; ``run`` does everything.

    Args:
        module: whose parameters and buffers are the state.
        groups: of its parameters.
        schedule: see :class:`Timing`.
        folder: state and log live here.
        resume: go on from the state in ``folder`` if there is one.
        seed: of the order.
        progress: called with (``stage``, step, steps).

    Raises:
        ValueError: for intervals below 1, or a patience below 0.
    """

    stage = "fit"

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[Group],
        schedule: Timing,
        folder: Path,
        resume: bool,
        seed: int,
        progress: Progress | None,
    ):
        for name, least in (("evaluate_every", 1), ("save_every", 1), ("patience", 0)):
            if getattr(schedule, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(schedule, name)}")
        self.module, self.schedule, self.seed, self.progress = module, schedule, seed, progress
        self.path, self.best_path = folder / "state.safetensors", folder / "best.safetensors"
        given = [{"params": group.parameters, "lr": group.peak, "peak": group.peak} for group in groups]
        self.optimizer = torch.optim.AdamW(given, betas=schedule.betas, weight_decay=schedule.weight_decay)
        self.step, self.best, self.waited = 0, math.inf, 0
        if resume and self.path.exists():
            record = load_state(self.path, self.module, self.optimizer)
            self.step, self.best, self.waited = record["step"], record["best"], record["waited"]
        self.log = Log(folder / "log.jsonl", self.step)

    def advance(self) -> None:
        """All steps that are left; with a patience the module then is what it was at its best evaluation."""
        while self.step < self.schedule.steps and not self.stopped:
            started = time.perf_counter()
            for group in self.optimizer.param_groups:
                group["lr"] = group["peak"] * self.rate(self.step)
            self.optimizer.zero_grad(set_to_none=True)
            record = {"step": self.step, **self.update()}
            seconds = time.perf_counter() - started
            self.step += 1
            last = self.step == self.schedule.steps
            if last or self.step % self.schedule.evaluate_every == 0:
                metrics = self.evaluate()
                record |= {f"held_out_{name}": value for name, value in metrics.items()}
                record |= self.noted()
                if metrics:
                    self.judge(self.goal(metrics))
                    record |= {"waited": self.waited} if self.schedule.patience else {}
            self.log.write(record | {"tokens_per_second": round(record["tokens"] / seconds, 1)})
            if last or self.stopped or self.step % self.schedule.save_every == 0:
                state = {"step": self.step, "best": self.best, "waited": self.waited}
                save_state(self.path, self.module, self.optimizer, state)
            if self.progress is not None:
                self.progress(self.stage, self.step, self.schedule.steps)
        if self.schedule.patience and self.waited and self.best < math.inf:
            self.return_to_best()

    def judge(self, goal: float) -> None:
        """Count the evaluations without improvement; with a patience, keep the weights of the best.

        They are on disk before the state that counts on them. A run that is killed in between evaluates the same
        weights again.
        """
        improved = goal < self.best
        self.waited = 0 if improved else self.waited + 1
        self.best = min(self.best, goal)
        if improved and self.schedule.patience:
            tensors = {name: tensor.detach().contiguous() for name, tensor in self.module.state_dict().items()}
            beside = self.best_path.with_name(self.best_path.name + ".tmp")
            save_file(tensors, beside)
            os.replace(beside, self.best_path)

    def return_to_best(self) -> None:
        """Take the best weights back, and what evaluation has to say of them."""
        try:
            best = load_file(self.best_path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.best_path}, the best weights of this run, cannot be read: {error}") from error
        self.module.load_state_dict(best)
        self.evaluate()

    def descend(self) -> dict[str, float]:
        """Clip what ``backward`` has left and take a step; norm and learning rate for the log.

        Raises:
            ValueError: where the gradient is not finite.
        """
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.schedule.clip)
        if not bool(torch.isfinite(norm)):
            raise ValueError(f"the gradient is not finite at step {self.step}")
        self.optimizer.step()
        return {"gradient_norm": float(norm), "lr": self.optimizer.param_groups[0]["lr"]}

    @property
    def stopped(self) -> bool:
        return bool(self.schedule.patience) and self.waited >= self.schedule.patience

    def rate(self, step: int) -> float:
        """Share of the peak learning rate: linear warm-up, then cosine to 0."""
        if step < self.schedule.warmup:
            return (step + 1) / (self.schedule.warmup + 1)
        past = (step - self.schedule.warmup) / max(self.schedule.steps - self.schedule.warmup, 1)
        return 0.5 * (1 + math.cos(math.pi * past))

    def shuffled(self, items: Sequence[Any], batch: int, step: int) -> list[Any]:
        """The items of a step: a fresh seeded shuffle every epoch."""
        chosen = []
        for position in range(step * batch, (step + 1) * batch):
            epoch, place = divmod(position, len(items))
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            chosen.append(items[int(torch.randperm(len(items), generator=generator)[place])])
        return chosen

    def update(self) -> dict[str, float]:
        """One step, ``descend`` included; what the log is to say, ``tokens`` among it."""
        raise NotImplementedError

    def evaluate(self) -> dict[str, float]:
        """Held-out metrics; none where nothing is held out."""
        raise NotImplementedError

    def noted(self) -> dict[str, Any]:
        """What else the log says at a held-out evaluation; JSON-friendly."""
        return {}

    def goal(self, metrics: dict[str, float]) -> float:
        """What an early stop watches, lower is better."""
        return metrics["loss"]

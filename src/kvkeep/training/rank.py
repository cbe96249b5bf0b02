"""Fit a ForesightKV scorer to traces: of two candidates of an eviction the one that is needed more shall stay.

Paper: ForesightKV, arXiv 2602.03203, section 3.3. Every eviction of every KV head is a row of candidates with their
features and their future attention alpha. "ranking" is the paper's pairwise hinge; "regression" foretells log alpha;
"tweedie" the log of the expected alpha, so that what is seldom needed but then badly is worth what it costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from kvkeep.evaluation.statistics import Interval, bootstrap_ratio
from kvkeep.policies.base import Rotary
from kvkeep.scorers import Scorer
from kvkeep.training import losses
from kvkeep.training.loop import Group, Loop, Progress
from kvkeep.training.traces import Trace

LOSSES = ("ranking", "regression", "tweedie")
LOOKED_AT = 8  # evictions of a trace that statistics and held-out metrics look at, evenly spaced


@dataclass(frozen=True)
class Schedule:
    """How a scorer is fitted to traces.

    Attributes:
        loss: "ranking" (see :func:`kvkeep.training.losses.ranking`) or "regression" (smooth L1 on log alpha,
            standardised per head) or "tweedie" (see :func:`kvkeep.training.losses.tweedie`).
        steps, batch: optimiser steps, traces per step.
        evictions: of each trace that a step looks at, drawn at random; None = all.
        margin, pairs: of the ranking loss; "all", "cross", or a number of pairs that are drawn.
        smallest: added to alpha before its log is taken.
        power: of the Tweedie deviance.
        lr, warmup, betas, weight_decay, clip, evaluate_every, patience, save_every: see
            :class:`kvkeep.training.loop.Timing`; an early stop watches the overlap.
    """

    loss: str = "tweedie"
    steps: int = 400
    batch: int = 8
    evictions: int | None = 4
    margin: float = 0.01
    pairs: str | int = "all"
    smallest: float = 1e-5
    power: float = 1.5
    lr: float = 3e-3
    warmup: int = 20
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 1e-4
    clip: float = 10.0
    evaluate_every: int = 100
    patience: int = 0
    save_every: int = 100

    def __post_init__(self):
        if self.loss not in LOSSES:
            raise ValueError(f"loss is one of {', '.join(LOSSES)}, not {self.loss!r}")
        if min(self.steps, self.batch, self.evictions or 1) < 1 or self.warmup < 0:
            raise ValueError(
                f"steps {self.steps}, batch {self.batch} and evictions {self.evictions} must be at least 1, "
                f"warmup {self.warmup} at least 0"
            )
        if not 1 <= self.power <= 2:
            raise ValueError(f"the power of the deviance must be in [1, 2], not {self.power}")
        if isinstance(self.pairs, str) and self.pairs not in ("all", "cross"):
            raise ValueError(f'pairs are "all", "cross" or a number, not {self.pairs!r}')


class Rank(Loop):
    """A scorer being fitted; ``run`` does everything.

    Args:
        scorer: of ForesightKV, fitted in place.
        train, held_out: traces; none of the latter means no held-out evaluation.
        schedule: how.
        folder: state and log live here.
        rotary: of every layer by index, for scorers that read keys before the rotary embedding.
        fresh: whether the scorer has yet to be told the statistics of its features; False for one that goes on.
        resume, seed, progress: see :class:`~kvkeep.training.loop.Loop`.
    """

    def __init__(
        self,
        scorer: Scorer,
        train: Sequence[Trace],
        held_out: Sequence[Trace],
        schedule: Schedule,
        folder: Path,
        rotary: dict[int, Rotary | None] | None = None,
        fresh: bool = True,
        resume: bool = False,
        seed: int = 0,
        progress: Progress | None = None,
    ):
        if not train:
            raise ValueError("there are no traces to train on")
        self.scorer, self.train, self.held_out, self.fresh = scorer, list(train), list(held_out), fresh
        self.rotary = rotary or {}
        self.label: dict[int, tuple[Tensor, Tensor]] = {}  # of log alpha: mean and deviation [H]
        self.level: dict[int, Tensor] = {}  # mean alpha [H]
        self.per_trace: dict[str, list[float]] = {}
        module = torch.nn.ModuleDict({"scorer": scorer})
        super().__init__(
            module, [Group(list(scorer.parameters()), schedule.lr)], schedule, folder, resume, seed, progress
        )

    def run(self) -> dict[str, Interval]:
        """Fit to the end; returns the last held-out metrics with intervals over documents (none without such)."""
        self.measure()
        self.advance()
        if self.held_out and not self.per_trace:  # killed after the last step, and resumed
            self.evaluate()
        found = {}
        for name, values in self.per_trace.items():
            documents: dict[str, list[float]] = {}  # traces of one text at several budgets are not drawn apart
            for trace, value in zip(self.held_out, values, strict=True):
                documents.setdefault(trace.name, []).append(value)
            means = [sum(each) / len(each) for each in documents.values()]
            found[name] = bootstrap_ratio(means, [1.0] * len(means))
        return found

    def update(self) -> dict[str, float]:
        """One optimiser step; the loss is a mean over layers and evictions."""
        traces, total, rows = self.shuffled(self.train, self.schedule.batch, self.step), 0.0, 0
        chosen = [(trace, self.drawn(trace, place)) for place, trace in enumerate(traces)]
        alike: dict[tuple[int, int], list[tuple[Trace, Tensor]]] = {}  # equally many candidates, of which as many go
        for trace, evictions in chosen:
            alike.setdefault((trace.budget.slots, trace.budget.interval), []).append((trace, evictions))
        evictions = sum(len(each) for _, each in chosen)
        for shape in self.scorer.geometry:
            for group in alike.values():
                share = sum(len(each) for _, each in group) / (evictions * len(self.scorer.geometry))
                loss = self.loss(shape.index, group) * share
                loss.backward()
                total += float(loss.detach())
        rows = sum(len(each) * (trace.budget.rest + trace.budget.interval) for trace, each in chosen)
        return {"loss": total, **self.descend(), "tokens": rows}

    def drawn(self, trace: Trace, place: int) -> Tensor:
        """The evictions of trace number ``place`` that a step looks at."""
        seed = (self.seed * 7_919 + self.step) * self.schedule.batch + place
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(trace.evictions, generator=generator)[: self.schedule.evictions]

    def read(self, layer: int, chosen: Sequence[tuple[Trace, Tensor]]) -> tuple[Tensor, Tensor]:
        """Features ``[m, H, C, width]`` and alpha ``[m, H, C]`` of evictions of several traces."""
        kind = self.scorer.layer(layer)
        group = kind.shape.query_heads // kind.shape.kv_heads
        parts = [
            (trace.features(layer, group, kind.features, each, self.rotary.get(layer)), trace.alpha(layer, each))
            for trace, each in chosen
        ]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def loss(self, layer: int, chosen: Sequence[tuple[Trace, Tensor]]) -> Tensor:
        """Of one layer, over evictions with equally many candidates."""
        features, alpha = self.read(layer, chosen)
        keep, schedule = self.scorer.layer(layer).foreseen(features), self.schedule
        if schedule.loss == "regression":
            mean, std = self.label[layer]
            target = ((alpha + schedule.smallest).log() - mean[:, None]) / std[:, None]
            return smooth_l1_loss(keep, target)
        if schedule.loss == "tweedie":
            return losses.tweedie(keep, alpha / self.level[layer][:, None], schedule.power)
        count = chosen[0][0].budget.interval if schedule.pairs == "cross" else None
        drawn = torch.Generator().manual_seed(self.seed * 104_729 + self.step)
        return losses.ranking(keep, alpha, schedule.margin, schedule.pairs, count=count, generator=drawn)

    @torch.no_grad()
    def measure(self) -> None:
        """Mean and deviation of features and labels per head over the training traces, a layer at a time."""
        for shape in self.scorer.geometry:
            moments, labels = [], []
            for trace in self.train:
                features, alpha = self.read(shape.index, [(trace, spaced(trace))])
                flat = features.transpose(0, 1).flatten(1, 2).double()  # [H, rows, width]
                moments.append((flat.sum(1), flat.square().sum(1), flat.shape[1]))
                labels.append((alpha + self.schedule.smallest).log().transpose(0, 1).flatten(1))  # [H, rows]
            total, squares, count = (sum(part) for part in zip(*moments, strict=True))
            mean = total / count
            std = (squares / count - mean.square()).clamp(min=0).sqrt()
            if self.fresh and self.step == 0:
                self.scorer.layer(shape.index).standardise_inputs(mean.float(), std.float())
            label = torch.cat(labels, -1)
            spread = label.std(-1, correction=0)
            self.label[shape.index] = label.mean(-1), torch.where(spread > 0, spread, 1.0)
            self.level[shape.index] = label.exp().mean(-1)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """On held-out traces: loss, overlap of what goes with what the oracle drops, Kendall's tau, and by chance.

        Their means; what every trace has to say is kept in ``per_trace``.
        """
        self.per_trace = {}
        for trace in self.held_out:
            layers = [self._held_out(trace, shape.index) for shape in self.scorer.geometry]
            for name in layers[0]:
                self.per_trace.setdefault(name, []).append(sum(layer[name] for layer in layers) / len(layers))
        return {name: sum(values) / len(values) for name, values in self.per_trace.items()}

    def _held_out(self, trace: Trace, layer: int) -> dict[str, float]:
        chosen = [(trace, spaced(trace))]
        features, alpha = self.read(layer, chosen)
        keep, count = self.scorer.layer(layer).keep(features), trace.budget.interval
        return {
            "loss": float(self.loss(layer, chosen)),
            "overlap": float(overlap(keep, alpha, count)),
            "chance": count / alpha.shape[-1],
            "tau": float(kendall_tau(keep, alpha)),
        }

    def goal(self, metrics: dict[str, float]) -> float:
        return -metrics["overlap"]


def spaced(trace: Trace) -> Tensor:
    """At most ``LOOKED_AT`` evictions of a trace, the first and the last among them."""
    count = min(LOOKED_AT, trace.evictions)
    return torch.linspace(0, trace.evictions - 1, count).round().long()


def overlap(keep: Tensor, alpha: Tensor, count: int) -> Tensor:
    """Share of the ``count`` candidates of lowest keep score that are among those of lowest alpha; mean over rows.

    Args:
        keep, alpha: ``[..., C]``, candidates in the order of their positions: of equals the older goes.
    """
    goes, should = (scores.argsort(dim=-1, stable=True)[..., :count] for scores in (keep, alpha))
    marked = torch.zeros_like(keep, dtype=torch.bool).scatter(-1, should, True)
    return marked.gather(-1, goes).float().mean()


def kendall_tau(keep: Tensor, alpha: Tensor) -> Tensor:
    """Kendall's tau of scores ``[..., C]`` with alpha over the pairs whose alphas differ; mean over rows."""
    found = []
    for row, its in zip(keep.reshape(-1, keep.shape[-1]), alpha.reshape(-1, alpha.shape[-1]), strict=True):
        signs = (its[:, None] - its).sign()
        agreeing = (signs * (row[:, None] - row).sign()).sum()
        found.append(agreeing / signs.abs().sum().clamp(min=1))
    return torch.stack(found).mean()

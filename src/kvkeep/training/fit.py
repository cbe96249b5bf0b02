"""Fit a KVpop scorer to shards: one class for every loss, resumable (see :mod:`kvkeep.training.loop`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvkeep.budget import Budget
from kvkeep.evaluation.statistics import Interval, bootstrap_ratio
from kvkeep.lifetimes import chance_recall, recall, running_topk, static_priority
from kvkeep.scorers import Scorer
from kvkeep.training import losses
from kvkeep.training.decay import FittedDecay, LearnedDecay
from kvkeep.training.harvest import Shard
from kvkeep.training.loop import Group, Loop, Progress

LOSSES = ("intensity", "regression", "boundary")
DECAYS = ("fitted", "calibrated", "learned", "off")


@dataclass(frozen=True)
class Schedule:
    """How a scorer is fitted.

    Attributes:
        loss: "intensity" (likelihood of the attention by age, see :mod:`kvkeep.training.losses.intensity`),
            "regression" (smooth L1 on the standardised log target) or "boundary" (KVpop, section 3.3).
        steps, batch: optimiser steps, documents per step.
        tokens: of each document that a step looks at, drawn at random; None = all. For "intensity" only, and not for a
            scorer with a memory, which reads ``whole`` documents a step instead.
        whole: see there.
        lr, warmup, betas, weight_decay, clip: AdamW with a linear warm-up, then cosine to 0; clip = gradient norm.
        standardise: whether inputs are standardised per head and dimension on the training documents.
        boundary, margin, balance, tau, queries: of the boundary loss, see :func:`kvkeep.training.losses.boundary`.
        dispersion: of the intensity.
        decay: "fitted" (per head with the intensity, then a factor per budget by loss), "calibrated" (one number for
            all heads per budget, afterwards, by loss), "learned" (by gradient, with the boundary loss only) or "off".
        gamma: where a learned decay starts, per ``decay_step`` tokens.
        gamma_lr, fitted_lr: learning rates of a learned and of a fitted decay.
        evaluate_every, patience: held-out evaluation, and how many without improvement end the run (0 = never).
        save_every: steps between two saved states.
    """

    loss: str = "intensity"
    steps: int = 500
    batch: int = 8
    tokens: int | None = 128
    whole: int = 2
    lr: float = 3e-3
    warmup: int = 20
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 1e-4
    clip: float = 10.0
    standardise: bool = True
    boundary: str = "incumbent"
    margin: float | None = 1.0
    balance: tuple[float, float] | None = (0.5, 4.0)
    tau: float = 1.0
    queries: int | None = None
    dispersion: float = 5.0
    decay: str = "fitted"
    gamma: float = 0.99
    gamma_lr: float = 1e-3
    fitted_lr: float = 1e-2
    evaluate_every: int = 50
    patience: int = 0
    save_every: int = 50

    def __post_init__(self):
        if self.loss not in LOSSES or self.decay not in DECAYS:
            raise ValueError(
                f"loss is one of {', '.join(LOSSES)} and decay one of {', '.join(DECAYS)}, "
                f"not {self.loss!r} and {self.decay!r}"
            )
        needed = {"learned": "boundary", "fitted": "intensity"}.get(self.decay, self.loss)
        if self.loss != needed:
            raise ValueError(f"a {self.decay} decay comes from the {needed} loss; with {self.loss} calibrate it")
        if self.tokens is not None and (self.tokens < 1 or self.loss != "intensity"):
            raise ValueError(f"tokens are 1 or more and drawn for the intensity loss only, not {self.tokens}")
        if min(self.steps, self.batch, self.whole) < 1 or self.warmup < 0:
            raise ValueError(
                f"steps {self.steps}, batch {self.batch} and whole {self.whole} must be at least 1, "
                f"warmup {self.warmup} at least 0"
            )


class Fit(Loop):
    """A scorer being fitted. ``run`` does everything; the parts are methods so that tests can look at them.

    Args:
        scorer: fitted in place.
        train, held_out: shards; none of the latter means no held-out evaluation.
        schedule: how.
        folder: state and log live here.
        resume: go on from the state in ``folder`` if there is one.
        seed: of the shuffles.
        progress: called with ("fit", step, steps).
    """

    def __init__(
        self,
        scorer: Scorer,
        train: Sequence[Shard],
        held_out: Sequence[Shard],
        schedule: Schedule,
        folder: Path,
        resume: bool = False,
        seed: int = 0,
        progress: Progress | None = None,
    ):
        if not train:
            raise ValueError("there are no documents to train on")
        self.scorer, self.train, self.held_out = scorer, list(train), list(held_out)
        self.budgets: tuple[Budget, ...] = scorer.budgets
        self.pooled = schedule.tokens is not None and not scorer.stateful
        self.batch = schedule.batch if self.pooled or schedule.tokens is None else schedule.whole
        self.learned = LearnedDecay(scorer, schedule.gamma) if schedule.decay == "learned" else None
        self.fitted = FittedDecay(scorer) if schedule.loss == "intensity" else None
        module = torch.nn.ModuleDict({"scorer": scorer})
        groups = [Group(list(scorer.parameters()), schedule.lr)]
        decay, peak = (self.learned, schedule.gamma_lr) if self.fitted is None else (self.fitted, schedule.fitted_lr)
        if decay is not None:
            module["decay"] = decay
            groups.append(Group(list(decay.parameters()), peak))
        self.label, self.base = {}, {}
        self.per_document: dict[str, list[float]] = {}
        self.kept: dict[int, list[Tensor]] = {}  # layer -> keep rates [H] of held-out documents and budgets
        super().__init__(module, groups, schedule, folder, resume, seed, progress)

    def run(self) -> dict[str, Interval]:
        """Fit to the end; returns the last held-out metrics with intervals over documents (none without such)."""
        self.measure()
        self.advance()
        if self.held_out and not self.per_document:  # killed after the last step, and resumed
            self.evaluate()
        self.finish()
        return {name: bootstrap_ratio(each, [1.0] * len(each)) for name, each in self.per_document.items()}

    def update(self) -> dict[str, float]:
        """One optimiser step; losses are means over layers, documents and budgets."""
        shards, total = self.shuffled(self.train, self.batch, self.step), 0.0
        drawn = [self.drawn(shard, place) for place, shard in enumerate(shards)] if self.pooled else None
        for shape in self.scorer.geometry:
            for part in [shards] if self.pooled else [[shard] for shard in shards]:
                loss = self.loss(part, shape.index, drawn) * len(part) / (len(shards) * len(self.scorer.geometry))
                loss.backward()
                total += float(loss.detach())
        tokens = sum(map(len, drawn)) if self.pooled else sum(shard.length for shard in shards)
        record = {"loss": total, **self.descend()}
        if self.learned is not None:
            self.learned.clamp()
            gammas = torch.cat([self.learned.log_gamma(shape.index) for shape in self.scorer.geometry]).detach().exp()
            record |= {"gamma_mean": float(gammas.mean()), "gamma_min": float(gammas.min())}
        if self.fitted is not None:
            self.fitted.clamp()
            rates = torch.cat(list(self.fitted.rate.values())).detach()
            record |= {"decay_mean": float(rates.mean()), "decay_max": float(rates.max())}
        return record | {"tokens": tokens}

    def drawn(self, shard: Shard, place: int) -> Tensor:
        """Indices of the tokens that a step looks at in its document number ``place``."""
        first, last = self.budgets[0].sinks, shard.length - self.budgets[0].window
        seed = (self.seed * 7_919 + self.step) * self.batch + place
        generator = torch.Generator().manual_seed(seed)
        return first + torch.randperm(last - first, generator=generator)[: self.schedule.tokens]

    def loss(self, shards: Sequence[Shard], layer: int, drawn: Sequence[Tensor] | None = None) -> Tensor:
        """The loss of one layer, over all tokens of one document or over those drawn from several."""
        schedule, window = self.schedule, self.budgets[0].window
        if schedule.loss == "intensity":
            return self.intensity(shards, layer, drawn)
        (shard,) = shards
        keys, values, target = shard.layer(layer)
        score = self.scorer(layer, keys, values, window)
        if schedule.loss == "regression":
            mean, std = self.label[layer]
            return losses.regression(score, target, self.budgets[0], mean, std)
        return self.boundary(score, target, layer)

    def boundary(self, score: Tensor, target: Tensor, layer: int) -> Tensor:
        """Averaged over the budgets."""
        schedule = self.schedule
        log_gamma = 0.0 if self.learned is None else self.learned.log_gamma(layer)
        generator = torch.Generator().manual_seed(self.seed * 7_919 + self.step)
        each = [
            losses.boundary(
                score,
                target,
                budget,
                log_gamma,
                self.scorer.decay_step,
                schedule.tau,
                schedule.boundary,
                schedule.margin,
                schedule.balance,
                schedule.queries,
                generator=generator,
            )
            for budget in self.budgets
            if score.shape[2] > budget.rest
        ]
        return sum(each) / len(each)

    def intensity(self, shards: Sequence[Shard], layer: int, drawn: Sequence[Tensor] | None) -> Tensor:
        """Of the tokens drawn, or of all that ever compete; without a memory no others are looked at."""
        window = self.budgets[0].window
        if drawn is None:
            drawn = [torch.arange(self.budgets[0].sinks, shard.length - window) for shard in shards]
        chosen = list(zip(shards, drawn, strict=True))
        if self.scorer.stateful:
            scores = [self.scorer(layer, *shard.layer(layer)[:2], window)[..., tokens] for shard, tokens in chosen]
            score = torch.cat(scores, -1)
        else:
            pairs = zip(*(shard.layer(layer, tokens)[:2] for shard, tokens in chosen), strict=True)
            pair = tuple(torch.cat(each, 2) for each in pairs)
            score = self.scorer.score(layer, pair, pair, {})
        received = [shard.received(layer, window, tokens) for shard, tokens in chosen]
        ranges = max(mass.shape[-1] for mass, _, _ in received)  # of the longest: the others have none there
        mass, first, last = (
            torch.cat([pad(each, (0, ranges - each.shape[-1])) for each in parts], -2)
            for parts in zip(*received, strict=True)
        )
        decay, step = self.fitted.rate[str(layer)], self.scorer.decay_step
        return losses.intensity(score, decay, mass, first, last, self.base[layer], step, self.schedule.dispersion)

    @torch.no_grad()
    def measure(self) -> None:
        """Statistics of inputs and labels over the training shards, a layer at a time."""
        budget = self.budgets[0]
        for shape in self.scorer.geometry:
            if self.fitted is not None:
                self.base[shape.index] = self.mean_attention(shape.index)
            parts = [shard.layer(shape.index) for shard in self.train]
            target = [part[2][..., budget.sinks : part[2].shape[-1] - budget.window] for part in parts]
            target = torch.cat(target, -1)[0]  # [H, tokens]
            std = target.std(-1, correction=0)
            self.label[shape.index] = target.mean(-1), torch.where(std > 0, std, 1.0)
            if self.schedule.standardise and self.step == 0:
                inputs = torch.cat([torch.cat(part[:2], -1)[0] for part in parts], 1)  # [H, tokens, 2D]
                self.scorer.layer(shape.index).standardise_inputs(inputs.mean(1), inputs.std(1, correction=0))

    def mean_attention(self, layer: int) -> Tensor:
        """Mean attention ``[H]`` per query and token after the window, over the training shards."""
        budget, received, queries = self.budgets[0], 0.0, 0
        for shard in self.train:
            left = shard.length - budget.window - budget.sinks  # tokens that leave; the oldest sees as many queries
            tokens = torch.arange(budget.sinks, shard.length - budget.window)
            received = received + shard.received(layer, budget.window, tokens)[0][0].sum((1, 2))
            queries += left * (left + 1) // 2
        return (received / max(queries, 1)).clamp(min=torch.finfo(torch.float32).tiny)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and recall against the undecayed teacher on the held-out shards, beside recall by chance.

        Their means; what every document has to say is kept in ``per_document``, what every head does in ``kept``.
        """
        self.per_document, self.kept = {}, {}
        for shard in self.held_out:
            layers = [self._held_out(shard, shape.index) for shape in self.scorer.geometry]
            for name in layers[0]:
                mean = sum(layer[name] for layer in layers) / len(layers)
                self.per_document.setdefault(name, []).append(mean)
        return {name: sum(values) / len(values) for name, values in self.per_document.items()}

    def _held_out(self, shard: Shard, layer: int) -> dict[str, float]:
        measured = {"loss": float(self.loss([shard], layer))}
        budgets = [budget for budget in self.budgets if shard.length > budget.rest]
        if budgets:
            keys, values, target = shard.layer(layer)
            score = self.scorer(layer, keys, values, self.budgets[0].window).float()
            found = [float(recall(target, score, budget).mean()) for budget in budgets]
            by_chance = [chance_recall(shard.length, budget) for budget in budgets]
            measured |= {"recall": sum(found) / len(found), "chance": sum(by_chance) / len(by_chance)}
            priority = static_priority(score, self.log_gamma(layer), self.scorer.decay_step)
            self.kept.setdefault(layer, []).extend(admitted(priority, budget)[0] for budget in budgets)
        return measured

    def log_gamma(self, layer: int) -> Tensor:
        """The decay per step as it is learned or fitted so far, ``[H]``, in units of the raw score; 0 where none is."""
        if self.learned is not None:
            return self.learned.log_gamma(layer)
        if self.schedule.decay == "fitted":
            return -self.fitted.rate[str(layer)]
        return torch.zeros(self.scorer.layer(layer).shape.kv_heads)

    def noted(self) -> dict[str, Any]:
        """Of every layer and head: how many tokens stay when they leave the window, and the decay."""
        rates = [torch.stack(each).mean(0).tolist() for _, each in sorted(self.kept.items())]
        gammas = [self.log_gamma(shape.index).exp().tolist() for shape in self.scorer.geometry]
        return {"keep_rate": rates, "gamma": gammas}

    @torch.no_grad()
    def finish(self) -> None:
        """Standardise the scores, so that one unit of decay means the same in every head, and keep a learned decay."""
        window, sinks = self.budgets[0].window, self.budgets[0].sinks
        for shape in self.scorer.geometry:
            layer = self.scorer.layer(shape.index)
            scores = []
            for shard in self.train:
                keys, values, _ = shard.layer(shape.index)
                score = self.scorer(shape.index, keys, values, window)[0]  # [H, S], raw: not standardised before
                scores.append(score[:, sinks : score.shape[-1] - window])
            scores = torch.cat(scores, -1)
            layer.standardise_scores(scores.mean(-1), scores.std(-1, correction=0))
            if self.learned is not None:
                layer.log_gamma.copy_(self.learned.log_gamma(shape.index) / layer.score_std)
            if self.schedule.decay == "fitted":
                layer.log_gamma.copy_(-self.fitted.rate[str(shape.index)] / layer.score_std)


def admitted(priority: Tensor, budget: Budget) -> Tensor:
    """Keep rate: the share of tokens that are not evicted when they leave the window, once the cache is full.

    A rate near 1 means that only age decides, near 0 that nothing new is let in.

    Args:
        priority: ``[B, H, S]``, static.

    Returns:
        ``[B, H]``.
    """
    leaving = torch.arange(budget.rest - budget.window, priority.shape[-1] - budget.window, device=priority.device)
    evicted_at = running_topk(priority, budget)[..., leaving]
    return (evicted_at > leaving + budget.window).float().mean(-1)

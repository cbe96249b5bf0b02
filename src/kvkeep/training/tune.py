"""Tune a backbone under a policy's mask, by distillation from its own dense self (KVpop, arXiv 2607.05061).

The student reads a row of tokens under the policy, whose lifetimes are decided anew in every step, and learns to
predict what the same checkpoint predicts with the full cache: ``KL(teacher || student)`` on the teacher's top 256.
With ``streaming`` and no scorer this is the paper's trained fixed-pattern baseline, StreamLLM+.

Two gradients never meet: the KL reaches only the backbone, since decisions are discrete; a score loss, where the scorer
learns along (``train_scorer``), is taken on the student's own queries and keys, detached, and reaches only the scorer.
Each part is clipped by itself, so that neither changes the other's step.

Resumable to the last digit: see :mod:`kvkeep.training.fit`, whose order of documents this shares.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep import policies
from kvkeep.budget import Budget
from kvkeep.policies.base import Policy
from kvkeep.runtime.replay import by_blocks, hidden_states, kvkeep_attention
from kvkeep.scorers import Scorer, model_fingerprint
from kvkeep.training import losses
from kvkeep.training.corpus import data_fingerprint
from kvkeep.training.rows import Row, pack_rows
from kvkeep.training.score_loss import ScoreLoss, keep_rate
from kvkeep.training.state import Log, jsonable, load_state, open_run, save_state
from kvkeep.training.student import (
    FullStudent,
    LoraStudent,
    checkpointed_layers,
    learned_state,
    save_scorer,
    save_whole,
)
from kvkeep.training.teacher import Prediction, computing, predictions
from kvkeep.training.tune_settings import LEARNING_RATE, Settings


def tune(
    model: PreTrainedModel,
    policy_name: str,
    documents: Sequence[tuple[object, Tensor]],
    budgets: Sequence[Budget | int],
    out: str | Path,
    settings: Settings | None = None,
    scorer: Scorer | None = None,
    seed: int = 0,
    resume: bool = False,
    base_model: str | None = None,
    tokenizer: Any = None,
    command: str | None = None,
    shards: str | Path | None = None,
    half: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Tune a backbone under a policy and save it in ``out``.

    Args:
        model: the backbone, untuned, in evaluation mode. With "lora" it is afterwards what it was, to the bit; with
            "full" it holds the tuned weights. Load the result with :func:`kvkeep.runtime.models.load`.
        policy_name: an entry policy: "streaming", "random", "kvpop_mlp", "kvpop".
        documents: pairs of a document (``.name``) and its ids ``[S]``.
        budgets: slots or budgets, taken in turn, one a step.
        out: gets the adapters or the model, ``tune.json``, and the scorer in ``out/scorer``; ``out/run`` holds the
            log, the state and the teacher's predictions while it is made.
        settings: None = the defaults.
        scorer: of a learned policy, trained; it learns on, in place, with ``train_scorer``.
        seed: of the order and of new adapters.
        resume: go on where an earlier run in ``out`` was stopped; without it an unfinished run is refused.
        base_model: recorded as the model's name, which an adapter needs to be loaded; None takes the config's.
        tokenizer: saved beside a full model.
        command: recorded.
        shards: where the teacher's predictions live; several runs may share them. None = ``out/run/shards``.
        half: store the scorer's weight matrices in float16.
        progress: called with (stage, done, total).

    Returns:
        What ``tune.json`` records: settings, budgets, ``state_entries`` (what the scorer's memory costs beside each of
        them, in tokens), fingerprints and metrics (``held_out_kl_before`` and ``held_out_kl``, in nats per token).

    Raises:
        ValueError: for what :func:`prepare` refuses, or an ``out`` that holds another run.
    """
    settings = Settings() if settings is None else settings
    plan, rows = prepare(model, policy_name, documents, budgets, settings, scorer)
    record = _record(model, plan, settings, seed, documents, scorer, base_model)
    out = Path(out)
    run = open_run(out, record, resume)
    texts = [piece for row in rows for piece in row.pieces]
    folder = run / "shards" if shards is None else Path(shards)
    teacher = iter(predictions(model, texts, folder, settings.top, settings.compute, progress))
    lessons = [[(piece, next(teacher)) for piece in row.pieces] for row in rows]
    student = _student(model, settings, seed)
    try:
        record["metrics"] = Tuning(student, plan, lessons, settings, run, scorer, resume, seed, progress).run()
        record |= {"command": command, "tuned_fingerprint": model_fingerprint(student.weights())}
        record["state_entries"] = 0 if scorer is None else scorer.state_entries
        record["library_version"] = sys.modules[__name__.partition(".")[0]].__version__
        if scorer is not None:
            save_scorer(scorer, out / "scorer", record, half)
        save_whole(student, out, record["base_model"], tokenizer, json.dumps(record, indent=1))
    finally:
        student.release()
    return record


def prepare(
    model: PreTrainedModel,
    policy_name: str,
    documents: Sequence[tuple[object, Tensor]],
    budgets: Sequence[Budget | int],
    settings: Settings,
    scorer: Scorer | None = None,
) -> tuple[list[Policy], list[Row]]:
    """The policies and the rows of a run; see :func:`tune`. Changes and writes nothing.

    Raises:
        ValueError: for a policy that cannot be tuned under, a scorer that is missing, of another method or for another
            model, targets that match nothing, a missing peft, or rows that are too few or no longer than a budget.
    """
    plan = tunable(policy_name, budgets, scorer)
    if scorer is not None:
        scorer.require_fits(model.config, model_fingerprint(model))
    elif settings.train_scorer:
        raise ValueError(f"policy {policy_name!r} has no scorer that could learn along")
    rows = pack_rows(documents, settings.packing, settings.length)
    _require_long_enough(rows, plan)
    with checkpointed_layers(model, settings.checkpointing):
        pass
    _student(model, settings, 0).release()
    return plan, rows


def _student(model: PreTrainedModel, settings: Settings, seed: int) -> FullStudent:
    if settings.backbone == "full":
        return FullStudent(model)
    return LoraStudent(model, settings.rank, settings.alpha, settings.targets, seed)


def _record(model, plan: Sequence[Policy], settings: Settings, seed: int, documents, scorer, base_model):
    """Everything that decides the result of a run."""
    return jsonable(
        {
            "policy": plan[0].name,
            "settings": asdict(settings),
            "budgets": [asdict(policy.budget) for policy in plan],
            "seed": seed,
            "base_model": base_model or model.config.name_or_path,
            "base_fingerprint": model_fingerprint(model),
            "data": data_fingerprint(documents),
            "scorer": None if scorer is None else scorer.fingerprint(),
        }
    )


def tunable(name: str, budgets: Sequence[Budget | int], scorer: Scorer | None = None) -> list[Policy]:
    """The policies, one a budget, of a run.

    Raises:
        ValueError: for a policy that has no gradients, sees the future or evicts nothing, no budget, or a scorer that
            is missing or of another method.
    """
    method = policies.describe(name)
    if method.oracle:
        raise ValueError(f"policy {name!r} is an oracle: a backbone tuned under it could never be run that way")
    if method.kind != "entry":
        why = "evicts nothing" if method.kind == "full" else "writes its slots in place and has no gradients"
        raise ValueError(f"policy {name!r} {why}; a backbone is tuned under streaming, random, kvpop_mlp or kvpop")
    if not budgets:
        raise ValueError("tuning takes one budget or more")
    return [policies.create(name, budget, scorer=scorer) for budget in budgets]


def _require_long_enough(rows: Sequence[Row], plan: Sequence[Policy]) -> None:
    if len(rows) < 2:
        raise ValueError(f"tuning takes two rows of tokens or more, one to be held out, not {len(rows)}")
    longest = max(piece.numel() for row in rows for piece in row.pieces)
    largest = max(policy.budget.rest for policy in plan)
    if longest <= largest:
        raise ValueError(f"no text is longer than the budget of {largest} tokens (the longest has {longest})")


Lesson = list[tuple[Tensor, Prediction]]
"""A row: its pieces ``[n]`` and the teacher's predictions of each."""


class Tuning:
    """A backbone being tuned. ``run`` does everything; the parts are methods so that tests can look at them.

    Args:
        student: whose weights learn.
        plan: policies, taken in turn.
        lessons: rows, some of which are held out, evenly spread.
        settings: how.
        folder: state and log live here.
        scorer: learns along if the settings say so.
        resume: go on from the state in ``folder`` if there is one.
        seed: of the shuffles.
        progress: called with ("tune", step, steps) and ("held-out", done, total).
    """

    def __init__(
        self,
        student: FullStudent,
        plan: Sequence[Policy],
        lessons: Sequence[Lesson],
        settings: Settings,
        folder: Path,
        scorer: Scorer | None = None,
        resume: bool = False,
        seed: int = 0,
        progress: Callable[[str, int, int], None] | None = None,
    ):
        self.student, self.model, self.plan, self.settings = student, student.model, list(plan), settings
        count = min(max(round(settings.held_out * len(lessons)), 1), len(lessons) - 1) if settings.held_out else 0
        held = {(2 * i + 1) * len(lessons) // (2 * count) for i in range(count)}
        self.train = [lesson for i, lesson in enumerate(lessons) if i not in held]
        self.held_out = [lessons[i] for i in sorted(held)][: settings.evaluate_on]
        self.scorer = scorer if settings.train_scorer else None
        self.state_entries = 0 if scorer is None else scorer.state_entries
        self.seed, self.progress, self.path = seed, progress, folder / "state.safetensors"
        lr = LEARNING_RATE[settings.backbone] if settings.lr is None else settings.lr
        self.groups = {"backbone": (student.parameters, lr)}
        if self.scorer is not None:
            self.scorer.to(self.model.device).requires_grad_(True)
            self.groups["scorer"] = (list(self.scorer.parameters()), settings.scorer_lr)
        groups = [{"params": parameters, "lr": lr} for parameters, lr in self.groups.values()]
        self.optimizer = torch.optim.AdamW(groups, betas=settings.betas, weight_decay=settings.weight_decay)
        self.state = learned_state(student, self.scorer)
        self.step, self.before = 0, None
        if resume and self.path.exists():
            saved = load_state(self.path, self.state, self.optimizer)
            self.step, self.before = saved["step"], saved["before"]
        self.log = Log(folder / "log.jsonl", self.step)

    def run(self) -> dict[str, float]:
        """Tune to the end; returns the held-out KL before and after (empty without held-out rows)."""
        settings = self.settings
        while self.step < settings.steps:
            record: dict[str, Any] = {"step": self.step}
            if self.held_out and self.step % settings.evaluate_every == 0:
                record["held_out_kl"] = self.evaluate()
                self.before = record["held_out_kl"] if self.step == 0 else self.before
            started = time.perf_counter()
            record |= self.update()
            record["tokens_per_second"] = round(record["tokens"] / (time.perf_counter() - started), 1)
            self.log.write(record)
            self.step += 1
            if self.step == settings.steps or self.step % settings.save_every == 0:
                save_state(self.path, self.state, self.optimizer, {"step": self.step, "before": self.before})
            if self.progress is not None:
                self.progress("tune", self.step, settings.steps)
        if not self.held_out:
            return {}
        metrics = {"held_out_kl_before": self.before, "held_out_kl": self.evaluate()}
        self.log.write({"step": self.step, **metrics})
        return metrics

    def lesson(self, step: int) -> Lesson:
        """The row of a step: a fresh seeded shuffle every epoch."""
        epoch, place = divmod(step, len(self.train))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return self.train[int(torch.randperm(len(self.train), generator=generator)[place])]

    def rate(self, group: str, step: int) -> float:
        """Share of the peak learning rate: linear warm-up, then constant or cosine to 0."""
        settings = self.settings
        warmup = settings.warmup if group == "backbone" else settings.scorer_warmup
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if group == "backbone" and settings.schedule == "constant":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(settings.steps - warmup, 1)))

    def update(self) -> dict[str, Any]:
        """One optimiser step on one row; the KL is the mean over its positions."""
        lesson, policy = self.lesson(self.step), self.plan[self.step % len(self.plan)]
        self.optimizer.zero_grad(set_to_none=True)
        record: dict[str, Any] = self.gradients(lesson, policy)
        for (name, (parameters, peak)), group in zip(self.groups.items(), self.optimizer.param_groups, strict=True):
            group["lr"] = peak * self.rate(name, self.step)
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings.clip)
            if not bool(torch.isfinite(norm)):
                raise ValueError(f"the gradient of the {name} is not finite at step {self.step}")
            record |= {f"{name}_gradient_norm": float(norm), f"{name}_lr": group["lr"]}
        self.optimizer.step()
        return record

    def gradients(self, lesson: Lesson, policy: Policy) -> dict[str, Any]:
        """Add the gradients of a row to the weights that learn; returns what the log says of it."""
        tokens = sum(piece.numel() for piece, _ in lesson)
        total, scored = 0.0, []
        kept: dict[int, list[Tensor]] = {}  # layer -> keep rates of its heads, one [H] a piece
        watch = None
        if self.scorer is not None:
            watch = ScoreLoss(self.scorer, policy.budget, scored, self.settings.score_loss, self.settings.target_source)
        for piece, prediction in lesson:
            with kvkeep_attention(self.model), checkpointed_layers(self.model, self.settings.checkpointing):
                kl, lifetimes = self.divergence(piece, prediction, policy, watch)
                (kl / tokens).backward()
            total += float(kl.detach()) / tokens
            for layer, evicted_at in enumerate(lifetimes):
                rate = None if evicted_at is None else keep_rate(evicted_at, policy.budget)
                if rate is not None:
                    kept.setdefault(layer, []).append(rate)
        record = {"kl": total, "tokens": tokens, "budget": policy.budget.rest + self.state_entries}
        if kept:
            record["keep_rate"] = told(kept)
        if scored:
            record["score_loss"] = sum(scored) / len(scored)
        if self.scorer is not None:
            record["gamma"] = {
                shape.index: self.gamma(shape.index, policy.budget.rest) for shape in self.scorer.geometry
            }
        return record

    def gamma(self, layer: int, rest: int) -> float:
        """What a score of the layer keeps of its lead per decay step, mean over the heads, where ``rest`` are held."""
        log_gamma = self.scorer.layer(layer).log_gamma * self.scorer.decay_factor(rest)
        return round(float(log_gamma.exp().mean()), 4)

    def divergence(self, piece: Tensor, prediction: Prediction, policy: Policy, watch=None) -> tuple[Tensor, list]:
        """Sum over the positions of ``KL(teacher || student)`` of one text ``[n]``, and the lifetimes it had."""
        ids, teacher = piece.reshape(1, -1).to(self.model.device), prediction.load(self.model.device)
        training = torch.is_grad_enabled()

        def measure(logits: Tensor, start: int) -> Tensor:
            part = losses.TopLogits(*(column[:, start : start + logits.shape[1]] for column in teacher))
            return losses.distillation(logits, part, self.settings.kl, reduction="sum")

        with computing(self.model, self.settings.compute):
            hidden, lifetimes = hidden_states(self.model, ids, policy, gradients=training, observe=watch)
            return torch.stack(by_blocks(self.model, hidden, measure)).sum(), lifetimes

    @torch.no_grad()
    def evaluate(self) -> float:
        """KL in nats per token over the held-out rows and all budgets."""
        pieces = [pair for lesson in self.held_out for pair in lesson]
        total = 0.0
        for done, pair in enumerate(pieces):
            if self.progress is not None:
                self.progress("held-out", done, len(pieces))
            total += sum(float(self.divergence(*pair, policy)[0]) for policy in self.plan)
        return total / (len(self.plan) * sum(piece.numel() for piece, _ in pieces))


def told(kept: dict[int, list[Tensor]]) -> dict[str, Any]:
    """What the log says of keep rates ``[H]`` per layer and piece: over all, and of every head of every layer."""
    rates = torch.cat([rate for each in kept.values() for rate in each])
    low, mean, high = (round(float(value), 4) for value in (rates.min(), rates.mean(), rates.max()))
    heads = {layer: [round(rate, 4) for rate in torch.stack(each).mean(0).tolist()] for layer, each in kept.items()}
    return {"mean": mean, "lowest_head": low, "highest_head": high, "layers": heads}

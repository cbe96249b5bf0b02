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

import copy
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
from kvkeep.training.harvest import TARGET_SOURCES
from kvkeep.training.rows import Row, pack_rows
from kvkeep.training.score_loss import SCORE_LOSSES, ScoreLoss, keep_rate
from kvkeep.training.state import Log, jsonable, load_state, open_run, save_state
from kvkeep.training.student import TARGETS, FullStudent, LoraStudent, checkpointed_layers, learned_state, save_whole
from kvkeep.training.teacher import COMPUTE, Prediction, computing, predictions

LEARNING_RATE = {"lora": 1e-3, "full": 8e-5}  # full: the paper's


@dataclass(frozen=True)
class Settings:
    """How a backbone is tuned; JSON-friendly, recorded in ``tune.json``.

    Attributes:
        backbone: "lora" (peft adapters) or "full" (all weights, as the paper does).
        rank, alpha, targets: of the adapters, see :class:`~kvkeep.training.student.LoraStudent`.
        steps: optimiser steps of one row each.
        lr: None = 1e-3 for "lora", 8e-5 for "full".
        schedule, warmup: "constant" (the paper) or "cosine" to 0, after a linear warm-up.
        betas, weight_decay, clip: of AdamW; clip = gradient norm.
        kl, top: "tail" or "renorm" (the paper) over so many tokens, see :func:`kvkeep.training.losses.distillation`.
        packing, length: of rows, see :func:`kvkeep.training.rows.pack_rows`.
        checkpointing: whether decoder layers are computed again in backward, under the same lifetimes.
        compute: "own" or "bfloat16", for matrix products; scores, labels and losses stay float32.
        train_scorer: whether the scorer learns along; its decay stays.
        score_loss: "boundary" (the paper) or "regression".
        target_source: of its labels, "sparse" (the student's own normaliser, the paper) or "dense".
        scorer_lr, scorer_warmup: of the scorer, which warms up and then follows a cosine to 0.
        held_out, evaluate_on: share of the rows that is held out, and how many of them at most.
        evaluate_every, save_every: steps between two held-out evaluations, and two saved states.
    """

    backbone: str = "lora"
    rank: int = 16
    alpha: float | None = None
    targets: tuple[str, ...] = TARGETS
    steps: int = 100
    lr: float | None = None
    schedule: str = "constant"
    warmup: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 1e-4
    clip: float = 1.0
    kl: str = "tail"
    top: int = 256
    packing: str = "cut"
    length: int | None = None
    checkpointing: bool = False
    compute: str = "own"
    train_scorer: bool = False
    score_loss: str = "boundary"
    target_source: str = "sparse"
    scorer_lr: float = 1e-3
    scorer_warmup: int = 10
    held_out: float = 0.1
    evaluate_on: int = 4
    evaluate_every: int = 25
    save_every: int = 25

    def __post_init__(self):
        choices = {
            "backbone": tuple(LEARNING_RATE),
            "schedule": ("constant", "cosine"),
            "kl": ("tail", "renorm"),
            "compute": tuple(COMPUTE),
            "score_loss": SCORE_LOSSES,
            "target_source": TARGET_SOURCES,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}, not {getattr(self, name)!r}")
        low = [name for name in ("steps", "rank", "top", "evaluate_every", "save_every") if getattr(self, name) < 1]
        if low:
            raise ValueError(f"{low[0]} must be at least 1, not {getattr(self, low[0])}")


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
        progress: called with (stage, done, total).

    Returns:
        What ``tune.json`` records: settings, budgets, fingerprints and metrics (``held_out_kl_before`` and
        ``held_out_kl``, in nats per token).

    Raises:
        ValueError: for a policy that cannot be tuned under, a missing scorer or peft, rows that are too few or no
            longer than a budget, or an ``out`` that holds another run.
    """
    settings = Settings() if settings is None else settings
    plan = tunable(policy_name, budgets, scorer)
    for policy in plan:
        policy.require_fits(model.config)
    if settings.train_scorer and scorer is None:
        raise ValueError(f"policy {policy_name!r} has no scorer that could learn along")
    rows = pack_rows(documents, settings.packing, settings.length)
    _require_long_enough(rows, plan)
    _student(model, settings, seed).release()  # complains about names and a missing peft before anything is written
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
        record["library_version"] = sys.modules[__name__.partition(".")[0]].__version__
        if scorer is not None:
            _save_scorer(scorer, out / "scorer", record)
        save_whole(student, out, record["base_model"], tokenizer, json.dumps(record, indent=1))
    finally:
        student.release()
    return record


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


def _save_scorer(scorer: Scorer, folder: Path, record: dict[str, Any]) -> None:
    """The scorer beside the backbone it is now for."""
    copy.deepcopy(scorer).save_pretrained(
        folder,
        base_fingerprint=record["tuned_fingerprint"],
        league=f"tuned backbone ({record['settings']['backbone']})",
        tuned={name: record[name] for name in ("base_model", "base_fingerprint", "settings", "seed", "metrics")},
    )


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
        total, kept, scored = 0.0, [], []
        watch = None
        if self.scorer is not None:
            watch = ScoreLoss(self.scorer, policy.budget, scored, self.settings.score_loss, self.settings.target_source)
        for piece, prediction in lesson:
            with kvkeep_attention(self.model), checkpointed_layers(self.model, self.settings.checkpointing):
                kl, lifetimes = self.divergence(piece, prediction, policy, watch)
                (kl / tokens).backward()
            total += float(kl.detach()) / tokens
            kept += [keep_rate(layer, policy.budget) for layer in lifetimes if layer is not None]
        record = {"kl": total, "tokens": tokens, "budget": policy.budget.rest}
        rates = torch.cat([rate for rate in kept if rate is not None] or [torch.zeros(0)])
        if rates.numel():
            low, mean, high = (round(float(value), 4) for value in (rates.min(), rates.mean(), rates.max()))
            record["keep_rate"] = {"mean": mean, "lowest_head": low, "highest_head": high}
        if scored:
            record["score_loss"] = sum(scored) / len(scored)
        return record

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

"""How a backbone is tuned: see :mod:`kvkeep.training.tune`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvkeep.training.harvest import TARGET_SOURCES
from kvkeep.training.score_loss import SCORE_LOSSES
from kvkeep.training.student import TARGETS
from kvkeep.training.teacher import COMPUTE

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
        for name, rate in (("lr", self.lr), ("scorer_lr", self.scorer_lr)):
            if rate is not None and not (math.isfinite(rate) and rate > 0):
                raise ValueError(f"{name} must be a finite number above 0, not {rate}")
        if self.backbone == "lora" and not self.targets:
            raise ValueError(f"targets must name at least one linear layer, like {TARGETS[0]}")

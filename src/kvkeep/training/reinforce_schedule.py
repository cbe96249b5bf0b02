"""How a scorer is reinforced: see :mod:`kvkeep.training.reinforce`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from kvkeep.training import losses

CHOICES = {
    "rollout": ("trace", "generate"),
    "ratio": ("decision_mean", "decision", "draw"),
    "logprob": ("plackett_luce", "independent"),
    "kl": ("exact", "k3"),
    "variant": ("spike", "low_large", "low", "high", "all"),
    "reduction": ("mean_low", "sum"),
    "credit": ("trajectory", "to_go"),
}
RANGES = (
    ("steps batch epochs decisions rows compare_on evaluate_every save_every", lambda value: value >= 1, "at least 1"),
    ("warmup patience eta beta weight_decay", lambda value: value >= 0, "at least 0"),
    ("lr clip ratio_clip temperature", lambda value: value > 0, "above 0"),
    ("low", lambda value: 0 < value <= 1, "in (0, 1]"),
)


@dataclass(frozen=True)
class Schedule:
    """How a scorer is reinforced; the paper's numbers unless another is named.

    Attributes:
        steps: rollout batches.
        batch: traces per step (the paper's is 32).
        group: trajectories per trace.
        epochs: optimiser steps per rollout batch. With 1 every ratio is 1 and no clip acts; with more, the decisions
            of a whole batch are held in memory, otherwise those of one group.
        rollout: "trace" = along the trace; "generate" = beyond the paper, along a text that the model writes from the
            trace's first ``slots`` tokens to its length, under the evictions of the group's first member.
        temperature: of that writing.
        decisions: evictions of a trajectory that are learned from, drawn at random; None = all.
        rows: trajectories that the model runs at a time; None = the group.
        pool: the draw is among this many times what goes; None = all candidates.
        logprob: "plackett_luce" = of the ordered draw from its pool; "independent" = the released code's, of each that
            went on its own, among all candidates.
        ratio: of new to old probability, one for every: "decision_mean" = decision, to the power of 1 / L, so that the
            clip means the same for every L; "decision"; "draw" = each of the L.
        ratio_clip: how far a ratio may leave 1 with profit.
        kl: to the scorer it began as, on the scale of the ratio (mean over draws; their sum for "decision"): "exact",
            of what each draw was among; "k3" = estimated from what was drawn.
        beta, beta_schedule: weight of the KL, "constant", or 0 from this step on (the released code's is 100).
        variant, eta, low, reduction: of the reward, see :func:`kvkeep.training.losses.spike_reward`.
        credit: of an eviction: "trajectory" = the reward of its whole trajectory, the paper's; "to_go" = what is still
            to come of it, see :func:`kvkeep.training.losses.rewards_to_go`.
        compare_on: traces trained on that are compared at the end, the first ones; None = all, twice a group of draws
            each.
        lr, warmup, betas, weight_decay, clip, evaluate_every, patience, save_every: see
            :class:`kvkeep.training.loop.Timing`; an early stop watches the held-out reward.

    Raises:
        ValueError: for a value outside these.
    """

    steps: int = 200
    batch: int = 4
    group: int = 8
    epochs: int = 1
    rollout: str = "trace"
    temperature: float = 1.0
    decisions: int | None = None
    rows: int | None = None
    pool: int | None = 2
    logprob: str = "plackett_luce"
    ratio: str = "decision_mean"
    ratio_clip: float = 0.2
    kl: str = "exact"
    beta: float = 0.01
    beta_schedule: str | int = "constant"
    variant: str = "spike"
    eta: float = 1.5
    low: float = 0.8
    reduction: str = "mean_low"
    credit: str = "trajectory"
    compare_on: int | None = None
    lr: float = 3e-4
    warmup: int = 10
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip: float = 1.0
    evaluate_every: int = 20
    patience: int = 0
    save_every: int = 10

    def __post_init__(self) -> None:
        if self.group < 2:
            raise ValueError(
                f"a group of {self.group} has nothing to be compared with, so every advantage is 0: group is 2 or more"
            )
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        for names, fits, bound in RANGES:
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not (fits(value) and math.isfinite(value)):
                    raise ValueError(f"{name} must be {bound}, not {value}")
        if self.pool is not None and self.pool < 2:
            raise ValueError(f"a pool of {self.pool} times what goes leaves no choice: pool is 2 or more, or None")
        until = self.beta_schedule
        if until != "constant" and not (isinstance(until, int) and until >= 0):
            raise ValueError(f'beta_schedule is "constant" or the step from which beta is 0, not {until!r}')
        if self.logprob == "independent" and self.kl == "exact":
            raise ValueError('independent draws are no distribution over what goes, so their kl is "k3", not "exact"')

    def beta_at(self, step: int) -> float:
        """Weight of the KL at a step, counted from 0."""
        return self.beta if self.beta_schedule == "constant" or step < self.beta_schedule else 0.0

    def scaled(self, draws: Tensor) -> Tensor:
        """What the L draws of a decision say ``[..., L]``, on the scale of the ratio: ``[...]`` or ``[..., L]``."""
        if self.ratio == "draw":
            return draws
        return draws.sum(-1) if self.ratio == "decision" else draws.mean(-1)

    def log_probability(self, evict_logits: Tensor, order: Tensor) -> Tensor:
        """Of what went, ``[..., L]`` of ``[..., C]``: ``[...]``, or ``[..., L]`` where every draw has a ratio."""
        if self.logprob == "independent":
            return self.scaled(losses.independent_log_prob(evict_logits, order))
        return self.scaled(losses.plackett_luce(evict_logits, order, per_draw=True))

    def divergence(self, evict_logits: Tensor, reference: Tensor, order: Tensor) -> Tensor:
        """KL of the logits to those of the reference ``[..., C]``, shaped like :meth:`log_probability`."""
        if self.kl == "exact":
            return self.scaled(losses.plackett_luce_kl(evict_logits, reference, order))
        distance = self.log_probability(reference, order) - self.log_probability(evict_logits, order)
        return distance.exp() - distance - 1

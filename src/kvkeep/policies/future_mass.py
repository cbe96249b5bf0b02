"""Future mass: KVpop's teacher, which ranks tokens by the attention they will receive after leaving the window."""

from __future__ import annotations

from torch import Tensor

from kvkeep.attention_mass import future_attention
from kvkeep.budget import Budget
from kvkeep.lifetimes import static_priority
from kvkeep.policies.base import EntryPolicy, Geometry, Memory, Step


class FutureMass(EntryPolicy):
    """KVpop's teacher (oracle): the log of the mean future attention, from the layer's own queries and keys.

    Paper: KVpop, arXiv 2607.05061, equations 3 and 4. Offline only: it reads the future. A weak upper bound: a mean
    over all later queries is blind to "needed once, much later" and to "superseded".

    Args:
        group, count_normalised, eps: see :func:`kvkeep.attention_mass.future_attention`.
        log_gamma: log of the decay per ``step`` tokens, <= 0; 0 = none (see :func:`kvkeep.lifetimes.static_priority`).
        step: tokens per decay step.

    Raises:
        ValueError: for an option outside these.
    """

    name = "future_mass"
    paper = "arXiv 2607.05061"
    oracle = True
    labels = "own"

    def __init__(
        self,
        budget: Budget,
        group: str = "max",
        count_normalised: bool = True,
        eps: float = 1e-6,
        log_gamma: float = 0.0,
        step: int = 64,
    ):
        super().__init__(budget)
        if group not in ("max", "mean_log", "log_mean"):
            raise ValueError(f"group must be 'max', 'mean_log' or 'log_mean', not {group!r}")
        if log_gamma > 0 or step < 1:
            raise ValueError(f"log_gamma must be at most 0 and step at least 1, not {log_gamma} and {step}")
        self.group, self.count_normalised, self.eps, self.log_gamma, self.step = (
            group,
            count_normalised,
            eps,
            log_gamma,
            step,
        )

    def foresee(self, geometry: Geometry, query: Tensor, key: Tensor) -> Memory:
        target = future_attention(
            query,
            key,
            self.budget.window,
            group=self.group,
            count_normalised=self.count_normalised,
            eps=self.eps,
            scaling=geometry.scaling,
        )
        return {"priority": static_priority(target, self.log_gamma, self.step)}

    def priority(self, step: Step) -> Tensor:
        priority = step.memory["priority"]  # [B, H, S]
        index = step.positions.clamp(min=0)[:, None].expand(-1, priority.shape[1], -1)
        return priority.gather(-1, index)

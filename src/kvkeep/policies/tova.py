"""TOVA: drop the token to which the newest query attends least."""

from __future__ import annotations

from torch import Tensor

from kvkeep.budget import Budget
from kvkeep.policies.base import AttentionPolicy, Held, Observation


class Tova(AttentionPolicy):
    """TOVA: when the cache is full, the token of least attention from the newest query goes, one choice a layer.

    Paper: arXiv 2401.06104, section 4. The newest token takes part and may be the one that goes; no sinks, no window.
    A query that finds ``rest + 1`` tokens attends to all of them, then one is dropped: here at the start of the next.

    Args:
        per_head: let every KV head choose for itself (mean over its group) instead of the layer as one.
    """

    name = "tova"
    paper = "arXiv 2401.06104"
    statistics = ("newest",)

    def __init__(self, budget: Budget, per_head: bool = False):
        super().__init__(budget)
        self.per_head = per_head

    @classmethod
    def default_budget(cls, slots: int, **overrides: int) -> Budget:
        return super().default_budget(slots, **{"window": 0, "interval": 1} | overrides)

    def observe(self, seen: Observation) -> None:
        seen.statistics["newest"].copy_(seen.probabilities[..., -1, :].mean(2))

    def keep_scores(self, held: Held) -> Tensor:
        newest = held.statistics["newest"]
        return newest if self.per_head else newest.mean(1, keepdim=True)

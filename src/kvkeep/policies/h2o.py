"""H2O: keep the heavy hitters of attention received so far; plain, or forgetting the past."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from kvkeep.budget import Budget
from kvkeep.kernels.place import Loop
from kvkeep.policies.base import AttentionPolicy, Held, Observation


class H2O(AttentionPolicy):
    """H2O: cumulative attention received from every query since a token entered, mean over the group.

    Paper: arXiv 2306.14048, section 4, applied every ``interval`` queries. Probabilities are over the tokens held.
    """

    name = "h2o"
    paper = "arXiv 2306.14048"
    statistics = ("received",)

    def observe(self, seen: Observation) -> None:
        seen.statistics["received"].add_(seen.probabilities.mean(2).sum(2))

    def counting(self, statistics: dict[str, np.ndarray]) -> Loop | None:
        return Loop("counts.count_mean", (statistics["received"],)) if type(self).observe is H2O.observe else None

    def keep_scores(self, held: Held) -> Tensor:
        return held.statistics["received"]


class DecayedH2O(H2O):
    """H2O with a decay: cumulative attention that fades, so that what mattered once may go.

    ``received <- decay * received + attention of this interval's queries`` (ForesightKV, arXiv 2602.03203, the decayed
    feature of section 3): the decay is per eviction interval, not per token. It is applied at queries ``rest``,
    ``rest + interval``, ..., so a first time one interval before the first eviction, as the paper's recurrence does.

    Args:
        decay: in (0, 1]; None = 0.9, or 0.97 where the interval is a single token.

    Raises:
        ValueError: for a decay outside (0, 1].
    """

    name = "h2o_decayed"
    paper = "arXiv 2306.14048 with the decay of arXiv 2602.03203"

    def __init__(self, budget: Budget, decay: float | None = None):
        super().__init__(budget)
        self.decay = decay if decay is not None else (0.97 if budget.interval == 1 else 0.9)
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be in (0, 1], not {decay}")

    def begin_interval(self, statistics: dict[str, Tensor]) -> None:
        statistics["received"].mul_(self.decay)

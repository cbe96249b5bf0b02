"""Keep everything: the stock model, the yardstick of every comparison."""

from __future__ import annotations

from kvkeep.budget import Budget
from kvkeep.policies.base import Policy


class Full(Policy):
    """The full cache: nothing is ever evicted."""

    name = "full"
    kind = "full"

    def __init__(self, budget: Budget | None = None):
        super().__init__(None)

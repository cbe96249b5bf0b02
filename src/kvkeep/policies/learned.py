"""What learned policies share: a scorer, checked against method and model, and placed where the cache is."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from kvkeep.budget import Budget
from kvkeep.policies.base import EntryPolicy, Geometry, Memory, Policy, Step
from kvkeep.scorers import LayerScorer, Scorer, charge


class Learned(Policy):
    """Mixed into an entry or an attention policy whose decisions a trained scorer makes.

    Args:
        budget: see :class:`~kvkeep.Budget`; what the scorer's memory costs is not part of it.
        scorer: of this method.

    Raises:
        ValueError: for a scorer that is missing or of another method.
    """

    learned = True

    def __init__(self, budget: Budget, scorer: Scorer):
        super().__init__(budget)
        self.require_scorer(self.name, scorer)
        self._scorer = scorer
        self._copies: dict[tuple[int, torch.device], LayerScorer] = {}

    @staticmethod
    def require_scorer(name: str, scorer) -> None:
        """Raise ValueError where ``scorer`` is not one for the policy ``name``."""
        if scorer is None:
            raise ValueError(f"policy {name!r} is learned and needs a scorer: train one, or see kvkeep.load_scorer")
        if not isinstance(scorer, Scorer):
            raise ValueError(f"policy {name!r} needs a kvkeep scorer, not a {type(scorer).__name__}")
        if scorer.method != name:
            raise ValueError(f"policy {name!r} needs a scorer of its own, not one for {scorer.method!r}")

    @classmethod
    def default_budget(cls, slots: int, state_entries: int | None = None, **overrides: int) -> Budget:
        """Split ``slots``; what the scorer's memory costs comes out of top-k (by default :meth:`default_state`)."""
        whole = super().default_budget(slots, **overrides)
        return charge(whole, cls.default_state(slots) if state_entries is None else state_entries)

    @classmethod
    def default_state(cls, slots: int) -> int:
        """Tokens that the memory of a scorer made for ``slots`` costs."""
        return 0

    @property
    def scorer(self) -> Scorer:
        return self._scorer

    def options(self) -> dict:
        return {"scorer": self._scorer.fingerprint()} | super().options()

    def require_fits(self, config) -> None:
        self._scorer.require_fits(config)

    def new_memory(self, geometry: Geometry, batch: int, device: torch.device, dtype: torch.dtype) -> Memory:
        module = self._scorer.layer(geometry.layer)
        self._copies.pop((geometry.layer, device), None)
        if module.log_gamma.device != device:  # models may be spread over devices: the cache's layer says which
            self._copies[geometry.layer, device] = copy.deepcopy(module).to(device)
        return self.layer_scorer(geometry, device).initial_state(batch, device, dtype, self.budget.window)

    def layer_scorer(self, geometry: Geometry, device: torch.device) -> LayerScorer:
        """The scorer of a layer on the device of its cache."""
        return self._copies.get((geometry.layer, device), self._scorer.layer(geometry.layer))


class LearnedEntry(Learned, EntryPolicy):
    """A scorer gives every token that leaves the window its static priority: the score, and a decay with age."""

    @property
    def foresees(self) -> bool:
        return not self._scorer.stateful

    def priority(self, step: Step) -> Tensor:
        layer = self.layer_scorer(step.geometry, step.positions.device)
        score = layer.score(step.entering, step.leaving, step.memory)
        factor = self.scorer.decay_factor(self.budget.rest)
        return layer.priority(score, step.positions, self.scorer.decay_step, factor)

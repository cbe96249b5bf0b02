"""What learned policies share: a scorer, checked against method and model, and placed where the cache is."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from kvkeep.budget import Budget
from kvkeep.kernels.place import Loop
from kvkeep.lifetimes import static_priority
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
        self._placed: dict[tuple[int, torch.device], LayerScorer] = {}  # as it was when the last sequence began

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
        if module.log_gamma.device != device:  # models may be spread over devices: the cache's layer says which
            module = copy.deepcopy(module).to(device)
        self._placed[geometry.layer, device] = module
        return module.initial_state(batch, device, dtype, self.budget.window)

    def layer_scorer(self, geometry: Geometry, device: torch.device) -> LayerScorer:
        """The scorer of a layer on the device of its cache."""
        return self._placed[geometry.layer, device]


class LearnedEntry(Learned, EntryPolicy):
    """A scorer gives every token that leaves the window its static priority: the score, and a decay with age."""

    def __init__(self, budget: Budget, scorer: Scorer):
        super().__init__(budget, scorer)
        self._decays: dict[tuple[int, torch.device], Tensor] = {}  # [H], likewise

    def new_memory(self, geometry: Geometry, batch: int, device: torch.device, dtype: torch.dtype) -> Memory:
        factor = self._scorer.decay_factor(self.budget.rest)
        self._decays[geometry.layer, device] = (self._scorer.layer(geometry.layer).log_gamma * factor).to(device)
        return super().new_memory(geometry, batch, device, dtype)

    def priority(self, step: Step) -> Tensor:
        device = step.positions.device
        score = self.layer_scorer(step.geometry, device).score(step.entering, step.leaving, step.memory)
        decay = self._decays[step.geometry.layer, device]
        return static_priority(score, decay, self._scorer.decay_step, positions=step.positions[:, None])

    def loop(self, geometry: Geometry, dtype: torch.dtype) -> Loop | None:
        place = geometry.layer, torch.device("cpu")
        return self._placed[place].loop(self._decays[place], self._scorer.decay_step, dtype)

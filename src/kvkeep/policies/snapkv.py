"""SnapKV: an observation window votes for the older tokens, pooled over neighbours."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvkeep.budget import Budget
from kvkeep.policies.base import AttentionPolicy, Held
from kvkeep.slots import gather_slots


class SnapKV(AttentionPolicy):
    """SnapKV, applied every ``interval`` queries: attention from the last ``observation`` queries, max-pooled.

    Paper: arXiv 2404.14469, section 4. Every older token held is scored by the mean attention it receives from the
    newest queries, then by the maximum over its neighbours among the older tokens held, in order of position.

    Args:
        observation: how many of the newest queries vote; the keys of the same number of newest tokens are not older.
            They keep their own vote unpooled (0 with ``normalise="older"``), which matters only where the budget's
            window is shorter and they may go.
        kernel: odd width of the max-pool, 1 = none.
        head_reduce: "mean_prob" = softmax per query head, then mean over the group (the paper); "max_logit" = maximum
            of the logits over the group, then softmax (ForesightKV's code).
        normalise: "held" = softmax over all tokens held; "older" = over the older ones only (ForesightKV's code).

    Raises:
        ValueError: for an option outside these.
    """

    name = "snapkv"
    paper = "arXiv 2404.14469"

    def __init__(
        self,
        budget: Budget,
        observation: int = 8,
        kernel: int = 7,
        head_reduce: str = "mean_prob",
        normalise: str = "held",
    ):
        super().__init__(budget)
        if observation < 1 or kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"observation must be >= 1 and kernel odd and >= 1, not {observation} and {kernel}")
        if head_reduce not in ("mean_prob", "max_logit") or normalise not in ("held", "older"):
            raise ValueError(
                f"head_reduce is 'mean_prob' or 'max_logit' and normalise 'held' or 'older', "
                f"not {head_reduce!r} and {normalise!r}"
            )
        if observation >= budget.slots:
            raise ValueError(f"observation must be below the budget's {budget.slots} slots, not {observation}")
        self.observation, self.kernel, self.head_reduce, self.normalise = observation, kernel, head_reduce, normalise

    @classmethod
    def default_budget(cls, slots: int, **overrides: int) -> Budget:
        return super().default_budget(slots, **{"window": 8} | overrides)

    @property
    def recent_queries(self) -> int:
        return self.observation

    def keep_scores(self, held: Held) -> Tensor:
        order = held.positions.argsort(-1)  # [B, H, N], oldest first
        votes = self.votes(held, order)
        older = held.positions.shape[-1] - self.observation
        pooled = max_pool(votes[..., :older], self.kernel)
        scores = torch.cat([pooled, votes[..., older:]], -1)
        return torch.empty_like(scores).scatter_(-1, order, scores)

    def votes(self, held: Held, order: Tensor) -> Tensor:
        """Mean attention from the observation queries, ``[B, H, N]`` in the given order; not older: 0 if so asked."""
        keys = gather_slots(held.keys, order)
        logits = torch.einsum("bhgrd,bhnd->bhgrn", held.queries, keys) * held.geometry.scaling
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        count, recent = keys.shape[2], held.queries.shape[3]
        if self.normalise == "older":
            older = observation_scores(logits[..., : count - self.observation], self.head_reduce)
            return torch.cat([older, older.new_zeros(*older.shape[:2], self.observation)], -1)
        rows = torch.arange(held.query_index - recent, held.query_index, device=keys.device)
        seen = gather_slots(held.positions, order)[:, :, None, None] <= rows[:, None]  # [B, H, 1, r, N]
        return observation_scores(logits.masked_fill(~seen, torch.finfo(logits.dtype).min), self.head_reduce)


def observation_scores(logits: Tensor, head_reduce: str) -> Tensor:
    """Logits ``[B, H, G, r, N]`` of r queries -> mean attention per key ``[B, H, N]``."""
    if head_reduce == "max_logit":
        return logits.amax(2).softmax(-1).mean(2)
    return logits.softmax(-1).mean((2, 3))


def max_pool(scores: Tensor, kernel: int) -> Tensor:
    """Maximum over ``kernel`` neighbours, ``[B, H, N]`` -> ``[B, H, N]``; shorter at the ends."""
    return max_pool1d(scores, kernel, stride=1, padding=kernel // 2) if kernel > 1 else scores

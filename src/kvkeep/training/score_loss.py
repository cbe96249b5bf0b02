"""The score loss beside a tuned backbone (KVpop, arXiv 2607.05061, sections 3.1 and 3.2), and what to watch in it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention_mass import future_attention
from kvkeep.budget import Budget
from kvkeep.policies.base import Geometry
from kvkeep.scorers import Scorer
from kvkeep.scorers.linear import full_precision
from kvkeep.sparse_attention import live_lse
from kvkeep.training import losses

SCORE_LOSSES = ("boundary", "regression")


class ScoreLoss:
    """An observer that teaches a scorer what the student's own queries and keys foresee; adds to its gradients only.

    A layer's loss goes backward where it arises, so one layer's graph exists at a time. Queries, keys and values are
    detached; within a checkpointed layer, the graph is kept out of what is computed again.

    Args:
        scorer: whose gradients are added to, weighted so that a step's loss is the mean over its layers.
        budget: that the labels are for.
        seen: the losses are appended here.
        kind: "boundary" (the paper) or "regression" on the log target.
        target_source: whose normaliser the labels use: "sparse" = the tokens alive (the paper), "dense" = all the past.
    """

    def __init__(
        self,
        scorer: Scorer,
        budget: Budget,
        seen: list[float],
        kind: str = "boundary",
        target_source: str = "sparse",
    ):
        self.scorer, self.budget, self.seen = scorer, budget, seen
        self.kind, self.target_source = kind, target_source

    def __call__(self, geometry: Geometry, query: Tensor, key: Tensor, value: Tensor, evicted_at: Tensor) -> None:
        if key.shape[2] <= self.budget.rest:
            return  # no decision is made
        keep = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        wide = torch.promote_types(key.dtype, torch.float32)
        states = [tensor.detach().to(wide) for tensor in (query, key, value)]
        with torch.enable_grad(), full_precision(key.device), keep:
            loss = self.loss(geometry, *states, evicted_at)
            (loss / len(self.scorer.geometry)).backward()
        self.seen.append(float(loss.detach()))

    def loss(self, geometry: Geometry, query: Tensor, key: Tensor, value: Tensor, evicted_at: Tensor) -> Tensor:
        """Of one layer, in the unit of the raw score; its decay, which stays, is shared by labels and scores."""
        layer, budget = self.scorer.layer(geometry.layer), self.budget
        lse = None
        if self.target_source == "sparse":
            lse = live_lse(query, key, evicted_at, geometry.scaling)
        target = future_attention(query, key, budget.window, scaling=geometry.scaling, lse=lse)
        score = self.scorer(geometry.layer, key, value, budget.window)
        score = score * layer.score_std[:, None] + layer.score_mean[:, None]
        if self.kind == "regression":
            return losses.regression(score, target, budget)
        log_gamma = layer.log_gamma * self.scorer.decay_factor(budget.rest) * layer.score_std
        return losses.boundary(score, target, budget, log_gamma, self.scorer.decay_step)


def keep_rate(evicted_at: Tensor, budget: Budget) -> Tensor | None:
    """Share of decisions that keep the token which has just left the window: int ``[B, H, S]`` -> ``[B * H]``.

    None where no decision is made. Near 0 or 1 a learned policy has collapsed into a fixed pattern.
    """
    length = evicted_at.shape[-1]
    if length <= budget.rest:
        return None
    query = torch.arange(budget.rest, length, device=evicted_at.device)
    return (evicted_at[..., query - budget.window] > query).float().mean(-1).flatten().cpu()

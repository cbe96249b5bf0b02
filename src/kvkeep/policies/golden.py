"""Golden eviction: ForesightKV's oracle, which drops what no later block of queries will attend to."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention_mass import block_attention, future_maximum
from kvkeep.budget import Budget
from kvkeep.policies.base import AttentionPolicy, Geometry, Held, Memory


class Golden(AttentionPolicy):
    """Golden eviction (oracle): at eviction t keep the largest ``alpha_{i,t} = max_{j >= t} a_{i,j}``.

    Paper: ForesightKV, arXiv 2602.03203, section 3.1: ``a_{i,j}`` is the mean attention that token i receives from the
    queries of block j, over the block and the heads of the group, under full attention; blocks start at query
    ``rest + interval`` and hold ``interval`` queries. Offline only: it reads the future.

    Args:
        labels: "full" = attention of one dense pass of the unevicted model; "own" = of the layer's queries and keys as
            eviction in the layers below has left them.
        lookahead: how many blocks it may see, 1 = the "next-block oracle"; None = all.
        head_reduce: "mean" or "max" over the query heads of the group, of the means over a block.
        partial: how a last, shorter block counts: "mean" over its queries, or "zero_pad" as in the released code.

    Raises:
        ValueError: for an option outside these.
    """

    name = "golden"
    paper = "arXiv 2602.03203"
    oracle = True

    def __init__(
        self,
        budget: Budget,
        labels: str = "full",
        lookahead: int | None = None,
        head_reduce: str = "mean",
        partial: str = "mean",
    ):
        super().__init__(budget)
        if labels not in ("full", "own"):
            raise ValueError(f"labels must be 'full' or 'own', not {labels!r}")
        if lookahead is not None and lookahead < 1:
            raise ValueError(f"lookahead must be at least 1 block, not {lookahead}")
        if head_reduce not in ("mean", "max") or partial not in ("mean", "zero_pad"):
            raise ValueError(
                f"head_reduce is 'mean' or 'max' and partial 'mean' or 'zero_pad', not {head_reduce!r} and {partial!r}"
            )
        self.labels, self.lookahead, self.head_reduce, self.partial = labels, lookahead, head_reduce, partial

    def foresee(self, geometry: Geometry, query: Tensor, key: Tensor) -> Memory:
        start, interval = self.budget.slots, self.budget.interval
        blocks = block_attention(
            query, key, start, interval, scaling=geometry.scaling, head=self.head_reduce, partial=self.partial
        )
        if self.lookahead is None:
            return {"alpha": future_maximum(blocks)}
        later = [blocks.roll(-step, -1) for step in range(min(self.lookahead, blocks.shape[-1]))]
        for step, shifted in enumerate(later):  # what rolled round belongs to the past
            shifted[..., shifted.shape[-1] - step :] = 0
        return {"alpha": torch.stack(later).amax(0) if later else blocks}

    def keep_scores(self, held: Held) -> Tensor:
        alpha = held.memory["alpha"][..., held.evictions]  # [B, H, S]
        return alpha.gather(-1, held.positions.long())

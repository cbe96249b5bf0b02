"""ForesightKV: every L tokens a small network that knows keys, values and attention received says what may go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvkeep.budget import Budget
from kvkeep.kernels.place import Loop
from kvkeep.policies.base import AttentionPolicy, Geometry, Held, Memory, Observation, Statistic
from kvkeep.policies.learned import Learned
from kvkeep.policies.random import logical_shift, mix, require_seed
from kvkeep.scorers import Scorer
from kvkeep.scorers.features import FeatureSpec
from kvkeep.slots import lowest


class Drawn(NamedTuple):
    """One eviction of every head of a layer."""

    order: Tensor  # int64 [B, H, L], slots that go, in the order they were drawn
    pool: Tensor  # int64 [B, H, P], slots they were drawn from, the first to go first


class Watching(AttentionPolicy):
    """Keeps the sums of attention that a feature spec reads: what ForesightKV decides by, and what its labels go with.

    Attributes:
        _features: whose sums.
        _ring: whether those of an interval come from a ring of its queries instead.
    """

    _features: FeatureSpec
    _ring = False

    def slot_statistics(self, geometry: Geometry) -> dict[str, Statistic]:
        kept = self._features.accumulators(geometry.group, self._ring)
        return {name: Statistic(shape, fill) for name, (shape, fill) in kept.items()}

    def end_interval(self, statistics: dict[str, Tensor]) -> None:
        self._features.end(statistics)

    def begin_interval(self, statistics: dict[str, Tensor]) -> None:
        self._features.begin(statistics)

    def observe(self, seen: Observation) -> None:
        self._features.observe(
            seen.statistics, seen.probabilities, seen.positions, seen.held, seen.until(), self.budget.interval
        )

    def counting(self, statistics: dict[str, np.ndarray]) -> Loop | None:
        ranges = self._features.counting(statistics, self.budget.interval)
        others = statistics.keys() - ranges.keys() - {"watched"}  # extremes, and what a subclass adds
        if others or not ranges or type(self).observe is not Watching.observe:
            return None
        sums = tuple(statistics[name] for name in ranges)
        watched = statistics.get("watched", sums[0][:, :, :0, 0])
        return Loop("counts.count_sums", (sums, watched, np.array(list(ranges.values()))))


class ForesightKV(Learned, Watching):
    """ForesightKV: at every eviction the ``interval`` candidates of lowest keep score go, or a draw among them.

    Paper: arXiv 2602.03203, section 3; the network is :class:`kvkeep.scorers.foresight.Foresight`, its features
    :class:`kvkeep.scorers.features.FeatureSpec`. The paper draws L of the 2L lowest without replacement, by a softmax
    of the negative scores, in evaluation too; here that is ``evict="sample"``. A draw is a hash of (seed, layer, head,
    position, query), so that it is the same online and offline, alone and in a batch.

    Args:
        evict: "topk" = the lowest go; "sample" = the paper's draw.
        pool: how many times the number that goes the draw is among; None = all candidates.
        seed: of the draw; several = one for every row of the batch.
        sums: of the attention between two evictions: "running" = in every slot; "ring" = the last L queries are kept
            instead, and attended with again at the eviction.

    Raises:
        ValueError: for an option outside these.
    """

    name = "foresightkv"
    paper = "arXiv 2602.03203"

    def __init__(
        self,
        budget: Budget,
        scorer: Scorer,
        evict: str = "topk",
        pool: int | None = 2,
        seed: int | Sequence[int] = 0,
        sums: str = "running",
    ):
        super().__init__(budget, scorer)
        if evict not in ("topk", "sample") or sums not in ("running", "ring"):
            raise ValueError(f"evict is 'topk' or 'sample' and sums 'running' or 'ring', not {evict!r} and {sums!r}")
        if pool is not None and (not isinstance(pool, int) or pool < 1):
            raise ValueError(f"the pool is 1 or more times what goes, or None for all candidates, not {pool!r}")
        if evict == "topk" and pool != 2:
            raise ValueError(f"a pool of {pool!r} is drawn from by evict='sample' alone; with 'topk' the lowest go")
        for each in seed if isinstance(seed, list | tuple) else (seed,):
            require_seed(each)
        self.evict, self.pool, self.seed, self.sums = evict, pool, seed, sums
        self._ring = sums == "ring"
        self._features = next(iter(scorer.layers.values())).features

    @property
    def needs_rotary(self) -> bool:
        return self._features.kv and self._features.keys == "pre"

    @property
    def recent_queries(self) -> int:
        return self.budget.interval if self._ring else 0

    def new_memory(self, geometry: Geometry, batch: int, device: torch.device, dtype: torch.dtype) -> Memory:
        memory = super().new_memory(geometry, batch, device, dtype)
        if self.evict == "sample":
            seeds = [self.seed] * batch if isinstance(self.seed, int) else list(self.seed)
            if len(seeds) != batch:
                raise ValueError(f"there must be a seed for every row of the batch: {len(seeds)} for {batch} rows")
            signed = [(seed + 2**63) % 2**64 - 2**63 for seed in seeds]
            memory["seed"] = torch.tensor(signed, dtype=torch.int64, device=device)
        return memory

    def keep_scores(self, held: Held) -> Tensor:
        scores = self.layer_scorer(held.geometry, held.keys.device).keep(self.inputs(held))
        if self.evict == "topk":
            return scores
        drawn = self.draw(scores, held)
        return torch.ones_like(scores).scatter_(-1, drawn.order, 0.0)

    def inputs(self, held: Held) -> Tensor:
        """Features ``[B, H, N, width]`` of the tokens held."""
        spec, interval = self._features, self.budget.interval
        kept = held.statistics | (spec.from_ring(self.recent_attention(held)) if self._ring else {})
        keys = held.keys
        if self.needs_rotary and held.geometry.rotary is not None:
            keys = held.geometry.rotary.unrotate(keys, held.positions)
        return spec.build(keys, held.values, kept, held.positions, held.query_index, interval)

    @staticmethod
    def recent_attention(held: Held) -> Tensor:
        """Attention ``[B, H, G, r, N]`` of the newest queries over the tokens held, as it was when they were asked."""
        logits = torch.einsum("bhgrd,bhnd->bhgrn", held.queries, held.keys) * held.geometry.scaling
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        rows = torch.arange(held.query_index - held.queries.shape[3], held.query_index, device=logits.device)
        seen = held.positions[:, :, None, None] <= rows[:, None]  # [B, H, 1, r, N]
        return logits.masked_fill(~seen, torch.finfo(logits.dtype).min).softmax(-1)

    def draw(self, scores: Tensor, held: Held) -> Drawn:
        """Draw what goes, without replacement: the largest of eviction logits plus Gumbel noise, in float64.

        A draw from softmax weights would return what has underflowed to 0 before what is merely unlikely.

        Args:
            scores: keep scores ``[B, H, N]``.
        """
        available = int(held.candidates[0, 0].sum())
        size = available if self.pool is None else min(self.pool * held.count, available)
        pool = lowest(scores, held.positions, held.candidates, size)
        logits = -scores.double().gather(-1, pool)
        positions, geometry = held.positions.gather(-1, pool), held.geometry
        noise = gumbel(held.memory["seed"], geometry.layer, positions, held.query_index, geometry.first_head)
        return Drawn(pool.gather(-1, (logits + noise).topk(held.count, -1).indices), pool)


def gumbel(seeds: Tensor, layer: int, positions: Tensor, query: int, first_head: int = 0) -> Tensor:
    """Float64 noise ``[B, H, n]`` from a hash of seed ``[B]``, layer, head, position ``[B, H, n]`` and query."""
    head = first_head + torch.arange(positions.shape[1], device=positions.device)
    stream = mix(mix(mix(seeds) + layer)[:, None] + head)  # [B, H]
    bits = mix(mix(stream + query)[..., None] + positions)
    uniform = logical_shift(bits, 11).double() / 2.0**53
    return -(-uniform.clamp(2.0**-54, 1 - 2.0**-53).log()).log()

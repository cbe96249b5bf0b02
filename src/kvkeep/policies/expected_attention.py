"""Expected attention: foresee the queries to come from the distribution of those seen."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.budget import Budget
from kvkeep.policies.base import AttentionPolicy, Geometry, Held, Memory, Observation


class ExpectedAttention(AttentionPolicy):
    """Expected attention of Gaussian future queries, times the size of the value.

    Paper: arXiv 2510.00636, section 3. The form used here, per query head:

    * queries before the rotary embedding are taken as Gaussian; mean mu and covariance Sigma are those of **all**
      queries the row has seen so far (running sums in float32 or wider);
    * the rotation is averaged over the coming positions q .. q + horizon - 1, ``R = mean_p R_p``, and
      ``mu' = R mu``, ``Sigma' = R Sigma R^T``;
    * ``z_i = s mu'.k_i + s^2 / 2 k_i^T Sigma' k_i`` (s = the layer's logit scaling; the log of a Gaussian's moment
      generating function), ``a = softmax(z)`` over the tokens held, mean over the group;
    * keep score ``(a_i + epsilon) * |v_i|``.

    Deviation: the norm is that of the value itself, not of its image under the output projection, which belongs to the
    model and not to the cache.

    Args:
        horizon: how many coming positions the rotation is averaged over.
        epsilon: added to the attention, so that large values count even where none is expected.
        use_covariance: False leaves Sigma out.

    Raises:
        ValueError: for a horizon below 1.
    """

    name = "expected_attention"
    paper = "arXiv 2510.00636"
    needs_rotary = True

    def __init__(self, budget: Budget, horizon: int = 512, epsilon: float = 0.0, use_covariance: bool = True):
        super().__init__(budget)
        if not isinstance(horizon, int) or horizon < 1:
            raise ValueError(f"horizon must be a whole number of positions, at least 1, not {horizon}")
        self.horizon, self.epsilon, self.use_covariance = horizon, epsilon, use_covariance

    @classmethod
    def default_budget(cls, slots: int, **overrides: int) -> Budget:
        return super().default_budget(slots, **{"sinks": 4} | overrides)

    def new_memory(self, geometry: Geometry, batch: int, device: torch.device, dtype: torch.dtype) -> Memory:
        heads = (batch, geometry.kv_heads, geometry.group)
        size = geometry.head_dim
        memory = {"sum": torch.zeros(*heads, size, dtype=dtype, device=device)}
        if self.use_covariance:
            memory["outer"] = torch.zeros(*heads, size, size, dtype=dtype, device=device)
        return memory

    def observe(self, seen: Observation) -> None:
        query = seen.query.to(seen.memory["sum"].dtype)  # [B, H, G, n, D]
        if seen.geometry.rotary is not None:
            query = seen.geometry.rotary.unrotate(query, seen.positions[:, None, None])
        seen.memory["sum"] += query.sum(3)
        if self.use_covariance:
            seen.memory["outer"] += query.transpose(-1, -2) @ query

    def keep_scores(self, held: Held) -> Tensor:
        geometry, count = held.geometry, held.query_index  # every query before q has been seen once
        mean = held.memory["sum"] / count
        rotate = self.mean_rotation(geometry, held.query_index, mean)
        keys = held.keys.to(mean.dtype)[:, :, None]  # [B, H, 1, N, D]
        z = geometry.scaling * (keys @ rotate(mean)[..., None])[..., 0]  # [B, H, G, N]
        if self.use_covariance:
            covariance = held.memory["outer"] / count - mean[..., None] * mean[..., None, :]
            covariance = rotate(rotate(covariance).transpose(-1, -2))  # R Sigma R^T, Sigma symmetric
            z = z + geometry.scaling**2 / 2 * ((keys @ covariance) * keys).sum(-1)
        attention = z.softmax(-1).mean(2)  # [B, H, N]
        return (attention + self.epsilon) * held.values.to(mean.dtype).norm(dim=-1)

    def mean_rotation(self, geometry: Geometry, start: int, like: Tensor):
        """The average rotation over positions start .. start + horizon - 1, as a function on ``[..., D]``."""
        if geometry.rotary is None:
            return lambda states: states
        half = geometry.rotary.frequencies.numel()
        angles = geometry.rotary.angles(torch.arange(start, start + self.horizon, device=like.device))
        cos = (angles.cos().mean(0) * geometry.rotary.factor).to(like.dtype)
        sin = (angles.sin().mean(0) * geometry.rotary.factor).to(like.dtype)

        def rotate(states: Tensor) -> Tensor:
            first, second, rest = states[..., :half], states[..., half : 2 * half], states[..., 2 * half :]
            return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

        return rotate

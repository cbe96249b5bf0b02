"""The stateless scorer: a two-layer network on the cached pair (KVpop without memory, arXiv 2607.05061)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from kvkeep.kernels.place import Loop
from kvkeep.scorers.base import LayerScorer, ScorerError, State
from kvkeep.scorers.layout import LayerShape
from kvkeep.scorers.linear import drawn, per_head

SMALL = 1e-2  # deviation of an initial score: the decay, or the newest of equals, rules at the start


@dataclass(frozen=True)
class MLPOptions:
    """Options of the MLP scorer.

    Args:
        hidden: width; None = the size of a head.

    Raises:
        ScorerError: for a width below 1.
    """

    hidden: int | None = None

    def __post_init__(self) -> None:
        if self.hidden is not None and self.hidden < 1:
            raise ScorerError(f"hidden must be at least 1, not {self.hidden}")


class MLP(LayerScorer):
    """``r_t = w2 . silu(W1 [k_t; v_t] + b1) + b2``, weights of its own in every layer and KV head.

    Paper: KVpop, arXiv 2607.05061, its variant without memory: two layers, SiLU, on the cached key (after the rotary
    embedding) and value, detached. The paper's width is unknown; ours is the size of a head. Addition: inputs are
    standardised.
    """

    method = "kvpop_mlp"
    Options = MLPOptions

    def __init__(self, shape: LayerShape, options: MLPOptions, generator: torch.Generator):
        super().__init__(shape, options, generator)
        heads, inputs, hidden = shape.kv_heads, 2 * shape.head_dim, options.hidden or shape.head_dim
        self.w1 = drawn(generator, heads, inputs, hidden, std=inputs**-0.5)
        self.b1 = nn.Parameter(torch.zeros(heads, hidden))
        self.w2 = drawn(generator, heads, hidden, 1, std=SMALL * hidden**-0.5)
        self.b2 = nn.Parameter(torch.zeros(heads, 1))

    def raw(self, entering: Tensor, leaving: Tensor, state: State) -> Tensor:
        hidden = silu(per_head(leaving, self.w1, self.b1))  # [B, H, n, hidden]
        return per_head(hidden, self.w2, self.b2)[..., 0]

    def loop(self, decay: Tensor, decay_step: int, dtype: torch.dtype) -> Loop:
        weights = self.packed(dtype, self.w1, self.b1, self.w2, self.b2, self.score_mean, self.score_std, decay)
        arguments = weights, self.w1.shape[-1], decay_step, self.shape.index
        return Loop("scores.replace_lowest_by_mlp", arguments, ahead=True)

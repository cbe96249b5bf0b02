"""ForesightKV's scorer: a small network on a token's features, read at every eviction (arXiv 2602.03203)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from kvkeep.budget import Budget
from kvkeep.scorers.base import LayerScorer, ScorerError, State, drawn, full_precision, per_head
from kvkeep.scorers.features import FeatureSpec
from kvkeep.scorers.layout import LayerShape

INITIAL = 0.02  # deviation of weights and biases, the initializer range of the released code


@dataclass(frozen=True)
class ForesightOptions:
    """Options of the ForesightKV scorer.

    Args:
        hidden: width; the paper's is 16.
        features: what it reads, a :class:`~kvkeep.scorers.features.FeatureSpec` or its JSON.
        window: newest tokens that may not go; None = an interval, the paper's.

    Raises:
        ScorerError: for a width below 1, a window below 0, or features that this version does not have.
    """

    hidden: int = 16
    features: FeatureSpec = field(default_factory=FeatureSpec)
    window: int | None = None

    def __post_init__(self) -> None:
        if self.hidden < 1:
            raise ScorerError(f"hidden must be at least 1, not {self.hidden}")
        if self.window is not None and self.window < 0:
            raise ScorerError(f"window must be at least 0, not {self.window}")
        if isinstance(self.features, Mapping):
            object.__setattr__(self, "features", FeatureSpec.from_json(self.features))
        if not isinstance(self.features, FeatureSpec):
            raise ScorerError(f"features must be a FeatureSpec, not a {type(self.features).__name__}")


class Foresight(LayerScorer):
    """``phi = W2 gelu(W1 x + b1) + b2``, weights of its own in every layer and KV head.

    Paper: ForesightKV, arXiv 2602.03203, section 3.2: one hidden layer of 16, on keys, values and attention statistics.
    Here phi is a keep score, higher stays; the released code's is an eviction score, its negative. Additions: features
    are standardised per head with statistics fitted on training data and frozen, and everything is in float32.
    """

    method = "foresightkv"
    Options = ForesightOptions

    def __init__(self, shape: LayerShape, options: ForesightOptions, generator: torch.Generator):
        super().__init__(shape, options, generator)
        heads, inputs = shape.kv_heads, self.inputs(shape, options)
        self.w1 = drawn(generator, heads, inputs, options.hidden, std=INITIAL)
        self.b1 = drawn(generator, heads, options.hidden, std=INITIAL)
        self.w2 = drawn(generator, heads, options.hidden, 1, std=INITIAL)
        self.b2 = nn.Parameter(torch.zeros(heads, 1))  # ranks do not depend on it

    @classmethod
    def inputs(cls, shape: LayerShape, options: ForesightOptions) -> int:
        return options.features.width(shape.head_dim, shape.query_heads // shape.kv_heads)

    @classmethod
    def split(cls, slots: int, options: ForesightOptions) -> Budget:
        """The default of an attention policy that is evicted every quarter of its slots."""
        interval = max(slots // 4, 1)
        window = interval if options.window is None else options.window
        if slots <= window + interval:
            raise ScorerError(f"a budget of {slots} slots must be above window {window} + interval {interval}")
        return Budget(sinks=0, window=window, topk=slots - window - interval, interval=interval)

    @classmethod
    def parts(cls, options: ForesightOptions) -> dict[str, int]:
        return {} if options.window is None else {"window": options.window}

    @property
    def features(self) -> FeatureSpec:
        return self.options.features

    def raw(self, entering: Tensor, leaving: Tensor, state: State) -> Tensor:
        hidden = gelu(per_head(leaving, self.w1, self.b1))  # [B, H, n, hidden]
        return per_head(hidden, self.w2, self.b2)[..., 0]

    def keep(self, features: Tensor) -> Tensor:
        """Keep scores ``[B, H, n]`` of tokens with features ``[B, H, n, width]``, see :meth:`FeatureSpec.build`.

        Without gradients the weights are standardised instead of the features, which are many more numbers.
        """
        if torch.is_grad_enabled():
            return self.score((features,), (features,), {})
        with full_precision(features.device):
            scale = self.input_std.to(features.dtype).reciprocal()
            w1 = self.w1.to(features.dtype) * scale[..., None]
            b1 = self.b1.to(features.dtype) - ((self.input_mean * scale)[:, None] @ self.w1.to(features.dtype))[:, 0]
            raw = per_head(gelu(per_head(features, w1, b1)), self.w2, self.b2)[..., 0]
            return (raw - self.score_mean.to(raw.dtype)[:, None]) / self.score_std.to(raw.dtype)[:, None]

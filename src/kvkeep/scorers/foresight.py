"""ForesightKV's scorer: a small network on a token's features, read at every eviction (arXiv 2602.03203)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from kvkeep.budget import Budget
from kvkeep.scorers.base import LayerScorer, ScorerError, State
from kvkeep.scorers.features import FeatureSpec
from kvkeep.scorers.layout import LayerShape
from kvkeep.scorers.linear import drawn, full_precision, per_head

SMALLEST = 1e-6  # norm of a value whose log is taken
INITIAL = 0.02  # deviation of weights and biases, the initializer range of the released code


@dataclass(frozen=True)
class ForesightOptions:
    """Options of the ForesightKV scorer.

    Args:
        hidden: width; the paper's is 16.
        features: what it reads, a :class:`~kvkeep.scorers.features.FeatureSpec` or its JSON.
        window: newest tokens that may not go; None = an interval, the paper's.
        value_power, age_power: what the keep score adds to the attention foreseen, see :meth:`Foresight.keep`; 0, the
            paper's, adds nothing.

    Raises:
        ScorerError: for a width or window out of range, features that this version does not have, or a power of what
            is not among the features.
    """

    hidden: int = 16
    features: FeatureSpec = field(default_factory=FeatureSpec)
    window: int | None = None
    value_power: float = field(default=0.0, metadata={"later": True})
    age_power: float = field(default=0.0, metadata={"later": True})

    def __post_init__(self) -> None:
        if self.hidden < 1:
            raise ScorerError(f"hidden must be at least 1, not {self.hidden}")
        if self.window is not None and self.window < 0:
            raise ScorerError(f"window must be at least 0, not {self.window}")
        if isinstance(self.features, Mapping):
            object.__setattr__(self, "features", FeatureSpec.from_json(self.features))
        if not isinstance(self.features, FeatureSpec):
            raise ScorerError(f"features must be a FeatureSpec, not a {type(self.features).__name__}")
        for power, feature, has in (("value_power", "kv", self.features.kv), ("age_power", "age", self.features.age)):
            if getattr(self, power) and not has:
                raise ScorerError(f"{power} {getattr(self, power)} needs {feature} among the features")


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
        self.statistics = options.features.statistics * (shape.query_heads // shape.kv_heads)
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

    def foreseen(self, features: Tensor) -> Tensor:
        """What the network says ``[B, H, n]`` of tokens with features ``[B, H, n, width]``.

        A log of future attention, or with the ranking loss a number that ranks it; for the features see
        :meth:`~kvkeep.scorers.features.FeatureSpec.build`. Without gradients the weights are standardised instead of
        the features, which are many more numbers.
        """
        if torch.is_grad_enabled():
            return self.score((features,), (features,), {})
        with full_precision(features.device):
            wide = torch.promote_types(features.dtype, self.w1.dtype)
            scale = self.input_std.to(wide).reciprocal()  # [H, width]
            w1 = self.w1.to(wide) * scale[..., None]
            b1 = self.b1.to(wide) - (self.input_mean.to(wide)[:, None] @ w1)[:, 0]
            raw = per_head(gelu(per_head(features.to(wide), w1, b1)), self.w2, self.b2)[..., 0]
            return (raw - self.score_mean.to(wide)[:, None]) / self.score_std.to(wide)[:, None]

    def keep(self, features: Tensor) -> Tensor:
        """Keep scores ``[B, H, n]``: ``phi + value_power log |v| - age_power log(1 + age)``.

        What is lost with a token is its attention times its value, so that a small value is worth less; and of two
        tokens of equal future attention the one is worth more that gets it sooner, since there will be other evictions.
        """
        keep, options = self.foreseen(features), self.options
        if options.value_power:
            size = (features.shape[-1] - options.features.age - self.statistics) // 2
            values = features[..., size : 2 * size].to(keep.dtype)
            keep = keep + options.value_power * values.norm(dim=-1).clamp(min=SMALLEST).log()
        return keep - options.age_power * features[..., -1].to(keep.dtype) if options.age_power else keep

"""What a ForesightKV scorer is told of a token in the cache: its key and value, and the attention it has received.

Attention is counted per query head of the group, over the queries since the last eviction (an interval of L) and over
all queries that could see the token (ForesightKV, arXiv 2602.03203, section 3.2). With P the probabilities of the
interval's queries over the tokens held:

    ``s_w(i) = sum of P[q, i] over the last w queries``;  ``cum(i) <- cum(i) + s_L(i)``;
    ``dec(i) <- decay * dec(i) + s_L(i)``, once an eviction.

The sums are running accumulators of the cache's slots; those over the last w queries may be computed from a ring of the
last L queries instead, exactly, since nothing is evicted in between. Either way nothing here is a matrix of attention.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kvkeep.scorers.base import ScorerError

VERSION = 1
NORMALIZE = ("mean", "log", "none")
SMALLEST = 1e-6  # below it no attention is told from none


@dataclass(frozen=True)
class FeatureSpec:
    """Which features, in the order of the vector; a part of the checkpoint.

    Widths are for heads of D dimensions and G query heads a KV head; statistics are statistic-major, head-minor.

    Attributes:
        kv: the key as it is cached (after RoPE) and the value, 2 D.
        extremes: the largest and the smallest attention from a query of the interval, 2 G.
        windows: attention from the last w queries before the eviction, G each; "L" = all of the interval, what is
            longer counts as L.
        cumulative: attention from all queries that could see the token, G.
        decay: the same, faded by this factor at every eviction, G; None leaves it out.
        age: the log of 1 + tokens since the token, 1.
        keys: "post" = as cached; "pre" = with the rotary embedding undone.
        normalize: "mean" = sums are divided by the number of queries that could count, so that neither L nor length
            matters; "log" = the log of these means; "none" = sums, as in the released code.
        version: of the meaning of all these.

    Raises:
        ScorerError: for a value outside these, or no feature at all.
    """

    kv: bool = True
    extremes: bool = False
    windows: tuple[int | str, ...] = (8, 16, 32, "L")
    cumulative: bool = True
    decay: float | None = 0.9
    age: bool = False
    keys: str = "post"
    normalize: str = "mean"
    version: int = VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "windows", tuple(self.windows))
        if self.version != VERSION:
            raise ScorerError(f"features of version {self.version!r} are wanted, this version of kvkeep has {VERSION}")
        if not all(width == "L" or (isinstance(width, int) and width >= 1) for width in self.windows):
            raise ScorerError(f'windows are numbers of queries from 1 on, or "L", not {self.windows}')
        if self.decay is not None and not 0 < self.decay <= 1:
            raise ScorerError(f"the decay of the features must be in (0, 1], or None, not {self.decay}")
        if self.normalize not in NORMALIZE or self.keys not in ("post", "pre"):
            raise ScorerError(
                f"normalize is one of {', '.join(NORMALIZE)} and keys post or pre, "
                f"not {self.normalize!r} and {self.keys!r}"
            )
        if not self.width(1, 1):
            raise ScorerError("a scorer needs a feature: all of them are off")

    @classmethod
    def paper(cls) -> FeatureSpec:
        """The six statistics that the paper means."""
        return cls()

    @classmethod
    def released(cls) -> FeatureSpec:
        """The eight of the released code, whose windows of 8, 16 and 32 queries are all the interval by mistake."""
        return cls(extremes=True, windows=("L", "L", "L", "L"), normalize="none")

    @classmethod
    def best(cls) -> FeatureSpec:
        """The paper's on a log scale, with the age."""
        return cls(age=True, normalize="log")

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> FeatureSpec:
        """The inverse of ``dataclasses.asdict``, lists for tuples allowed.

        Raises:
            ScorerError: for an unknown field, or a bad value.
        """
        unknown = set(record) - {field.name for field in fields(cls)}
        if unknown:
            raise ScorerError(f"features have no {', '.join(sorted(unknown))}")
        return cls(**record)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"windows": list(self.windows)}

    def width(self, head_dim: int, group: int) -> int:
        """How many numbers describe a token."""
        return 2 * head_dim * self.kv + group * self.statistics + self.age

    @property
    def statistics(self) -> int:
        """How many numbers describe it per query head."""
        return 2 * self.extremes + len(self.windows) + self.cumulative + (self.decay is not None)

    # ---- what is kept of every slot while attention is watched

    def sums(self) -> dict[str, int | str]:
        """The running sums over the end of an interval: name -> queries, equal ones once."""
        return {f"last_{width}": width for width in self.windows}

    def accumulators(self, group: int, ring: bool = False) -> dict[str, tuple[tuple[int, ...], float]]:
        """Name -> shape and the number that a token enters with; a ``ring`` of queries replaces those of the interval.

        ``watched`` counts what ``decayed`` would be were all attention 1.
        """
        kept: dict[str, tuple[tuple[int, ...], float]] = {}
        if not ring:
            kept |= dict.fromkeys(self.sums(), ((group,), 0.0))
            if self.extremes:
                kept |= {"most": ((group,), 0.0), "least": ((group,), torch.inf)}
        if self.cumulative:
            kept["cumulative"] = (group,), 0.0
        if self.decay is not None:
            kept |= {"decayed": ((group,), 0.0), "watched": ((), 0.0)}
        return kept

    def counting(self, kept: Container[str], interval: int) -> dict[str, tuple[int, int]]:
        """The fewest and the most queries until the next eviction at which a query counts, for each sum that is kept.

        Where the whole interval has a sum, those that go on for longer get it from there when the interval ends.
        """
        ranges = {name: (1, interval if width == "L" else min(width, interval)) for name, width in self.sums().items()}
        longer = (interval + 1 if "last_L" in kept else 1, sys.maxsize)
        ranges |= dict.fromkeys(("cumulative", "decayed"), longer)
        return {name: counts for name, counts in ranges.items() if name in kept}

    def end(self, kept: Mapping[str, Tensor]) -> None:
        """An interval is over: what it has counted belongs to the longer sums too."""
        for name in ("cumulative", "decayed"):
            if name in kept and "last_L" in kept:
                kept[name].add_(kept["last_L"])

    def begin(self, kept: Mapping[str, Tensor]) -> None:
        """A new interval: its sums start again, and the past fades."""
        for name, tensor in kept.items():
            if name in ("decayed", "watched"):
                tensor.mul_(self.decay)
            elif name != "cumulative":
                tensor.fill_(torch.inf if name == "least" else 0.0)

    def observe(
        self,
        kept: Mapping[str, Tensor],
        probabilities: Tensor,
        queries: Tensor,
        held: Tensor,
        until: Tensor,
        interval: int,
    ) -> None:
        """Count the attention of n queries, in place.

        Args:
            kept: ``[B, H, N, G]`` (``watched``: ``[B, H, N]``) by name.
            probabilities: ``[B, H, G, n, N]``.
            queries: int ``[B, n]``, positions.
            held: int ``[B, H, N]``, positions of the tokens, negative where there is none.
            until: int ``[B, n]``, queries until the next eviction, this one included.
            interval: L.
        """
        total = probabilities.sum(3).transpose(2, 3)  # [B, H, N, G]
        for name, (first, last) in self.counting(kept, interval).items():
            counts = (until >= first) & (until <= last)  # [B, n]
            kept[name].add_(_over(probabilities, counts, total))
        if "watched" in kept:
            kept["watched"].add_((held[:, :, None] <= queries[:, None, :, None]).sum(2))
        if "most" in kept:
            counts = (until <= interval)[:, None, None, :, None]
            kept["most"].copy_(kept["most"].maximum(probabilities.where(counts, 0).amax(3).transpose(2, 3)))
            kept["least"].copy_(kept["least"].minimum(probabilities.where(counts, torch.inf).amin(3).transpose(2, 3)))

    def from_ring(self, probabilities: Tensor) -> dict[str, Tensor]:
        """What the running sums of an interval would be.

        Args:
            probabilities: ``[B, H, G, L, N]``, of its queries, oldest first.
        """
        interval = probabilities.shape[3]
        kept = {}
        for name, width in self.sums().items():
            first = 0 if width == "L" else max(interval - width, 0)
            kept[name] = probabilities[:, :, :, first:].sum(3).transpose(2, 3)
        if self.extremes:
            kept["most"], kept["least"] = (
                extreme(3).transpose(2, 3) for extreme in (probabilities.amax, probabilities.amin)
            )
        return kept

    # ---- the vector

    def build(
        self,
        keys: Tensor,
        values: Tensor,
        kept: Mapping[str, Tensor],
        positions: Tensor,
        query: int | Tensor,
        interval: int,
    ) -> Tensor:
        """The features of tokens at an eviction, or at a different one in every row.

        Args:
            keys, values: ``[B, H, N, D]``.
            kept: accumulators ``[B, H, N, G]`` (``watched``: ``[B, H, N]``) by name.
            positions: int ``[B, H, N]``, of the tokens.
            query: position of the query about to enter; int ``[B, 1, 1]`` where rows differ.
            interval: L.

        Returns:
            ``[B, H, N, width]``, in float32 or wider; not standardised.
        """
        wide = torch.promote_types(keys.dtype, torch.float32)
        parts = [keys, values] if self.kv else []
        parts += [self.scale(name, kept, positions, query, interval) for name in self.order()]
        if self.age:
            parts.append((query - positions).to(wide).clamp(min=0).log1p()[..., None])
        widths = [part.shape[-1] for part in parts]
        features = keys.new_empty(*positions.shape, sum(widths), dtype=wide)
        for part, target in zip(parts, features.split(widths, -1), strict=True):
            target.copy_(part)  # widened on the way
        return features

    def order(self) -> list[str]:
        """The statistics by name, in the order of the vector."""
        names = ["most", "least"] if self.extremes else []
        names += [f"last_{width}" for width in self.windows]
        names += ["cumulative"] if self.cumulative else []
        return names + (["decayed"] if self.decay is not None else [])

    def scale(
        self, name: str, kept: Mapping[str, Tensor], positions: Tensor, query: int | Tensor, interval: int
    ) -> Tensor:
        """One statistic ``[B, H, N, G]`` as the network reads it."""
        value = kept[name]
        if name == "least":  # not seen by the interval's first queries, which gave it nothing
            value = value.masked_fill((positions > query - interval)[..., None], 0.0)
        if self.normalize == "none":
            return value
        if name.startswith("last_"):
            width = dict(self.sums())[name]
            value = value / (interval if width == "L" else min(width, interval))
        elif name == "cumulative":
            value = value / (query - positions).clamp(min=1)[..., None]
        elif name == "decayed":
            value = value / kept["watched"].clamp(min=SMALLEST)[..., None]
        return (value + SMALLEST).log() if self.normalize == "log" else value


def _over(probabilities: Tensor, counts: Tensor, total: Tensor) -> Tensor | float:
    """Sums ``[B, H, N, G]`` over the queries that count, bool ``[B, n]``."""
    if bool(counts.all()):
        return total
    if not bool(counts.any()):
        return 0.0
    weights = counts.to(probabilities.dtype)
    return torch.einsum("bhgqn,bq->bhng", probabilities, weights)

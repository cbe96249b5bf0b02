"""What a policy is: the one protocol that every method fills in, and what it may know.

A policy is an immutable description; all that changes while tokens flow lives in the runtime and is handed in. It
knows tensors and floor 1, never a model. There are two kinds, and the methods below are all that tells them apart.

:class:`EntryPolicy` (``interval = 0``)
    gives every token **one** priority, when it leaves the window. The ``topk`` tokens of highest priority stay.
:class:`AttentionPolicy` (``interval = L >= 1``)
    watches the attention over the tokens held and, every L queries, scores them all; the L lowest go.

Keep scores and priorities are "higher stays" everywhere; among equals the newest token wins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvkeep.budget import Budget
from kvkeep.kernels.place import Loop


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of a layer, for policies that must undo or foresee it.

    Dimension i pairs with i + n in the first 2n dimensions of a head (the "rotate half" layout of Hugging Face).

    Attributes:
        frequencies: float32 ``[n]``, radians per position.
        factor: what cosine and sine are multiplied by (1 except for scaled embeddings).
    """

    frequencies: Tensor
    factor: float = 1.0

    def angles(self, positions: Tensor) -> Tensor:
        """``[...]`` -> ``[..., n]``, in float64: at 100,000 tokens a float32 angle is off by a hundredth."""
        return positions[..., None].double() * self.frequencies.double().to(positions.device)

    def unrotate(self, states: Tensor, positions: Tensor) -> Tensor:
        """Undo the embedding of ``states`` ``[..., n, D]`` at ``positions`` broadcastable to ``[..., n]``."""
        angles = self.angles(positions)
        cos, sin = (angles.cos() / self.factor).to(states.dtype), (angles.sin() / self.factor).to(states.dtype)
        half = self.frequencies.numel()
        first, second, rest = states[..., :half], states[..., half : 2 * half], states[..., 2 * half :]
        return torch.cat([first * cos + second * sin, second * cos - first * sin, rest], -1)


@dataclass(frozen=True)
class Geometry:
    """The layer a policy works in: index, KV heads, query heads per KV head (group), head size, logit scaling.

    ``first_head`` is the index of its first KV head among the model's, above 0 where a layer is spread over devices.
    """

    layer: int
    kv_heads: int
    group: int
    head_dim: int
    scaling: float
    rotary: Rotary | None = None
    first_head: int = 0


def split_slots(slots: int, sinks: int, window: int, interval: int) -> Budget:
    """The budget whose top-k is what ``slots`` leave over.

    Raises:
        ValueError: naming the numbers, where they leave nothing.
    """
    reserved = sinks + window + interval
    slots = index(slots)
    if slots <= reserved:
        parts = f"sinks {sinks} + window {window}" + (f" + interval {interval}" if interval else "")
        raise ValueError(f"a budget of {slots} slots must be above {parts} = {reserved}")
    return Budget(sinks=sinks, window=window, topk=slots - reserved, interval=interval)


Memory = dict[str, Tensor]
"""Running state of a policy in one layer: name -> tensor whose first axis is the batch."""


class Policy:
    """Common to all. Subclasses set the class attributes and document paper, equation and deviations."""

    name: ClassVar[str]
    kind: ClassVar[str]  # "full", "entry" or "attention"
    paper: ClassVar[str] = ""
    oracle: ClassVar[bool] = False  # sees the future: runs offline (replay) only
    learned: ClassVar[bool] = False  # needs a scorer, see kvkeep.policies.learned
    needs_rotary: bool = False  # wants Geometry.rotary filled in

    def __init__(self, budget: Budget | None):
        self.budget = budget

    @classmethod
    def default_budget(cls, slots: int, **overrides: int) -> Budget:
        """Split ``slots`` into sinks, window, topk and interval; ``overrides`` name parts that the user fixes."""
        raise NotImplementedError

    def require_fits(self, config) -> None:
        """Raise ValueError where the policy was made for another model than this config's; called before it is run."""

    def foresee(self, geometry: Geometry, query: Tensor, key: Tensor) -> Memory:
        """Oracles only: a memory filled from the future.

        Args:
            geometry: the layer.
            query: ``[B, Hq, S, D]``, key: ``[B, H, S, D]``, rotated, of the whole sequence, without pads.
        """
        raise NotImplementedError(f"policy {self.name!r} does not look into the future")

    def options(self) -> dict:
        """The options it was made with, for reports and resume keys."""
        return {key: value for key, value in vars(self).items() if key != "budget" and not key.startswith("_")}

    def __repr__(self) -> str:
        options = "".join(f", {key}={value!r}" for key, value in self.options().items())
        return f"{type(self).__name__}({self.budget}{options})"


@dataclass
class Step:
    """n steps of an entry policy: at each, one pair enters the layer and one leaves its window.

    ``entering`` pairs are those of queries q, q+1, ...; ``leaving`` pairs those of tokens q-w, q+1-w, .... Column i of
    both belongs to the same step, so a scorer with memory reads it for the leaving token after writing the entering
    one. Where ``positions`` is negative nothing leaves; the pair there is arbitrary and its priority is ignored.
    """

    geometry: Geometry
    entering: tuple[Tensor, Tensor]  # keys, values [B, H, n, D]
    leaving: tuple[Tensor, Tensor]  # keys, values [B, H, n, D]
    positions: Tensor  # int64 [B, n], of the leaving tokens
    memory: Memory


class EntryPolicy(Policy):
    """Decides before query q attends: scores the token that has just left the window, keeps the best ``topk``."""

    kind = "entry"
    judges_alone: ClassVar[bool] = False
    """Whether a priority depends on the leaving pair and its position alone: it may then be asked for before the token
    leaves, with any entering pair."""

    @classmethod
    def default_budget(cls, slots: int, **overrides: int) -> Budget:
        parts = {"sinks": 4, "window": 256 if slots >= 2048 else 32, "interval": 0} | overrides
        return split_slots(slots, **parts)

    def new_memory(self, geometry: Geometry, batch: int, device: torch.device, dtype: torch.dtype) -> Memory:
        """The state before the first token; ``dtype`` is that of priorities. Stateless policies have none."""
        return {}

    def priority(self, step: Step) -> Tensor:
        """Priorities ``[B, H, n]`` of the leaving tokens, updating ``step.memory`` in place (replace its tensors)."""
        raise NotImplementedError

    def loop(self, geometry: Geometry, dtype: torch.dtype) -> Loop | None:
        """``priority`` and what follows from it, for one token on the CPU, as a compiled loop; None = there is none.

        Asked for when a sequence begins, after :meth:`new_memory`; ``dtype`` is that of priorities.
        """
        return None


@dataclass
class Held:
    """What an attention policy sees when it must choose: the tokens held by one layer at the start of query q.

    All tensors are views of the slots; ``statistics`` are its own, per slot, as :meth:`AttentionPolicy.observe` left
    them. Slots are in no particular order: sort by ``positions`` where neighbourhood matters.
    """

    geometry: Geometry
    query_index: int  # q, the query about to enter
    evictions: int  # how many evictions this row has had before
    keys: Tensor  # [B, H, N, D]
    values: Tensor  # [B, H, N, D]
    positions: Tensor  # int32 [B, H, N]
    statistics: dict[str, Tensor]  # name -> [B, H, N, ...]
    memory: Memory
    queries: Tensor | None  # [B, H, G, r, D], the newest queries, oldest first; None unless asked for
    candidates: Tensor  # bool [B, H, N], True where a token may go: neither sink nor in the window
    count: int  # how many will go


@dataclass
class Observation:
    """The attention of n consecutive queries over the tokens held, themselves included."""

    geometry: Geometry
    query: Tensor  # [B, H, G, n, D]
    positions: Tensor  # int64 [B, n], of the queries
    probabilities: Tensor  # [B, H, G, n, N]
    statistics: dict[str, Tensor]  # views [B, H, N, ...]: update in place
    memory: Memory
    held: Tensor  # int32 [B, H, N], positions of the tokens held; negative where a slot is empty
    until: Callable[[], Tensor]  # int64 [B, n], queries until the next eviction, this one included: 1 = the last one


@dataclass(frozen=True)
class Statistic:
    """A number, or an array of numbers of ``shape``, that belongs to a slot: what a token enters with is ``fill``."""

    shape: tuple[int, ...] = ()
    fill: float = 0.0


class AttentionPolicy(Policy):
    """Decides every ``interval`` queries from attention over the tokens held; needs the queries."""

    kind = "attention"
    statistics: ClassVar[tuple[str, ...]] = ()  # names of numbers per slot, 0 when a token enters

    @classmethod
    def default_budget(cls, slots: int, **overrides: int) -> Budget:
        interval = overrides.get("interval", max(slots // 4, 1))
        if interval < 1:
            raise ValueError(f"policy {cls.name!r} decides every interval: interval must be at least 1, not {interval}")
        parts = {"sinks": 0, "window": interval, "interval": interval} | overrides
        return split_slots(slots, **parts)

    @property
    def recent_queries(self) -> int:
        """How many of the newest queries :meth:`keep_scores` wants to see again."""
        return 0

    def new_memory(self, geometry: Geometry, batch: int, device: torch.device, dtype: torch.dtype) -> Memory:
        """The state before the first token; ``dtype`` is that of softmax and statistics."""
        return {}

    def slot_statistics(self, geometry: Geometry) -> dict[str, Statistic]:
        """What is kept of every slot, in float32 or wider; by default one number for each of ``statistics``."""
        return {name: Statistic() for name in self.statistics}

    def end_interval(self, statistics: dict[str, Tensor]) -> None:
        """Called at query rest and before every eviction: what :meth:`observe` has left undone is due."""

    def begin_interval(self, statistics: dict[str, Tensor]) -> None:
        """Called at query rest, and after every eviction, before the next query attends."""

    def observe(self, seen: Observation) -> None:
        """Called after every query or block of queries."""

    def counting(self, statistics: dict[str, np.ndarray]) -> Loop | None:
        """:meth:`observe` of one query, on the CPU, as a compiled loop; None where there is none.

        Args:
            statistics: of all slots, by name, ``[B, H, slots, ...]``: the loop's, to keep and to write.
        """
        return None

    def keep_scores(self, held: Held) -> Tensor:
        """Keep scores ``[B, H, N]``, or ``[B, 1, N]`` where all heads decide as one."""
        raise NotImplementedError

"""A seeded random choice among the tokens between sinks and window: the floor under every method."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvkeep.budget import Budget
from kvkeep.kernels.place import Loop
from kvkeep.policies.base import EntryPolicy, Geometry, Memory, Step


class Random(EntryPolicy):
    """Random tokens, with sinks and window protected; each KV head draws its own.

    The draw is a hash of (seed, layer, head, position), so it is the same online and offline, alone and in a batch.

    Args:
        seed: any integer.

    Raises:
        ValueError: for another seed.
    """

    name = "random"
    judges_alone = True

    def __init__(self, budget: Budget, seed: int = 0):
        super().__init__(budget)
        require_seed(seed)
        self.seed = seed
        self._bits = (seed + 2**63) % 2**64 - 2**63  # as a signed 64-bit number
        self._streams: dict[tuple, Tensor] = {}

    def new_memory(self, geometry: Geometry, batch: int, device: torch.device, dtype: torch.dtype) -> Memory:
        self.begun(geometry, device)  # here, so that a compiled step only reads it
        return {}

    def priority(self, step: Step) -> Tensor:
        streams = self.begun(step.geometry, step.positions.device)
        return uniform(streams[None, :, None] + step.positions[:, None])

    def loop(self, geometry: Geometry, dtype: torch.dtype) -> Loop:
        return Loop("scores.replace_lowest_at_random", (self.streams(geometry, torch.device("cpu")).numpy(),))

    def begun(self, geometry: Geometry, device: torch.device) -> Tensor:
        """:meth:`streams`, made once."""
        key = geometry.layer, geometry.first_head, geometry.kv_heads, device
        if key not in self._streams:
            self._streams[key] = self.streams(geometry, device)
        return self._streams[key]

    def streams(self, geometry: Geometry, device: torch.device) -> Tensor:
        """Where the draws of a layer's heads begin, int64 ``[H]``."""
        head = geometry.first_head + torch.arange(geometry.kv_heads)
        return mix(mix(mix(torch.tensor(self._bits)) + geometry.layer) + head).to(device)


def uniform(state: Tensor) -> Tensor:
    """A number in [0, 1) for every int64, float32."""
    return (mix(state) & 0xFFFFFF).float() / 2**24


def require_seed(seed: Any) -> None:
    """Raise ValueError for a seed that is no integer."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"a seed is an integer, not {seed!r}")


def mix(state: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 (wrapping); neighbouring inputs give independent-looking bits."""
    state = state + -7046029254386353131  # 0x9E3779B97F4A7C15
    state = (state ^ logical_shift(state, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    state = (state ^ logical_shift(state, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return state ^ logical_shift(state, 31)


def logical_shift(state: Tensor, by: int) -> Tensor:
    """Shift right without copying the sign."""
    return (state >> by) & ((1 << (64 - by)) - 1)

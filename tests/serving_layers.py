"""Layers of the serving floor over memory laid out as an engine might, and the library beside them."""

from __future__ import annotations

import torch

from all_policies import make
from kvkeep.policies.base import Geometry
from kvkeep.runtime.cache import RESIDENCIES
from kvkeep.runtime.geometry import rotary
from kvkeep.serving.entry import EntryLayer, entry_state
from kvkeep.serving.interval import IntervalLayer, interval_state
from kvkeep.serving.pages import Pages, aligned
from tiny import tiny_model

HEADS, GROUP, SIZE = 2, 3, 8


def geometry_for(policy, layer=1):
    config = tiny_model().config
    embedding = rotary(config, layer, SIZE) if policy.needs_rotary else None
    return Geometry(layer, HEADS, GROUP, SIZE, SIZE**-0.5, embedding)


def make_layer(policy, blocks=4, dtype=torch.float64, backend="auto", seed=0, surplus=3, plain=False):
    """A layer over blocks with ``surplus`` slots that must stay untouched; numbers lie in an order of their own."""
    geometry = geometry_for(policy)
    kind = entry_state if policy.kind == "entry" else interval_state
    state = kind(policy, geometry, dtype)
    slots = policy.budget.slots + surplus
    head = slots * 2 * SIZE  # elements
    pair_bytes = HEADS * head * dtype.itemsize
    page = state.page_bytes(pair_bytes) // dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randn(blocks * page + 7 * 8, dtype=dtype, generator=generator)  # garbage, not zeros
    cache = memory[56 : 56 + blocks * page].as_strided((blocks, HEADS, slots, 2 * SIZE), (page, head, 2 * SIZE, 1), 56)
    place = (torch.arange(head) if plain else torch.randperm(head, generator=generator)).view(slots, 2 * SIZE)
    pages = Pages(cache, place, SIZE, aligned(pair_bytes), state)
    if policy.kind == "entry":
        return EntryLayer(policy, geometry, pages, backend)
    return IntervalLayer(policy, geometry, pages)


class Request:
    """One request's tokens of one layer, and what the library holds of them."""

    def __init__(self, policy, length, seed, dtype=torch.float64):
        generator = torch.Generator().manual_seed(seed)
        self.query = torch.randn(1, HEADS * GROUP, length, SIZE, dtype=dtype, generator=generator) * 2
        self.keys, self.values = torch.randn(2, 1, HEADS, length, SIZE, dtype=dtype, generator=generator)
        self.residency = RESIDENCIES[policy.kind](policy, geometry_for(policy), self.keys, self.values)
        self.seen, self.block = 0, None

    def piece(self, count):
        at = slice(self.seen, self.seen + count)
        return self.query[:, :, at], self.keys[:, :, at], self.values[:, :, at]

    def follow(self, count):
        """Let the library take in the same tokens, one by one; returns its attention ``[1, Hq, n, D]``."""
        outputs = []
        for _ in range(count):
            outputs.append(self.residency.advance(*self.piece(1)))
            self.seen += 1
        return torch.cat(outputs, 2)

    def residency_holds(self):
        slots = self.residency.slots
        return slots.view(slots.positions)[0].sort(-1).values


def paged_attention(layer, request):
    """What an engine's kernel reads: the newest query over the first slots of the block, in whatever order."""
    assert not layer.attends
    count = layer.held_tokens(request.block, request.seen).shape[-1]
    block = torch.tensor([request.block])
    keys, values = layer.pages.read(block, layer.pages.every(0, count, 1))
    query = request.query[:, :, request.seen - 1 : request.seen].unflatten(1, (HEADS, GROUP))[:, :, :, 0]
    weights = (query @ keys.transpose(-1, -2) * SIZE**-0.5).softmax(-1)
    return (weights @ values).flatten(1, 2)  # [1, Hq, D]


__all__ = ["Request", "geometry_for", "make", "make_layer", "paged_attention"]

"""Caches filled synthetically to a given context, and what they hold.

Contenders are policies, and three names of their own for caches that keep everything: ``full`` (transformers'
DynamicCache, which concatenates), ``full_preallocated`` (the same without) and ``static`` (transformers' StaticCache).
A :class:`WritesOnly` layer is the reference that overhead is measured against.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from kvkeep import policies as registry
from kvkeep import scorers
from kvkeep.budget import Budget
from kvkeep.evaluation.contenders import NONE, Contender, line_up
from kvkeep.policies.base import Geometry, Policy
from kvkeep.runtime.cache import EvictingCache, EvictingLayer
from kvkeep.runtime.geometry import text_config

FULL = ("full", "full_preallocated", "static")


class PreallocatedLayer(DynamicLayer):
    """A full cache that writes into a buffer with room for ``spare`` more tokens instead of concatenating."""

    def __init__(self, keys: Tensor, values: Tensor, spare: int):
        super().__init__()
        self.lazy_initialization(keys, values)
        self.length = keys.shape[2]
        self.buffers = [
            torch.cat([tensor, tensor.new_zeros(*tensor.shape[:2], spare, tensor.shape[3])], 2)
            for tensor in (keys, values)
        ]
        self.keys, self.values = (buffer[:, :, : self.length] for buffer in self.buffers)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        stop = self.length + key_states.shape[2]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.length : stop] = states
        self.length = stop
        self.keys, self.values = (buffer[:, :, :stop] for buffer in self.buffers)
        return self.keys, self.values


class WritesOnly(DynamicLayer):
    """The floor under any policy of a budget: writes each pair into a slot, shows as many slots, decides nothing.

    It keeps no position, score or statistic. An entry policy's ``rest`` slots are overwritten in turn; those of a
    policy with an interval fill up from ``rest`` to ``slots`` and, where the policy would evict, are taken for free
    again.

    Args:
        keys, values: ``[batch, kv_heads, n, head_dim]``, what is held, rest <= n <= slots.
        budget: of the policy.
        columns: tokens seen.
    """

    def __init__(self, keys: Tensor, values: Tensor, budget: Budget, columns: int):
        super().__init__()
        self.lazy_initialization(keys, values)
        self.rest, self.capacity, self.columns = budget.rest, budget.slots, columns
        self.held = keys.shape[2]
        room = budget.slots - self.held
        self.buffers = [
            torch.cat([tensor.new_zeros(*tensor.shape[:2], room, tensor.shape[3]), tensor], 2)
            for tensor in (keys, values)
        ]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self.rest == self.capacity:
            slot = self.columns % self.capacity
        else:
            self.held = (self.rest if self.held == self.capacity else self.held) + 1
            slot = self.capacity - self.held
        self.columns += 1
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, slot : slot + 1] = states
        self.keys, self.values = (buffer[:, :, self.capacity - self.held :] for buffer in self.buffers)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.columns


def contenders(
    names: Sequence[str],
    seed: int = 0,
    at_rest: bool = False,
    overrides: Mapping[str, int | None] = NONE,
    given: Mapping[str, Sequence[tuple[Any, str]]] = NONE,
) -> list[Contender]:
    """Contenders from names: those of ``FULL``, and policies with options as ``kvkeep evaluate`` takes them.

    Args:
        names: each once.
        seed, at_rest, overrides, given: as :func:`kvkeep.evaluation.contenders.line_up`; ``given`` are scorers.

    Raises:
        ValueError: for no name, an unknown or a repeated one, an oracle, or a scorer for a policy that takes no part.
    """
    evicting = [name for name in names if name not in FULL]
    found = {name: Contender(name) for name in names if name in FULL}
    lined_up = line_up(evicting, seed, at_rest, overrides, given) if evicting or given or not names else []
    for contender in lined_up:
        if registry.describe(contender.name).oracle:
            raise ValueError(f"policy {contender.name!r} is an oracle: it cannot decode")
    repeated = sorted({name for name in names if list(names).count(name) > 1})
    if repeated:
        raise ValueError(f"policy {repeated[0]!r} is named twice")
    return [*found.values(), *lined_up]


def untrained(contender: Contender, config: PreTrainedConfig, budget: int) -> Contender:
    """The contender with a fresh scorer where it needs one: as costly as a trained one, for random weights."""
    learned = contender.name not in FULL and registry.describe(contender.name).learned
    if contender.scorer is not None or not learned:
        return contender
    return contender.with_scorer(scorers.new(contender.name, text_config(config), budget), "untrained")


def evicting(found: Sequence[Contender]) -> list[Contender]:
    """Those with a budget."""
    return [contender for contender in found if contender.name not in FULL]


# ---------------------------------------------------------------------------------------------------------------------
# Filling


class States:
    """Random queries, keys and values ``[batch, heads, n, head_dim]`` of a model's shape: one draw, cut to length.

    Every row, layer and cache gets the same numbers; what they cost does not depend on them.

    Args:
        model: whose shape, dtype and device they have.
        batch: rows, which share one memory.
        longest: tokens that can be had.
        seed: of the draw.
    """

    def __init__(self, model: PreTrainedModel, batch: int, longest: int, seed: int = 0):
        config = text_config(model.config)
        self.batch, self.longest, self.device, self.dtype = batch, longest, model.device, model.dtype
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.query_heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._generator = torch.Generator(device=model.device).manual_seed(seed)
        self._keys, self._values = self._draw(self.kv_heads, longest), self._draw(self.kv_heads, longest)

    def _draw(self, heads: int, count: int) -> Tensor:
        shape = (1, heads, count, self.head_dim)
        drawn = torch.randn(shape, generator=self._generator, device=self.device).to(self.dtype)
        return drawn.expand(self.batch, -1, -1, -1)

    def pair(self, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of ``count`` tokens.

        Raises:
            ValueError: for more than there are.
        """
        if count > self.longest:
            raise ValueError(f"states were drawn for {self.longest} tokens, not {count}")
        return self._keys[:, :, :count], self._values[:, :, :count]

    def query(self, count: int) -> Tensor:
        return self._draw(self.query_heads, count)


def longest(contexts: Sequence[int], budget: int) -> int:
    """Tokens that :class:`States` need for caches of these contexts, wherever an interval puts them."""
    return max(contexts) + budget + 1


def filled(model: PreTrainedModel, contender: Contender, budget: int, context: int, states: States, spare: int):
    """A cache that has seen about ``context`` tokens, without a forward for each.

    Args:
        contender: with its scorer.
        budget: slots per KV head.
        context: tokens seen; of a policy with an interval, the nearest number half an interval past an eviction.
        states: of :func:`longest` tokens.
        spare: tokens that will follow, which the preallocated caches have room for.

    Returns:
        (cache, tokens seen).
    """
    config = text_config(model.config)
    if contender.name in FULL:
        return _filled_full(config, contender.name, context, states, spare), context
    policy = contender.policy(budget)
    held, seen = phase(policy.budget, context)
    return filled_policy(config, policy, held, seen, states), seen


def phase(budget: Budget, context: int, evicting: bool = False) -> tuple[int, int]:
    """Tokens held and tokens seen near ``context``: half an interval after an eviction, or one query before the next.

    >>> phase(Budget(0, 8, 24, interval=8), 100), phase(Budget(0, 8, 24, interval=8), 100, evicting=True)
    ((36, 100), (40, 96))
    """
    if not budget.interval:
        return budget.rest, context
    ahead = budget.interval if evicting else budget.interval // 2
    intervals = max(round((context - budget.rest - ahead) / budget.interval), 0)
    return budget.rest + ahead, budget.rest + ahead + intervals * budget.interval


@torch.no_grad()
def filled_policy(config: PreTrainedConfig, policy: Policy, held: int, seen: int, states: States) -> EvictingCache:
    """An evicting cache of a policy that has seen so many tokens and holds so many."""
    cache = EvictingCache(config, policy)
    keys, values = states.pair(held)
    query = states.query(held)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, EvictingLayer):
            layer.fill(query, keys, values, seen)
        elif isinstance(layer, DynamicLayer):
            cache.layers[index].update(*states.pair(seen))
    return cache


def writes_only(config: PreTrainedConfig, budget: Budget, held: int, seen: int, states: States) -> Cache:
    """The reference beside :func:`filled_policy`; layers that a policy does not bound stay as they are."""
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = WritesOnly(*states.pair(held), budget, seen)
        elif isinstance(layer, DynamicLayer):
            layer.update(*states.pair(seen))
    return cache


@torch.no_grad()
def _filled_full(config: PreTrainedConfig, name: str, context: int, states: States, spare: int) -> Cache:
    keys, values = states.pair(context)
    static = name == "static"
    cache = StaticCache(config=config, max_cache_len=context + spare) if static else DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if name == "full_preallocated" and type(layer) is DynamicLayer:
            cache.layers[index] = PreallocatedLayer(keys, values, spare)
        elif isinstance(layer, DynamicLayer | StaticLayer):
            layer.update(keys, values)
    return cache


# ---------------------------------------------------------------------------------------------------------------------
# Bytes


def cache_bytes(cache: Cache) -> tuple[int, int]:
    """(Bytes of keys and values, bytes of all side state); spare room of ``full_preallocated`` is not counted."""
    pairs = sum(
        layer.keys.nbytes + layer.values.nbytes
        for layer in cache.layers
        if getattr(layer, "keys", None) is not None and isinstance(layer.keys, Tensor)
    )
    return pairs, cache.nbytes - pairs if isinstance(cache, EvictingCache) else 0


def read_bytes(cache: Cache, held: int | None = None) -> int:
    """Bytes of keys and values that a step attends to.

    Args:
        cache: filled.
        held: tokens per KV head of the evicting layers, which may have free slots; None = all that is there.
    """
    total = 0
    for layer in cache.layers:
        if not isinstance(getattr(layer, "keys", None), Tensor):
            continue
        size = layer.keys.nbytes + layer.values.nbytes
        evicts = isinstance(layer, EvictingLayer) and held is not None
        total += size * held // layer.keys.shape[2] if evicts else size
    return total


def reachable_bytes(root: object) -> int:
    """Bytes of every tensor that a cache holds on to, however: counted by walking its objects, storages once.

    Independent of what the cache says of itself. Policies, configs, networks, a layer's geometry and what is called
    (from a function one can walk to every module) are not its own.
    """
    storages: dict[int, int] = {}
    for tensor in _tensors(root, set()):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(found: object, visited: set[int]) -> Iterator[Tensor]:
    if isinstance(found, Policy | PreTrainedConfig | Geometry | ModuleType | str) or callable(found):
        return
    if id(found) in visited:
        return
    visited.add(id(found))
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Mapping):
        for part in found.values():
            yield from _tensors(part, visited)
    elif isinstance(found, list | tuple | set):
        for part in found:
            yield from _tensors(part, visited)
    elif hasattr(found, "__dict__"):
        yield from _tensors(vars(found), visited)


def bytes_of(states: States, tokens: int, layers: int) -> int:
    """Keys and values of ``tokens`` tokens in all layers: what a cache of them costs, for planning."""
    return tokens * layers * math.prod((2, states.batch, states.kv_heads, states.head_dim)) * states.dtype.itemsize

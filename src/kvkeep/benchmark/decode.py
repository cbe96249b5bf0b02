"""Time per generated token with caches filled synthetically to a given context.

Every row runs the same model through the same attention function (``"kvkeep"``), so that the caches alone differ: a
stock bfloat16 cache on CPU goes through a grouped-heads kernel that is several times slower at one query and would
flatter us. Rows take turns, one token each, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvkeep import policies as registry
from kvkeep.runtime.cache import EvictingCache, EvictingLayer, cache_keyword
from kvkeep.runtime.geometry import text_config

FULL = ("full", "full_preallocated")  # transformers' DynamicCache with its concatenation, and the same without


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


@dataclass
class Row:
    """One cache under test, and what it cost."""

    policy: str
    budget: int | None
    context: int
    batch: int
    cache: Cache
    milliseconds: list[float]
    kv_bytes: int = 0


def decode(
    model: PreTrainedModel,
    policies: Sequence[str],
    budget: int,
    contexts: Sequence[int],
    batches: Sequence[int] = (1,),
    repetitions: int = 9,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Milliseconds per token of each policy, context and batch.

    Args:
        model: loaded with ``attn_implementation="kvkeep"``.
        policies: registered names, ``full`` and ``full_preallocated``.
        budget: slots per KV head of the evicting caches.
        contexts: tokens seen before the measured ones. Bounded caches hold ``budget`` of them.
        repetitions: measured tokens per row, after two that are not counted.
        progress: called with (done, total) rounds.

    Returns:
        ``{"rows": [...], "settings": {...}}`` in the form of ``kvkeep benchmark --json``; ``ratio`` is the median over
        that of the first evicting policy at the shortest context and the same batch (1 for itself).

    Raises:
        ValueError: for an unknown policy or an oracle, fewer than five repetitions, a context below the budget.
    """
    check(policies, budget, contexts, repetitions)
    rows: list[Row] = []
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for batch in batches:
            group = [
                Row(name, None if name in FULL else budget, context, batch, cache, [])
                for context in contexts
                for name in policies
                for cache in [filled_cache(model, name, budget, context, batch, repetitions + 2, generator)]
            ]
            for turn in range(repetitions + 2):
                for row in group:
                    took = step(model, row, turn)
                    if turn >= 2:
                        row.milliseconds.append(took)
                if progress is not None:
                    progress(len(rows) * (repetitions + 2) + turn + 1, len(batches) * (repetitions + 2))
            rows += group
            for row in group:
                row.kv_bytes = cache_bytes(row.cache)
                row.cache = None
    return {"rows": report(rows, model), "settings": settings(model, budget, repetitions, seed)}


def check(policies: Sequence[str], budget: int, contexts: Sequence[int], repetitions: int) -> None:
    """Raise ValueError for what :func:`decode` cannot measure, before anything slow starts."""
    if repetitions < 5:
        raise ValueError(f"a median of {repetitions} repetitions says little: take at least 5")
    if min(contexts) < budget:
        raise ValueError(f"a context of {min(contexts)} tokens does not fill a budget of {budget}")
    for name in policies:
        if name not in FULL and registry.describe(name).oracle:
            raise ValueError(f"policy {name!r} is an oracle: it cannot decode")


def step(model: PreTrainedModel, row: Row, turn: int) -> float:
    """Milliseconds of one token for every row of the batch."""
    ids = torch.full((row.batch, 1), 1 + turn, device=model.device)
    positions = torch.full((row.batch, 1), row.context + turn, device=model.device)
    _synchronise(model.device)
    start = time.perf_counter()
    model(ids, position_ids=positions, use_cache=True, **{cache_keyword(model): row.cache})
    _synchronise(model.device)
    return 1000 * (time.perf_counter() - start)


def filled_cache(
    model: PreTrainedModel, name: str, budget: int, context: int, batch: int, spare: int, generator: torch.Generator
) -> Cache:
    """A cache that has seen ``context`` tokens, random ones, without a forward for each."""
    config = text_config(model.config)
    if name in FULL:
        cache = DynamicCache(config=config)
    else:
        cache = EvictingCache(config, registry.create(name, budget))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, EvictingLayer | DynamicLayer):
            continue
        count = context
        if isinstance(layer, EvictingLayer):
            rest, interval = layer.policy.budget.rest, layer.policy.budget.interval
            count = rest + ((context - rest) % interval if interval else 0)  # what it would hold by now

        def states(heads: int, count=count) -> Tensor:
            shape = (batch, heads, count, head_dim)
            return torch.randn(shape, generator=generator).to(device=model.device, dtype=model.dtype)

        keys, values = states(config.num_key_value_heads), states(config.num_key_value_heads)
        if isinstance(layer, EvictingLayer):
            layer.fill(states(config.num_attention_heads), keys, values, context)
        elif name == "full_preallocated":
            cache.layers[index] = PreallocatedLayer(keys, values, spare)
        else:
            layer.update(keys, values)
    return cache


def cache_bytes(cache: Cache) -> int:
    """Bytes of the tokens held (spare room of the preallocated cache not counted)."""
    if isinstance(cache, EvictingCache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.keys is not None)


def report(rows: list[Row], model: PreTrainedModel) -> list[dict]:
    """Rows as JSON wants them."""
    dtype = str(model.dtype).removeprefix("torch.")
    result = []
    for row in rows:
        peers = [peer for peer in rows if peer.batch == row.batch and peer.budget is not None] or [row]
        reference = statistics.median(min(peers, key=lambda peer: peer.context).milliseconds)
        median = statistics.median(row.milliseconds)
        result.append(
            {
                "what": "decode",
                "policy": row.policy,
                "budget": row.budget,
                "context": row.context,
                "batch": row.batch,
                "dtype": dtype,
                "ms_best": round(min(row.milliseconds), 3),
                "ms_median": round(median, 3),
                "ratio": round(median / reference, 3),
                "kv_bytes": row.kv_bytes,
                "peak_rss": None,
            }
        )
    return result


def settings(model: PreTrainedModel, budget: int, repetitions: int, seed: int) -> dict:
    return {
        "model": model.config.name_or_path,
        "budget": budget,
        "repetitions": repetitions,
        "seed": seed,
        "threads": torch.get_num_threads(),
        "device": str(model.device),
        "load_average": round(os.getloadavg()[0], 2),
        "attention": model.config._attn_implementation,
        "torch": torch.__version__,
    }


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

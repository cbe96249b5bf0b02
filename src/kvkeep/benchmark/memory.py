"""Bytes: what a cache holds by its own account, by the formula and by walking its objects; then and after many tokens.

``slots x 2 x head_dim x itemsize x kv_heads x layers x rows`` for keys and values, and beside it the side state:
positions and numbers per slot, and the memory of a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from kvkeep.benchmark.caches import (
    FULL,
    States,
    bytes_of,
    cache_bytes,
    evicting,
    filled,
    filled_policy,
    longest,
    phase,
    reachable_bytes,
)
from kvkeep.benchmark.decode import decoder
from kvkeep.benchmark.limit import Bandwidth, weight_bytes
from kvkeep.benchmark.peak import require_memory
from kvkeep.benchmark.timing import WARM_UP, Job, digits, in_turns, require_turns, row
from kvkeep.evaluation.contenders import Contender
from kvkeep.runtime.cache import EvictingCache, EvictingLayer
from kvkeep.runtime.geometry import bounded_layers, text_config

TOKENS = 4000
COUNTERS = 64  # bytes a row and layer that a cache need not tell of


def memory(
    model: PreTrainedModel,
    contenders: Sequence[Contender],
    budget: int,
    batch: int = 1,
    tokens: int = TOKENS,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict]:
    """Bytes of every policy's cache when full, and what it has grown by after ``tokens`` more.

    The tokens are synthetic and enter every bounded layer one at a time.

    Returns:
        Rows: ``kv_bytes`` all that the bounded layers hold, found by walking them; ``side_bytes`` what of it is not
        keys and values by the formula; ``grown_bytes`` what is held after the tokens less that before (0, or the
        cache grows); ``context`` the tokens.

    Raises:
        ValueError: for no policy that evicts.
        RuntimeError: if keys and values are not what the formula says, or the cache's account leaves something out.
    """
    check(contenders)
    subjects = evicting(contenders)
    config = text_config(model.config)
    rows = []
    states = States(model, batch, longest([budget], budget), seed)
    query, pair = states.query(1), states.pair(1)
    for number, contender in enumerate(subjects):
        policy = contender.policy(budget)
        cache = filled_policy(config, policy, *phase(policy.budget, budget, evicting=True), states)
        formula = bytes_of(states, policy.budget.slots, sum(bounded_layers(config)))
        before = {index: reachable_bytes(layer.residency) for index, layer in enumerate(cache.layers) if _ours(layer)}
        held = sum(before.values())
        _require_account(contender.title, cache, formula, held, batch * len(before))
        for index in before:
            layer = cache.layers[index]
            with torch.no_grad():
                for _ in range(tokens):
                    layer.fill(query, *pair, layer.columns + 1)
        after = sum(reachable_bytes(cache.layers[index].residency) for index in before)
        common = {"budget": budget, "context": tokens, "batch": batch}
        sizes = {"kv_bytes": held, "side_bytes": held - formula, "grown_bytes": after - held}
        rows.append(row("memory", contender.title, model.dtype, **common, **sizes))
        if progress is not None:
            progress(number + 1, len(subjects))
    return rows


def check(contenders: Sequence[Contender]) -> None:
    """Raise ValueError for what :func:`memory` cannot measure."""
    if not evicting(contenders):
        raise ValueError("memory is that of policies that evict: name one")


def _ours(layer: object) -> bool:
    return isinstance(layer, EvictingLayer)


def _require_account(title: str, cache: EvictingCache, formula: int, held: int, rows: int) -> None:
    """Raise RuntimeError unless keys and values take what the formula says and the cache tells of all it holds."""
    ours = [layer for layer in cache.layers if _ours(layer)]
    pairs = sum(layer.keys.nbytes + layer.values.nbytes for layer in ours)
    if pairs != formula:
        raise RuntimeError(f"{title}: keys and values take {pairs} bytes, by the formula {formula}")
    told = sum(layer.residency.nbytes for layer in ours)
    if not told <= held <= told + COUNTERS * rows:
        raise RuntimeError(f"{title}: {held} bytes are held, and the cache tells of {told}")


def capacity(
    model: PreTrainedModel,
    contenders: Sequence[Contender],
    budget: int,
    context: int,
    kv_memory: int,
    repetitions: int = 5,
    seed: int = 0,
    bandwidth: Bandwidth | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict]:
    """The largest batch whose cache fits into ``kv_memory`` bytes at a context, and what it decodes per second.

    Returns:
        Rows: ``batch`` the largest, ``kv_bytes`` what it takes (side state included), ``ratio`` its throughput over
        that of the first contender that keeps everything, null without one.

    Raises:
        ValueError: for fewer than five repetitions, a context below the budget, or a memory too small for a single row.
    """
    check_capacity(contenders, budget, context, repetitions)
    spare = repetitions + WARM_UP
    one_row = States(model, 1, longest([context], budget), seed)
    batches = {}
    for contender in contenders:
        size = sum(cache_bytes(filled(model, contender, budget, context, one_row, spare)[0]))
        if size > kv_memory:
            raise ValueError(
                f"{contender.title} needs {size / 1e6:.1f} MB for one row at {context} tokens, more than the "
                f"{kv_memory / 1e6:.1f} MB given"
            )
        batches[contender.title] = kv_memory // size
    require_memory(len(contenders) * kv_memory, model.device, "the caches of all contenders together")
    group = []
    for contender in contenders:
        states = States(model, batches[contender.title], longest([context], budget), seed)
        group.append(decoder(model, contender, budget, context, states.batch, states, spare))
    taken = in_turns([Job(one) for one in group], repetitions, model.device, progress)
    rows = []
    for one, times in zip(group, taken, strict=True):
        pairs, side = cache_bytes(one.cache)
        found = row("capacity", one.contender.title, model.dtype, times, context=context, batch=one.batch)
        found["tokens_per_second"] = digits(1000 * one.batch / found["ms_median"])
        found |= {"kv_bytes": pairs + side, "side_bytes": side}
        if one.contender.name not in FULL:
            found["budget"] = budget
        if bandwidth is not None:
            found["floor_ms"] = digits(bandwidth.floor(weight_bytes(model), pairs))
        rows.append(found)
    reference = next((found["tokens_per_second"] for found in rows if found["budget"] is None), None)
    for found in rows if reference is not None else ():
        found["ratio"] = round(found["tokens_per_second"] / reference, 3)
    return rows


def check_capacity(contenders: Sequence[Contender], budget: int, context: int, repetitions: int) -> None:
    """Raise ValueError for what :func:`capacity` cannot measure."""
    require_turns(repetitions)
    if evicting(contenders) and context < budget:
        raise ValueError(f"a context of {context} tokens does not fill a budget of {budget}")

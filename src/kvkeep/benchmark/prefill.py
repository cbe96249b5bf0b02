"""A long prompt in one layer: read under a policy against causal attention over all of it.

Sparse prefill keeps and shows exactly what token-by-token decoding would have, so its work is linear in the length.
The reference is torch's causal ``scaled_dot_product_attention`` at the same shapes, with grouped heads or with heads
repeated before, whichever is faster here, and without the cost of storing anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from kvkeep.benchmark.caches import States, evicting
from kvkeep.benchmark.peak import alone
from kvkeep.benchmark.shapes import load
from kvkeep.benchmark.timing import Job, in_turns, require_turns, row
from kvkeep.evaluation.contenders import Contender
from kvkeep.runtime.cache import EvictingCache, EvictingLayer
from kvkeep.runtime.geometry import text_config

REFERENCE = "sdpa"


def prefill(
    model: PreTrainedModel,
    contenders: Sequence[Contender],
    budget: int,
    lengths: Sequence[int],
    batch: int = 1,
    repetitions: int = 5,
    seed: int = 0,
    source: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict]:
    """Milliseconds of one layer for prompts of several lengths.

    Args:
        model: whose first bounded layer's shape is taken; its weights are not used.
        contenders: those that keep everything are passed over.
        budget: slots per KV head.
        lengths: of the prompt.
        batch: rows.
        repetitions: measured calls, after two that are not counted.
        seed: of the random queries, keys and values.
        source: a name to load the model by; then also ``peak_rss``, from one process a row.
        progress: called with (done, total) turns.

    Returns:
        Rows; ``ratio`` is the median over that of the row "sdpa" of the same length: 0.2 is five times faster.

    Raises:
        ValueError: for fewer than five repetitions, no policy that evicts, or a length within the budget.
    """
    check(contenders, budget, lengths, repetitions)
    subjects = evicting(contenders)
    rows = []
    for number, length in enumerate(lengths):
        states = States(model, batch, length, seed)
        query, (keys, values) = states.query(length), states.pair(length)
        jobs = [Job(lambda q=query, k=keys, v=values, way=way: way(q, k, v)) for way in (grouped, repeated)]
        for contender in subjects:
            jobs.append(ingesting(model, contender, budget, query, keys, values))

        def tell(done: int, total: int, number=number) -> None:
            if progress is not None:
                progress(number * total + done, len(lengths) * total)

        taken = in_turns(jobs, repetitions, model.device, tell)
        dense = min(taken[:2], key=statistics.median)
        for name, times in zip([REFERENCE, *(one.title for one in subjects)], [dense, *taken[2:]], strict=True):
            ratio = round(statistics.median(times) / statistics.median(dense), 4)
            size = None if name == REFERENCE else budget
            rows.append(row("prefill", name, model.dtype, times, budget=size, context=length, batch=batch, ratio=ratio))
    if source is not None:
        who = [(length, one) for length in lengths for one in (None, *subjects)]
        for found, (length, one) in zip(rows, who, strict=True):
            found["peak_rss"] = alone(prefill_alone, model.device, source, found["dtype"], one, budget, length, batch)
    return rows


def check(contenders: Sequence[Contender], budget: int, lengths: Sequence[int], repetitions: int) -> None:
    """Raise ValueError for what :func:`prefill` cannot measure."""
    require_turns(repetitions)
    if not evicting(contenders):
        raise ValueError("sparse prefill is that of policies that evict: name one")
    if min(lengths) <= budget:
        raise ValueError(f"a prompt of {min(lengths)} tokens is within the budget of {budget}: nothing would be sparse")


def ingesting(model, contender: Contender, budget: int, query: Tensor, keys: Tensor, values: Tensor) -> Job:
    """A new layer that reads the whole prompt."""
    config, policy = text_config(model.config), contender.policy(budget)

    def fresh() -> tuple[EvictingLayer]:
        cache = EvictingCache(config, policy)
        return (next(layer for layer in cache.layers if isinstance(layer, EvictingLayer)),)

    return Job(lambda layer: layer.fill(query, keys, values, keys.shape[2]), fresh)


def grouped(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)


def repeated(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    group = query.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(group, 1) for tensor in (keys, values))
    return scaled_dot_product_attention(query, keys, values, is_causal=True)


def prefill_alone(
    name: str, dtype: str, contender: Contender | None, budget: int, length: int, batch: int, device: str
) -> None:
    """One prompt in a process of its own; a contender of None is the reference."""
    model = load(name, dtype, device)
    states = States(model, batch, length)
    query, (keys, values) = states.query(length), states.pair(length)
    with torch.no_grad():
        if contender is None:
            grouped(query, keys, values)
        else:
            job = ingesting(model, contender, budget, query, keys, values)
            job.call(*job.prepare())

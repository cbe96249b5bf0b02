"""Time per generated token with caches filled synthetically to a given context.

Every row runs the same model through the same attention function (``"kvkeep"``), so that the caches alone differ: a
stock bfloat16 cache on CPU goes through a grouped-heads kernel that is several times slower at one query and would
flatter us. Rows take turns, one token each, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import Cache, PreTrainedModel

from kvkeep.benchmark.caches import (
    FULL,
    States,
    bytes_of,
    cache_bytes,
    evicting,
    filled,
    longest,
    phase,
    read_bytes,
)
from kvkeep.benchmark.limit import Bandwidth, weight_bytes
from kvkeep.benchmark.peak import alone, require_memory
from kvkeep.benchmark.shapes import load
from kvkeep.benchmark.timing import WARM_UP, Job, digits, in_turns, require_turns, row
from kvkeep.evaluation.contenders import Contender
from kvkeep.runtime.cache import cache_keyword


@dataclass
class Decoder:
    """One cache under test: every call is one token for every row of the batch."""

    model: PreTrainedModel
    contender: Contender
    cache: Cache
    seen: int
    context: int
    batch: int

    def __call__(self) -> None:
        ids = torch.full((self.batch, 1), 1 + self.seen % 7, device=self.model.device)
        positions = torch.full((self.batch, 1), self.seen, device=self.model.device)
        self.model(ids, position_ids=positions, use_cache=True, **{cache_keyword(self.model): self.cache})
        self.seen += 1


def decode(
    model: PreTrainedModel,
    contenders: Sequence[Contender],
    budget: int,
    contexts: Sequence[int],
    batches: Sequence[int] = (1,),
    repetitions: int = 9,
    seed: int = 0,
    bandwidth: Bandwidth | None = None,
    source: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict]:
    """Milliseconds per token of each contender, context and batch.

    Args:
        model: loaded with ``attn_implementation="kvkeep"``.
        contenders: of :func:`kvkeep.benchmark.caches.contenders`, learned ones with their scorers.
        budget: slots per KV head of the evicting caches.
        contexts: tokens seen before the measured ones. Bounded caches hold ``budget`` of them; those of a policy with
            an interval are measured half an interval after an eviction. What is done once in a window or interval is in
            :func:`kvkeep.benchmark.overhead.overhead`, not in a median of tokens.
        batches: rows decoded together.
        repetitions: measured tokens per row, after two that are not counted.
        seed: of the synthetic keys and values.
        bandwidth: for ``floor_ms``; None leaves it out.
        source: a name to load the model by; then also ``peak_rss``, from one process a row.
        progress: called with (done, total) rounds.

    Returns:
        Rows; ``ratio`` is the median over that of the first evicting policy at the shortest context and the same batch
        (1 for itself).

    Raises:
        ValueError: for fewer than five repetitions, a context below the budget, or caches that do not fit in memory.
    """
    check(contenders, budget, contexts, repetitions)
    rows: list[dict] = []
    spare = repetitions + WARM_UP
    for number, batch in enumerate(batches):
        require_memory(planned(model, contenders, budget, contexts, batch, spare), model.device, f"batch {batch}")
        states = States(model, batch, longest(contexts, budget), seed)
        group = [
            decoder(model, contender, budget, context, batch, states, spare)
            for context in contexts
            for contender in contenders
        ]

        def tell(done: int, total: int, number=number) -> None:
            if progress is not None:
                progress(number * total + done, len(batches) * total)

        taken = in_turns([Job(one) for one in group], repetitions, model.device, tell)
        rows += _rows(model, budget, group, taken, bandwidth)
        del group, states  # before the next batch's are made
    if source is not None:
        for found, (contender, context, batch) in zip(rows, _in_order(contenders, contexts, batches), strict=True):
            given = (source, found["dtype"], contender, budget, context, batch)
            found["peak_rss"] = alone(decode_alone, model.device, *given)
    return rows


def check(contenders: Sequence[Contender], budget: int, contexts: Sequence[int], repetitions: int) -> None:
    """Raise ValueError for what :func:`decode` cannot measure, before anything slow starts."""
    require_turns(repetitions)
    if evicting(contenders) and min(contexts) < budget:
        raise ValueError(f"a context of {min(contexts)} tokens does not fill a budget of {budget}")


def decoder(
    model: PreTrainedModel, contender: Contender, budget: int, context: int, batch: int, states: States, spare: int
) -> Decoder:
    """A decoder whose cache has seen ``context`` tokens."""
    cache, seen = filled(model, contender, budget, context, states, spare)
    return Decoder(model, contender, cache, seen, context, batch)


def planned(
    model, contenders: Sequence[Contender], budget: int, contexts: Sequence[int], batch: int, spare: int
) -> int:
    """Bytes of keys and values that :func:`decode` will hold at once."""
    shape = States(model, batch, 0)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    tokens = sum(context + spare if one.name in FULL else budget for context in contexts for one in contenders)
    passing = 2 * max(contexts)  # the concatenation of one layer, and the random states
    return bytes_of(shape, tokens, layers) + bytes_of(shape, passing, 1)


def decode_alone(name: str, dtype: str, contender: Contender, budget: int, context: int, batch: int, device: str):
    """What a process needs that does nothing but one row: load, fill, decode two tokens."""
    model = load(name, dtype, device)
    states = States(model, batch, longest([context], budget))
    one = decoder(model, contender, budget, context, batch, states, WARM_UP)
    del states
    with torch.no_grad():
        for _ in range(WARM_UP):
            one()


def _in_order(contenders, contexts, batches) -> list[tuple[Contender, int, int]]:
    return [(one, context, batch) for batch in batches for context in contexts for one in contenders]


def _rows(
    model, budget: int, group: list[Decoder], taken: list[list[float]], bandwidth: Bandwidth | None
) -> list[dict]:
    medians = [statistics.median(times) for times in taken]
    bounded = [index for index, one in enumerate(group) if one.contender.name not in FULL]
    reference = min(bounded, key=lambda index: group[index].context, default=None)
    rows = []
    for one, times, median in zip(group, taken, medians, strict=True):
        pairs, side = cache_bytes(one.cache)
        evicts = one.contender.name not in FULL
        held = phase(one.contender.policy(budget).budget, one.context)[0] if evicts else None
        floor = None if bandwidth is None else bandwidth.floor(weight_bytes(model), read_bytes(one.cache, held))
        rows.append(
            row(
                "decode",
                one.contender.title,
                model.dtype,
                times,
                budget=budget if evicts else None,
                context=one.context,
                batch=one.batch,
                ratio=round(median / (medians[reference] if reference is not None else median), 3),
                tokens_per_second=digits(1000 * one.batch / median),
                floor_ms=None if floor is None else digits(floor),
                kv_bytes=pairs + side,
                side_bytes=side,
            )
        )
    return rows

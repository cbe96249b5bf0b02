"""What deciding costs: a policy's whole step over one that only writes slots, and its parts in one layer.

The reference is :class:`kvkeep.benchmark.caches.WritesOnly`: the same model and attention function, as many slots at
every step, each pair written in place, nothing scored, watched, remembered or chosen. Policy and reference take turns,
a token each, and what is done once in a while counts:

* a policy that decides at every token may score a window of them at once, so what is compared are the means of as many
  steps as its window has tokens;
* a policy with an interval L evicts at one step of L. Ordinary and evicting steps are timed apart and joined,
  ``step = ((L - 1) * ordinary + evicting) / L``, and likewise its reference; ordinary ones around the middle of an
  interval, where as many tokens are held as on average.

The ratio is that of each pair of neighbours in time, the median of all.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import Cache, PreTrainedModel

from kvkeep.benchmark.caches import (
    States,
    WritesOnly,
    cache_bytes,
    evicting,
    filled_policy,
    longest,
    phase,
    read_bytes,
    writes_only,
)
from kvkeep.benchmark.decode import Decoder
from kvkeep.benchmark.limit import Bandwidth, weight_bytes
from kvkeep.benchmark.timing import LEAST, WARM_UP, Job, digits, in_turns, require_turns, row
from kvkeep.evaluation.contenders import Contender
from kvkeep.policies.base import Policy, Step
from kvkeep.runtime.cache import EvictingLayer
from kvkeep.runtime.geometry import text_config
from kvkeep.slots import lowest
from kvkeep.sparse_attention import masked_output

Pair = tuple[list[float], list[float]]  # milliseconds of policy and reference, turn by turn


def overhead(
    model: PreTrainedModel,
    contenders: Sequence[Contender],
    budget: int,
    context: int,
    batch: int = 1,
    repetitions: int = 32,
    seed: int = 0,
    bandwidth: Bandwidth | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict]:
    """Whole-model steps of every policy over writing slots only.

    Args:
        model: loaded with ``attn_implementation="kvkeep"``.
        contenders: as for :func:`kvkeep.benchmark.decode.decode`; those that keep everything are passed over.
        budget: slots per KV head.
        context: tokens seen before; changes nothing but positions.
        batch: rows decoded together.
        repetitions: turns of ordinary steps; of evicting ones a third as many. At least five, and of policies that
            decide at every token at least five windows.
        seed: of the synthetic keys and values.
        bandwidth: for ``floor_ms``; None leaves it out.
        progress: called with (done, total) turns.

    Returns:
        A row a policy, ``part`` "step": ``ms_best`` and ``ms_median`` of a step, ``reference_ms_best`` and
        ``reference_ms`` those of the reference, ``ratio`` what it takes over the reference; and for a policy with an
        interval a row with ``part`` "evicting step".

    Raises:
        ValueError: for fewer than five repetitions, or no policy that evicts.
    """
    subjects = evicting(contenders)
    check(contenders, repetitions)
    states = States(model, batch, longest([context], budget), seed)
    made = [contender.policy(budget) for contender in subjects]
    found = _timed(model, made, context, states, repetitions, progress)
    rows = []
    for contender, policy in zip(subjects, made, strict=True):
        common = {"budget": budget, "context": context, "batch": batch}
        common |= _bytes_and_floor(model, policy, context, states, bandwidth)
        ordinary, evicted = found[id(policy), False], found.get((id(policy), True))
        rows.append(_joined(contender.title, model.dtype, policy.budget.interval, ordinary, evicted, common))
        if evicted is not None:
            rows.append(_compared(contender.title, model.dtype, "evicting step", evicted, common))
    return rows


def _timed(
    model, made: Sequence[Policy], context: int, states: States, repetitions: int, progress
) -> dict[tuple[int, bool], Pair]:
    """Times of (which policy, at evicting steps only), those that decide at every token by means of windows."""
    early, late = ([policy for policy in made if bool(policy.budget.interval) == has] for has in (False, True))
    window = max((policy.budget.window for policy in early), default=1)
    plans = [
        (early, False, window * max(-(-repetitions // window), LEAST)),
        (late, False, repetitions),
        (late, True, max(repetitions // 3, LEAST)),
    ]
    plans = [plan for plan in plans if plan[0]]
    total, before = sum(turns + WARM_UP for *_, turns in plans), 0
    found: dict[tuple[int, bool], Pair] = {}  # (which policy, evicting)
    for policies, evicts, turns in plans:

        def tell(done: int, _: int, before=before) -> None:
            if progress is not None:
                progress(before + done, total)

        jobs = [job for policy in policies for job in _pair(model, policy, context, states, evicts)]
        taken = in_turns(jobs, turns, model.device, tell)
        if policies is early:
            taken = [means(times, window) for times in taken]
        pairs = zip(taken[::2], taken[1::2], strict=True)
        found |= {(id(policy), evicts): pair for policy, pair in zip(policies, pairs, strict=True)}
        before += turns + WARM_UP
    return found


def means(times: Sequence[float], size: int) -> list[float]:
    """Means of ``size`` neighbours, in order.

    >>> means([1, 3, 5, 9], 2)
    [2.0, 7.0]
    """
    return [sum(times[start : start + size]) / size for start in range(0, len(times), size)]


def check(contenders: Sequence[Contender], repetitions: int) -> None:
    """Raise ValueError for what :func:`overhead` cannot measure."""
    require_turns(repetitions)
    if not evicting(contenders):
        raise ValueError("overhead is that of policies that evict: name one")


def _pair(model, policy: Policy, context: int, states: States, evicts: bool) -> list[Job]:
    """Jobs of one policy and of its reference; if each shall evict, filled anew and one ordinary step ahead."""
    config = text_config(model.config)
    held, seen = phase(policy.budget, context, evicts)
    held, seen = held - evicts, seen - evicts
    jobs = []
    for fill in (
        lambda: filled_policy(config, policy, held, seen, states),
        lambda: writes_only(config, policy.budget, held, seen, states),
    ):

        def made(fill: Callable[[], Cache] = fill) -> Decoder:
            return Decoder(model, None, fill(), seen, context, states.batch)

        def ready(made: Callable[[], Decoder] = made) -> tuple[Decoder]:
            decoder = made()
            decoder()  # what a cache does at its first step is no part of an eviction
            return (decoder,)

        jobs.append(Job(Decoder.__call__, ready) if evicts else Job(made()))
    return jobs


def paired_ratio(pair: Pair) -> float:
    """Median over turns of policy over reference."""
    return statistics.median(mine / other for mine, other in zip(*pair, strict=True))


def _joined(title: str, dtype, interval: int, ordinary: Pair, evicted: Pair | None, common: dict) -> dict:
    """A step as it is on average over an interval."""
    if evicted is None:
        return _compared(title, dtype, "step", ordinary, common)

    def average(one: float, last: float) -> float:
        return ((interval - 1) * one + last) / interval

    medians = [[statistics.median(times) for times in pair] for pair in (ordinary, evicted)]
    reference = average(medians[0][1], medians[1][1])
    mine = average(paired_ratio(ordinary) * medians[0][1], paired_ratio(evicted) * medians[1][1])
    return row("overhead", title, dtype, part="step", **common) | {
        "ms_best": digits(average(min(ordinary[0]), min(evicted[0]))),
        "reference_ms_best": digits(average(min(ordinary[1]), min(evicted[1]))),
        "ms_median": digits(average(medians[0][0], medians[1][0])),
        "reference_ms": digits(reference),
        "ratio": round(mine / reference, 4),
    }


def _compared(title: str, dtype, part: str, pair: Pair, common: dict) -> dict:
    reference = {"reference_ms": digits(statistics.median(pair[1])), "reference_ms_best": digits(min(pair[1]))}
    return row("overhead", title, dtype, pair[0], part=part, ratio=round(paired_ratio(pair), 4), **reference, **common)


def _bytes_and_floor(model, policy: Policy, context: int, states: States, bandwidth: Bandwidth | None) -> dict:
    held, seen = phase(policy.budget, context)
    cache = filled_policy(text_config(model.config), policy, held, seen, states)
    pairs, side = cache_bytes(cache)
    found = {"kv_bytes": pairs + side, "side_bytes": side}
    if bandwidth is not None:
        found["floor_ms"] = digits(bandwidth.floor(weight_bytes(model), read_bytes(cache, held)))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# One layer


def parts(
    model: PreTrainedModel,
    contenders: Sequence[Contender],
    budget: int,
    context: int,
    batch: int = 1,
    repetitions: int = 200,
    seed: int = 0,
) -> list[dict]:
    """What one layer's share of a step is made of, in fractions of a millisecond; stable where whole steps are not.

    Args: as :func:`overhead`.

    Returns:
        Rows with ``part``: "layer" (an ordinary step of the cache and its attention, of a policy that decides at every
        token the mean of a window of them; ``reference_ms`` is a layer that only writes and attends), "score" (what the
        policy computes when it must choose: one token of an entry policy, all tokens held otherwise), and of an entry
        policy "replace" (all of a step but attention), of the others "statistics" (watching one query) and "evict"
        (choosing by given scores, and closing the gaps).
    """
    subjects = evicting(contenders)
    check(contenders, repetitions)
    states = States(model, batch, longest([context], budget), seed)
    rows = []
    for contender in subjects:
        policy = contender.policy(budget)
        common = {"budget": budget, "context": context, "batch": batch}
        jobs = _layer_jobs(model, policy, context, states)
        once = max(policy.budget.window, 1) if policy.kind == "entry" else 1  # tokens of a call
        turns = max(repetitions // once, LEAST)
        taken = in_turns([_again(job, once) for job in jobs.values()], turns, model.device)
        times = {part: [spent / once for spent in found] for part, found in zip(jobs, taken, strict=True)}
        pair = times.pop("layer"), times.pop("writes only")
        rows.append(_compared(contender.title, model.dtype, "layer", pair, common))
        for part, spent in times.items():
            rows.append(row("overhead", contender.title, model.dtype, spent, part=part, **common))
    return rows


def _again(job: Job, count: int) -> Job:
    """The same ``count`` times in a call."""

    def calls(*given: object) -> None:
        for _ in range(count):
            job.call(*given)

    return Job(calls, job.prepare)


def _layer_jobs(model, policy: Policy, context: int, states: States) -> dict[str, Job]:
    config = text_config(model.config)
    held, seen = phase(policy.budget, context)
    layer = _first(filled_policy(config, policy, held, seen, states))
    reference = next(
        one for one in writes_only(config, policy.budget, held, seen, states).layers if isinstance(one, WritesOnly)
    )
    query, pair = states.query(1), states.pair(1)

    def step() -> None:
        layer.fill(query, *pair, layer.columns + 1)

    def only_write() -> None:
        masked_output(query, *reference.update(*pair), None, states.head_dim**-0.5)

    jobs = {"layer": Job(step), "writes only": Job(only_write)}
    for part, (method, given) in questions(config, policy, context, states).items():
        jobs[part] = Job(lambda method=method, given=given: getattr(policy, method)(given))
    if policy.kind == "entry":
        other = _first(filled_policy(config, policy, held, seen, states)).residency
        jobs["replace"] = Job(lambda: other.advance(None, *pair))
    else:
        jobs["evict"] = _eviction(_first(filled_policy(config, policy, *phase(policy.budget, context, True), states)))
    return jobs


def _eviction(layer: EvictingLayer) -> Job:
    """An interval of tokens dropped from a full layer by random scores, again and again."""
    slots, interval = layer.residency.slots, layer.policy.budget.interval
    positions, held = slots.positions.clone(), list(slots.held)
    scores = torch.rand(positions.shape, device=positions.device)
    candidates = torch.ones_like(scores, dtype=torch.bool)

    def refill() -> tuple[()]:
        slots.positions.copy_(positions)
        slots.held = list(held)
        return ()

    return Job(lambda: slots.drop(lowest(scores, slots.positions, candidates, interval)), refill)


def questions(config, policy: Policy, context: int, states: States) -> dict[str, tuple[str, object]]:
    """What the runtime asks a policy about one token that makes it choose: part -> (the method's name, its argument).

    Overheard by a copy of the policy in a cache of its own.
    """
    methods = {"entry": {"score": "priority"}, "attention": {"score": "keep_scores", "statistics": "observe"}}
    heard: dict[str, tuple[str, object]] = {}
    listener = copy.copy(policy)
    for part, method in methods[policy.kind].items():

        def listen(given: object, part=part, method=method) -> object:
            heard[part] = method, given
            return getattr(policy, method)(given)

        setattr(listener, method, listen)
    held, seen = phase(policy.budget, context, evicting=True)
    layer = _first(filled_policy(config, listener, held, seen, states))
    asked = dict(heard)
    layer.fill(states.query(1), *states.pair(1), seen + 1)
    heard = asked | heard
    if policy.kind == "entry":  # whose memory goes on from call to call: not that of the cache
        heard["score"] = "priority", _one_token(heard["score"][1])
    else:  # views of slots, the evicted of which are free by now
        held_then = heard["score"][1]
        heard["score"] = "keep_scores", replace(held_then, positions=held_then.positions.clamp(min=0))
    return {part: heard[part] for part in methods[policy.kind]}


def _one_token(step: Step) -> Step:
    """The last token of a step, which may be about several."""
    entering, leaving = (tuple(tensor[:, :, -1:] for tensor in pair) for pair in (step.entering, step.leaving))
    positions = step.positions[:, -1:]
    return replace(step, entering=entering, leaving=leaving, positions=positions, memory=dict(step.memory))


def _first(cache: Cache) -> EvictingLayer:
    return next(layer for layer in cache.layers if isinstance(layer, EvictingLayer))

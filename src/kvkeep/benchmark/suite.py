"""Everything that ``kvkeep benchmark`` can measure, by name, one after the other in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from kvkeep.benchmark import decode, labels, memory, overhead, prefill
from kvkeep.benchmark.caches import evicting
from kvkeep.benchmark.limit import Bandwidth, bandwidth, weight_bytes
from kvkeep.benchmark.timing import LEAST, Progress, load_average, settings
from kvkeep.evaluation.contenders import Contender

WHATS = ("decode", "overhead", "prefill", "labels", "running_topk", "memory", "capacity")
LENGTHS = {"decode": (2048, 8192), "prefill": (2048, 4096, 8192), "labels": (2048, 4096, 8192)}
REPETITIONS = {"decode": 9, "overhead": 32}  # LEAST for the others
PARTS_REPETITIONS = 256  # of one layer, a fraction of a millisecond each
LIMITED = ("decode", "overhead", "capacity")  # rows with a floor


@dataclass(frozen=True)
class Plan:
    """What shall be measured.

    Attributes:
        what: names of ``WHATS``.
        contenders: of :func:`kvkeep.benchmark.caches.contenders`.
        budget: slots per KV head.
        lengths: contexts of decode, prompts of prefill, sequences of labels; overhead and capacity take the longest.
            None = ``LENGTHS``.
        batches: rows decoded together; prefill and overhead take the first.
        repetitions: None = ``REPETITIONS``.
        seed: of synthetic states.
        kv_memory: bytes of cache that capacity may fill.
        tokens: that memory puts through a cache.
        peak: also the peak memory of decode, prefill and labels, from one process a row.
    """

    what: tuple[str, ...]
    contenders: Sequence[Contender]
    budget: int
    lengths: Sequence[int] | None = None
    batches: Sequence[int] = (1,)
    repetitions: int | None = None
    seed: int = 0
    kv_memory: int = 2**29
    tokens: int = memory.TOKENS
    peak: bool = False

    def lengths_of(self, what: str) -> Sequence[int]:
        return self.lengths or LENGTHS.get(what, LENGTHS["decode"])

    def repetitions_of(self, what: str) -> int:
        return self.repetitions or REPETITIONS.get(what, LEAST)

    def check(self) -> None:
        """Raise ValueError for what cannot be measured, before anything slow starts."""
        unknown = [what for what in self.what if what not in WHATS]
        if unknown or not self.what:
            raise ValueError(f"what to measure is among {', '.join(WHATS)}, not {', '.join(unknown) or 'nothing'}")
        given = [(what, self.lengths_of(what), self.repetitions_of(what)) for what in self.what]
        for what, lengths, repetitions in given:
            if what == "decode":
                decode.check(self.contenders, self.budget, lengths, repetitions)
            elif what == "overhead":
                overhead.check(self.contenders, repetitions)
            elif what == "prefill":
                prefill.check(self.contenders, self.budget, lengths, repetitions)
            elif what == "labels":
                labels.check(lengths, repetitions)
            elif what == "memory":
                memory.check(self.contenders)
            elif what == "capacity":
                memory.check_capacity(self.contenders, self.budget, max(lengths), repetitions)


def measure(plan: Plan, model: PreTrainedModel, source: str, progress: Progress | None = None) -> dict:
    """Run a plan.

    Args:
        plan: whose contenders have their scorers.
        model: loaded with ``attn_implementation="kvkeep"``.
        source: the name that it was loaded by.
        progress: called with (what, done, total).

    Returns:
        ``{"rows": [...], "settings": {...}}``, rows of :data:`kvkeep.benchmark.timing.FIELDS`.

    Raises:
        ValueError: as :meth:`Plan.check`, and for what does not fit in memory.
    """
    plan.check()
    device = model.device
    found = settings(
        device,
        model=source,
        dtype=str(model.dtype).removeprefix("torch."),
        budget=plan.budget,
        seed=plan.seed,
        repetitions={what: plan.repetitions_of(what) for what in plan.what},
        attention=model.config._attn_implementation,
        weight_bytes=weight_bytes(model),
    )
    limit = bandwidth(device) if set(plan.what) & set(LIMITED) else None
    rows = []
    for what in plan.what:

        def tell(done: int, total: int, what=what) -> None:
            if progress is not None:
                progress(what, done, total)

        rows += _measured(what, plan, model, source if plan.peak else None, limit, tell)
    if limit is not None:
        found |= {"bandwidth_gb_per_s": round(limit.rate / 1e9, 2), "bandwidth_by": limit.by}
    found["load_average_after"] = load_average()
    return {"rows": rows, "settings": found}


def _measured(what: str, plan: Plan, model, source: str | None, limit: Bandwidth | None, tell) -> list[dict]:
    who, budget, lengths = plan.contenders, plan.budget, plan.lengths_of(what)
    times, seed, batch = plan.repetitions_of(what), plan.seed, plan.batches[0]
    if what == "decode":
        return decode.decode(model, who, budget, lengths, plan.batches, times, seed, limit, source, tell)
    if what == "overhead":
        steps = overhead.overhead(model, who, budget, max(lengths), batch, times, seed, limit, tell)
        return steps + overhead.parts(model, who, budget, max(lengths), batch, PARTS_REPETITIONS, seed)
    if what == "prefill":
        return prefill.prefill(model, who, budget, lengths, batch, times, seed, source, tell)
    if what == "labels":
        return labels.labels(model, lengths, times, seed, source is not None, tell)
    if what == "running_topk":
        return labels.topk(model.device, times)
    if what == "memory":
        return memory.memory(model, evicting(who), budget, batch, plan.tokens, seed, tell)
    return memory.capacity(model, who, budget, max(lengths), plan.kv_memory, times, seed, limit, tell)

"""Training labels without a square: attention mass in row blocks against the S x S computation, and running top-k.

Both sides compute the same numbers, which is checked before anything is timed. The dense side takes one query head at a
time, so that it is not slowed down by more memory than it needs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.attention_mass import block_attention, future_attention, future_maximum
from kvkeep.benchmark.caches import States
from kvkeep.benchmark.peak import alone, require_memory
from kvkeep.benchmark.timing import Job, in_turns, require_turns, row
from kvkeep.budget import Budget
from kvkeep.lifetimes import running_topk

WINDOW, INTERVAL, REST = 32, 128, 384  # of a 512 token budget
TOPK_ROWS, TOPK_LENGTH = 288, 16_384  # 36 layers of 8 KV heads
TOPK_BUDGET = Budget(sinks=4, window=256, topk=764)
AGREEMENT = {4: 1e-3, 2: 5e-2}  # bytes of a number -> how far the two sides may be apart (2: products in 2 bytes)
SQUARES = 3  # S x S float32 matrices that the dense side has at once: logits, mask, probabilities

Label = Callable[[Tensor, Tensor], Tensor]  # query [B, Hq, S, D], key [B, H, S, D] -> one number a key and block


def future_in_blocks(query: Tensor, key: Tensor) -> Tensor:
    return future_attention(query, key, WINDOW)


def future_dense(query: Tensor, key: Tensor) -> Tensor:
    """KVpop's target from the square: ``log(eps + mean of p[d -> t] over d >= t + w)``, maximum over the group."""
    length = key.shape[2]
    queries = (length - WINDOW - torch.arange(length, device=key.device)).clamp(min=1)

    def mass(probability: Tensor) -> Tensor:
        return (probability.tril_(-WINDOW).sum(-2) / queries + 1e-6).log()

    return _by_head(query, key, mass).amax(2)


def golden_in_blocks(query: Tensor, key: Tensor) -> Tensor:
    return future_maximum(block_attention(query, key, REST + INTERVAL, INTERVAL))


def golden_dense(query: Tensor, key: Tensor) -> Tensor:
    """ForesightKV's label from the square: means of blocks of queries, and of those the maximum from each block on."""

    def means(probability: Tensor) -> Tensor:
        blocks = probability[REST + INTERVAL :].split(INTERVAL, 0)
        return torch.stack([block.mean(0) for block in blocks], -1)

    return future_maximum(_by_head(query, key, means).mean(2))


LABELS: dict[str, tuple[Label, Label]] = {
    "future_attention": (future_in_blocks, future_dense),
    "golden": (golden_in_blocks, golden_dense),
}


def labels(
    model: PreTrainedModel,
    lengths: Sequence[int],
    repetitions: int = 5,
    seed: int = 0,
    peak: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict]:
    """Milliseconds of both labels for one KV head of a model and its query heads, row blocks and dense.

    Args:
        model: whose shape and dtype are taken.
        lengths: of the sequence, above ``REST + INTERVAL``.
        repetitions: measured calls, after two that are not counted.
        seed: of the random queries and keys.
        peak: also ``peak_rss``, from one process a row.
        progress: called with (done, total) turns.

    Returns:
        Rows; ``policy`` is "row blocks" or "dense", ``part`` the label, ``ratio`` the median over that of "dense".

    Raises:
        ValueError: for fewer than five repetitions, a length too short, or a square that does not fit in memory.
        RuntimeError: if the two sides disagree.
    """
    check(lengths, repetitions)
    rows = []
    for number, length in enumerate(lengths):
        require_memory(SQUARES * 4 * length**2, model.device, f"the dense computation at {length} tokens")
        query, key = random_heads(model, length, seed)
        for label, sides in LABELS.items():
            _require_equal(label, query.dtype.itemsize, *(side(query, key) for side in sides))
        jobs = [Job(lambda side=side, q=query, k=key: side(q, k)) for sides in LABELS.values() for side in sides]

        def tell(done: int, total: int, number=number) -> None:
            if progress is not None:
                progress(number * total + done, len(lengths) * total)

        taken = iter(in_turns(jobs, repetitions, model.device, tell))
        for label in LABELS:
            mine, dense = next(taken), next(taken)
            for name, times in (("row blocks", mine), ("dense", dense)):
                ratio = round(statistics.median(times) / statistics.median(dense), 4)
                rows.append(row("labels", name, model.dtype, times, part=label, context=length, batch=1, ratio=ratio))
    if peak:
        for found in rows:
            shape = (1, _group(model) + 1, found["context"], query.shape[3])
            given = (found["part"], found["policy"] == "dense", shape, found["dtype"])
            found["peak_rss"] = alone(label_alone, model.device, *given)
    return rows


def check(lengths: Sequence[int], repetitions: int) -> None:
    """Raise ValueError for what :func:`labels` cannot measure."""
    require_turns(repetitions)
    if min(lengths) <= REST + INTERVAL:
        raise ValueError(f"golden labels begin at query {REST + INTERVAL}: a length of {min(lengths)} has none")


def random_heads(model: PreTrainedModel, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """The query heads of one KV head, and its keys."""
    states = States(model, 1, length, seed)
    return states.query(length)[:, : _group(model)], states.pair(length)[0][:, :1]


def _group(model: PreTrainedModel) -> int:
    states = States(model, 1, 0)
    return states.query_heads // states.kv_heads


def _by_head(query: Tensor, key: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """``reduce`` of the causal probabilities ``[S, S]`` of every query head: ``[B, H, G, ...]``."""
    batch, kv_heads, length, size = key.shape
    grouped = query.float().unflatten(1, (kv_heads, -1)) * size**-0.5
    future = torch.ones(length, length, dtype=torch.bool, device=key.device).triu_(1)
    rows = [
        reduce((grouped[b, h, g] @ key[b, h].float().mT).masked_fill_(future, -torch.inf).softmax(-1))
        for b in range(batch)
        for h in range(kv_heads)
        for g in range(grouped.shape[2])
    ]
    return torch.stack(rows).unflatten(0, (batch, kv_heads, -1))


def _require_equal(label: str, itemsize: int, mine: Tensor, dense: Tensor) -> None:
    worst = float((mine.double() - dense.double()).abs().max())
    if worst > AGREEMENT[min(itemsize, 4)]:
        raise RuntimeError(f"{label}: row blocks and the dense computation differ by {worst:.2g}")


def label_alone(label: str, dense: bool, shape: tuple[int, ...], dtype: str, device: str) -> None:
    """One label in a process of its own; shape [1, query heads of a KV head + 1, S, D]."""
    heads = torch.randn(shape, device=device).to(getattr(torch, dtype))
    group = shape[1] - 1
    with torch.no_grad():
        LABELS[label][int(dense)](heads[:, :group], heads[:, group:])


def topk(device: torch.device, repetitions: int = 5, rows: int = TOPK_ROWS, length: int = TOPK_LENGTH) -> list[dict]:
    """Milliseconds of :func:`kvkeep.lifetimes.running_topk` after compilation, by the backend of the device.

    Returns:
        One row; ``policy`` is the backend, ``batch`` the rows of priorities.
    """
    require_turns(repetitions)
    priority = torch.randn(1, rows, length, generator=torch.Generator().manual_seed(0)).to(device)
    backend = "numba" if device.type == "cpu" else "torch"
    (times,) = in_turns([Job(lambda: running_topk(priority, TOPK_BUDGET, backend=backend))], repetitions, device)
    common = {"budget": TOPK_BUDGET.slots, "context": length, "batch": rows}
    return [row("running_topk", backend, priority.dtype, times, **common)]

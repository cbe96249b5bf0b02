"""What eviction costs: teacher-forced loss of policies against the full cache, per budget and kind of document.

Every policy reads the same documents token by token as if it had generated them, in one `replay` each. What is counted
are the tokens past the largest cache that any of the compared policies holds: before that, some of them have not
evicted anything yet, and agreeing there is no merit.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvkeep.evaluation import statistics
from kvkeep.evaluation.contenders import Contender, line_up, require_distinct
from kvkeep.evaluation.fidelity import fidelity
from kvkeep.evaluation.store import Store, fingerprint, key, library_digest, pack_floats, unpack_floats
from kvkeep.lifetimes import chance_recall, realised_compression
from kvkeep.runtime.geometry import bounded_layers, stock_cache_layers, text_config
from kvkeep.runtime.replay import replay

Progress = Callable[[str, int, int], None]
"""Called with a stage in words, what is done and the total, in runs over one document."""


@dataclass(frozen=True)
class Run:
    """One policy over one document: what every row is made of."""

    token_loss: np.ndarray  # [length - 1], entry p is the loss of predicting token p + 1
    entropy: np.ndarray | None  # [length - 1], of the full cache only
    realised_compression: float
    recall: list[float | None] | None  # per layer; only if asked for, and never of the full cache
    output_cosine: np.ndarray | None  # [length - 1], only if asked for


def evaluate(
    model: torch.nn.Module,
    documents: Sequence[tuple[Any, torch.Tensor]],
    policies: Sequence[str | Contender],
    budgets: Sequence[int],
    length: int,
    *,
    seed: int = 0,
    recall: bool = False,
    resume_dir: str | Path | None = None,
    progress: Progress | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Compares policies by the loss of a model that reads documents under them.

    Args:
        model: a causal language model; put back as it was.
        documents: what `documents.pack` returns, pairs of a document (`name`, `kind`, `text`) and its ids, all of
            `length` tokens.
        policies: names, or contenders with options. The full cache is always run; it has a row if it is named.
        budgets: tokens per KV head, see `Contender.at_rest`.
        length: tokens of every document.
        seed: of the bootstrap, and of policies named without options that draw.
        recall: also fill in what `fidelity` measures, for one more pass over every document: `recall` (mean over
            layers), `recall_per_layer` (None for a layer that is not bounded), `recall_chance`, all None for the full
            cache, which has no top-k, and `output_cosine`, over the counted tokens, 1 for the full cache.
        resume_dir: where finished runs are kept and found again; None keeps nothing. Runs kept without recall are run
            again once it is asked for.
        progress: called before every run and at the end.
        settings: added to the settings of the result.

    Returns:
        `{"rows": [...], "settings": {...}}`, the form of `kvkeep evaluate --json`. Rows over all documents come first,
        then those of every kind. Losses are means in nats, ratios pooled over documents. What was not asked for is
        None.

    Raises:
        ValueError: before anything is run, if no token lies past the largest cache or a budget cannot be split; and
            where a loss is not finite, naming policy and document.
    """
    contenders = _contenders(policies, seed)
    starts = {tokens: first_measured(contenders, tokens, length) for tokens in dict.fromkeys(budgets)}
    if not documents:
        raise ValueError(f"no document of {length} tokens to evaluate on")
    runner = _Runner(model, documents, length, Store(resume_dir), progress, recall)
    full = Contender("full")
    pairs = {("full", None): (full, None)}
    for tokens in starts:
        for contender in contenders:
            if contender.name != "full":
                pairs[contender.title, tokens] = (contender, tokens)
    runs = runner.run_all(pairs)

    kinds = ["all", *dict.fromkeys(document.kind for document, _ in documents)]
    rows = []
    for kind in kinds:
        chosen = [i for i, (document, _) in enumerate(documents) if kind in ("all", document.kind)]
        for tokens, start in starts.items():
            for contender in contenders:
                at = ("full", None) if contender.name == "full" else (contender.title, tokens)
                measured = _measure(runs[at], runs["full", None], documents, chosen, start, seed)
                rows.append(_row(model, contender, tokens, kind, length, measured))
    return {"rows": rows, "settings": _settings(model, runner, contenders, starts, length, seed) | dict(settings or {})}


def first_measured(contenders: Sequence[Contender], tokens: int, length: int) -> int:
    """The first query of which every contender at this budget may have evicted something: the largest cache.

    Raises:
        ValueError: if no query of `length` tokens is that late.
    """
    slots = {c.title: budget.slots for c in contenders if (budget := c.policy(tokens).budget) is not None}
    largest = max(slots, key=slots.get, default=None)
    start = slots[largest] if largest is not None else tokens
    if start >= length - 1:
        holder = f"{largest} holds {start} tokens" if largest is not None else f"the budget is {tokens}"
        raise ValueError(
            f"no document is longer than the budget: documents are cut to {length} tokens and {holder}, "
            f"so nothing would be measured; the length must be at least {start + 2}"
        )
    return start


def kv_bytes(config: Any, tokens: int, length: int, itemsize: int) -> int:
    """Bytes of keys and values of one sequence when every full-attention layer holds `tokens` tokens.

    Layers with a sliding window hold at most the window, linear and shared ones hold none, both whatever the policy.

    Args:
        config: of the model.
        tokens: per KV head of a full-attention layer.
        length: of the sequence.
        itemsize: bytes of one number.
    """
    config = text_config(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    held = sum(
        min(tokens if ours else getattr(layer, "sliding_window", None) or 0, length)
        for layer, ours in zip(stock_cache_layers(config), bounded_layers(config), strict=True)
    )
    return held * 2 * head_dim * kv_heads * itemsize


class _Runner:
    """Replays documents under policies, skipping what is done already."""

    def __init__(
        self,
        model: torch.nn.Module,
        documents: Sequence,
        length: int,
        store: Store,
        progress: Progress | None,
        recall: bool,
    ):
        self.model, self.documents, self.store, self.recall = model, documents, store, recall
        self.progress = progress or (lambda stage, done, total: None)
        self.version = version()
        self.fingerprint = fingerprint(model)
        for document, ids in documents:
            if ids.numel() != length:
                raise ValueError(f"document {document.name!r} has {ids.numel()} tokens, not {length}")

    def run_all(self, pairs: Mapping[tuple, tuple[Contender, int | None]]) -> dict[tuple, list[Run]]:
        """Every contender over every document, document by document: a stop then leaves whole comparisons behind."""
        runs = {at: [] for at in pairs}
        total, done = (len(pairs) + self.recall) * len(self.documents), 0
        for document, ids in self.documents:
            names, records = {}, {}
            lifetimes = {}  # name -> (budget, evicted_at), of the records that still lack recall
            for at, (contender, tokens) in pairs.items():
                named = contender.title if tokens is None else f"{contender.title} at {tokens}"
                self.progress(f"{named}, {document.name}", done, total)
                policy = contender.policy(tokens)
                names[at] = name = self.name(policy, ids)
                if name not in records:  # it may stand there under another title
                    records[name], evicted_at = self.run(name, policy, document, ids)
                    if evicted_at is not None:
                        lifetimes[name] = (policy.budget, evicted_at)
                done += 1
            if self.recall:
                self.progress(f"recall, {document.name}", done, total)
                self.add_fidelity(ids, records, lifetimes)
                done += 1
            for at, name in names.items():
                runs[at].append(self.finished(records[name]))
        self.progress("done", total, total)
        return runs

    def name(self, policy: Any, ids: torch.Tensor) -> str:
        """What the record of a policy over a document is called."""
        return key(
            policy=repr(policy),
            model=self.fingerprint,
            ids=hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest(),
            version=self.version,
            library=library_digest(),
        )

    def run(self, name: str, policy: Any, document: Any, ids: torch.Tensor) -> tuple[dict, list | None]:
        """The record, found or made, and the policy's lifetimes where recall is still to be added to it."""
        record = self.store.get(name)
        lacking = self.recall and policy.kind != "full" and (record is None or "recall" not in record)
        if record is not None and not lacking:
            return record, None
        record, evicted_at = self._replayed(policy, document, ids)
        self.store.put(name, record)
        return record, evicted_at if lacking else None

    def add_fidelity(self, ids: torch.Tensor, records: dict[str, dict], lifetimes: dict[str, tuple]) -> None:
        """Adds recall to the records of one document that lack it, in one pass with the full cache."""
        if not lifetimes:
            return
        for name, found in fidelity(self.model, self._batch(ids), lifetimes).items():
            records[name] |= {"recall": found.recall, "output_cosine": pack_floats(found.output_cosine[:-1])}
            self.store.put(name, records[name])

    def finished(self, record: dict[str, Any]) -> Run:
        """A record as it is read; without recall if that is not asked for, kept or not."""
        token_loss, full = unpack_floats(record["token_loss"]), record["entropy"] is not None
        cosine = None
        if self.recall:
            cosine = np.ones_like(token_loss) if full else unpack_floats(record["output_cosine"])
        return Run(
            token_loss,
            unpack_floats(record["entropy"]) if full else None,
            record["realised_compression"],
            record["recall"] if self.recall and not full else None,
            cosine,
        )

    def _batch(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.reshape(1, -1).to(next(self.model.parameters()).device)

    def _replayed(
        self, policy: Any, document: Any, ids: torch.Tensor
    ) -> tuple[dict[str, Any], list[torch.Tensor | None]]:
        """The record of a run and its lifetimes."""
        with torch.no_grad():
            out = replay(self.model, self._batch(ids), policy)
        if not torch.isfinite(out.token_loss).all():
            first = int((~torch.isfinite(out.token_loss[0])).nonzero()[0, 0])
            raise ValueError(f"the loss of {document.name!r} under {policy.name!r} is not finite from query {first} on")
        saved = [realised_compression(layer).float().mean() for layer in out.evicted_at if layer is not None]
        record = {
            "policy": repr(policy),
            "document": document.name,
            "token_loss": pack_floats(out.token_loss[0]),
            "entropy": pack_floats(out.entropy[0]) if policy.kind == "full" else None,
            "realised_compression": float(torch.stack(saved).mean()) if saved else 0.0,
        }
        return record, out.evicted_at


def _contenders(policies: Sequence[str | Contender], seed: int) -> list[Contender]:
    contenders = [line_up([p], seed=seed)[0] if isinstance(p, str) else p for p in policies]
    require_distinct(contenders)
    return contenders


def _measure(
    runs: list[Run], full: list[Run], documents: Sequence, chosen: list[int], start: int, seed: int
) -> dict[str, Any]:
    """Everything a row says about losses, from the tokens from `start` on of the chosen documents."""
    loss = [runs[i].token_loss[start:] for i in chosen]
    reference = [full[i].token_loss[start:] for i in chosen]
    low = [statistics.low_entropy(full[i].entropy[start:]) for i in chosen]
    count = sum(map(len, loss))
    ratio = statistics.bootstrap_ratio([part.sum() for part in loss], [part.sum() for part in reference], seed=seed)
    return {
        "documents": len(chosen),
        "loss": float(sum(part.sum() for part in loss) / count),
        "full_loss": float(sum(part.sum() for part in reference) / count),
        "loss_ratio": ratio.value,
        "loss_ratio_ci": [ratio.low, ratio.high],
        "low_entropy_ratio": _share_ratio(loss, reference, low),
        "high_entropy_ratio": _share_ratio(loss, reference, [~part for part in low]),
        "realised_compression": float(np.mean([runs[i].realised_compression for i in chosen])),
        **_fidelity([runs[i] for i in chosen], start),
        "per_document": [
            {
                "document": documents[i][0].name,
                "loss": float(part.mean()),
                "full_loss": float(whole.mean()),
                "tokens": len(part),
            }
            for i, part, whole in zip(chosen, loss, reference, strict=True)
        ],
    }


def _fidelity(runs: list[Run], start: int) -> dict[str, Any]:
    """Means over documents, which all have as many tokens; None for what was not measured."""
    cosine, per_layer = None, None
    if runs[0].output_cosine is not None:
        cosine = float(np.mean([run.output_cosine[start:] for run in runs]))
    if runs[0].recall is not None:
        by_layer = zip(*(run.recall for run in runs), strict=True)
        per_layer = [None if layer[0] is None else float(np.mean(layer)) for layer in by_layer]
    recall = None if per_layer is None else float(np.mean([layer for layer in per_layer if layer is not None]))
    return {"recall": recall, "recall_per_layer": per_layer, "output_cosine": cosine}


def _share_ratio(loss: list[np.ndarray], reference: list[np.ndarray], share: list[np.ndarray]) -> float | None:
    """The pooled ratio over a share of the tokens; None where the share is empty or the full cache loses nothing."""
    full = math.fsum(part[mask].sum() for part, mask in zip(reference, share, strict=True))
    return math.fsum(part[mask].sum() for part, mask in zip(loss, share, strict=True)) / full if full > 0 else None


def _row(
    model: torch.nn.Module, contender: Contender, tokens: int, kind: str, length: int, measured: dict[str, Any]
) -> dict[str, Any]:
    budget = contender.policy(tokens).budget
    full = kv_bytes(model.config, length, length, model.dtype.itemsize)
    return {
        "policy": contender.name,
        "label": contender.label or contender.name,
        "scorer": contender.scorer_source,
        "preset": contender.preset,
        "seed": contender.seed,
        "league": contender.league,
        "kind": kind,
        "budget": tokens,
        "slots": None if budget is None else budget.slots,
        "rest": None if budget is None else budget.rest,
        "interval": None if budget is None else budget.interval,
        "length": length,
        "documents": measured["documents"],
        "loss": measured["loss"],
        "full_loss": measured["full_loss"],
        "loss_ratio": measured["loss_ratio"],
        "loss_ratio_ci": measured["loss_ratio_ci"],
        "low_entropy_ratio": measured["low_entropy_ratio"],
        "high_entropy_ratio": measured["high_entropy_ratio"],
        "recall": measured["recall"],
        "recall_chance": None if measured["recall"] is None else chance_recall(length, budget),
        "recall_per_layer": measured["recall_per_layer"],
        "output_cosine": measured["output_cosine"],
        "kv_bytes": full if budget is None else kv_bytes(model.config, budget.slots, length, model.dtype.itemsize),
        "full_kv_bytes": full,
        "realised_compression": measured["realised_compression"],
        "per_document": measured["per_document"],
    }


def _settings(
    model: torch.nn.Module,
    runner: _Runner,
    contenders: list[Contender],
    starts: Mapping[int, int],
    length: int,
    seed: int,
) -> dict[str, Any]:
    return {
        "kvkeep": runner.version,
        "torch": torch.__version__,
        "model": getattr(model.config, "_name_or_path", None) or type(model).__name__,
        "model_fingerprint": runner.fingerprint,
        "dtype": str(model.dtype).removeprefix("torch."),
        "length": length,
        "budgets": list(starts),
        "budget_at_rest": any(contender.at_rest for contender in contenders),
        "measured_queries": {str(tokens): [start, length - 2] for tokens, start in starts.items()},
        "policies": {str(tokens): [repr(c.policy(tokens)) for c in contenders] for tokens in starts},
        "documents": [{"document": document.name, "kind": document.kind} for document, _ in runner.documents],
        "seed": seed,
        "bootstrap": {"draws": statistics.DRAWS, "confidence": statistics.CONFIDENCE, "unit": "document"},
        "low_entropy_share": statistics.LOW_SHARE,
    }


def version() -> str:
    """This package's version."""
    return sys.modules[__package__.partition(".")[0]].__version__  # the root is loaded before any of its rooms

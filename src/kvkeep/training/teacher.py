"""The frozen dense model's predictions, computed once a text and kept on disk: its 256 likeliest tokens.

A shard is one safetensors file, written beside its place and renamed; an interrupted reading goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.policies.full import Full
from kvkeep.runtime.replay import by_blocks, hidden_states
from kvkeep.scorers import model_fingerprint
from kvkeep.training.harvest import readable
from kvkeep.training.losses import TopLogits, top_logits

COMPUTE = {"own": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Prediction:
    """A teacher's predictions of a text, on disk: ``ids`` int32 and ``log_probs`` ``[S, K]``, ``log_rest`` ``[S]``."""

    path: Path

    def load(self, device: torch.device | str = "cpu") -> TopLogits:
        """As :class:`~kvkeep.training.losses.TopLogits` of shape ``[1, S, K]`` and ``[1, S]``."""
        tensors = load_file(self.path, device=str(device))
        return TopLogits(*(tensors[name][None] for name in TopLogits._fields))


def predictions(
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    folder: str | Path,
    top: int = 256,
    compute: str = "own",
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Prediction]:
    """The teacher's predictions of texts; those that exist already are left as they are, damaged ones are read again.

    Args:
        model: the teacher; it reads with the full cache.
        texts: int64 ``[S]`` each.
        folder: where shards live; created.
        top: tokens kept a position (KVpop: 256), at most the vocabulary.
        compute: "own" or the dtype that the student computes in, so that a student that has not moved agrees exactly.
        progress: called with ("teacher", done, total).

    Raises:
        ValueError: for an unknown ``compute`` or logits that are not finite.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    top = min(top, model.get_output_embeddings().weight.shape[0])
    settings = [model_fingerprint(model), str(model.dtype), top, compute]
    shards = []
    for done, ids in enumerate(texts):
        if progress is not None:
            progress("teacher", done, len(texts))
        digest = hashlib.sha256(json.dumps([settings, ids.tolist()]).encode()).hexdigest()[:24]
        shard = Prediction(folder / f"teacher-{digest}.safetensors")
        if not readable(shard.path):
            _write(shard.path, _read(model, ids, top, compute))
        shards.append(shard)
    if progress is not None:
        progress("teacher", len(texts), len(texts))
    return shards


@torch.no_grad()
def _read(model: PreTrainedModel, ids: Tensor, top: int, compute: str) -> dict[str, Tensor]:
    with computing(model, compute):
        hidden, _ = hidden_states(model, ids.reshape(1, -1).to(model.device), Full())
        parts = by_blocks(model, hidden, lambda logits, start: top_logits(logits[0], top))
    if not all(bool(torch.isfinite(part.log_probs).all()) for part in parts):
        raise ValueError("the teacher's predictions are not finite: load the model in a wider number format")
    ids, log_probs, log_rest = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
    return {"ids": ids.int(), "log_probs": log_probs, "log_rest": log_rest}


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    beside = path.with_suffix(".tmp")
    save_file(tensors, beside)
    os.replace(beside, path)


def computing(model: PreTrainedModel, compute: str) -> AbstractContextManager:
    """Inside, matrix products run in ``compute``; weights, softmax, norms, scores and losses stay what they are.

    Raises:
        ValueError: for a name that is not in ``COMPUTE``.
    """
    if compute not in COMPUTE:
        raise ValueError(f"compute is one of {', '.join(COMPUTE)}, not {compute!r}")
    dtype = COMPUTE[compute]
    return torch.autocast(model.device.type, dtype=dtype, enabled=dtype is not None)

"""The documents of a run: in which order they are, which are held out, and what they are known by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch
from torch import Tensor

Texts = Sequence[tuple[object, Tensor]]
"""Pairs of a document (``.name``) and its token ids ``[S]``."""


def mixed(documents: Texts) -> list[tuple[object, Tensor]]:
    """The documents in an order that depends on their number alone, so that held-out and calibration documents are of
    every kind, and the same ones whatever the seed of the training."""
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(0))
    return [documents[index] for index in order.tolist()]


def trained_on(count: int, share: float) -> int:
    """How many of ``count`` mixed documents come first, to train on; the rest, about ``share`` of all, is held out.

    At least one is held out where a share is, and at least one is not.
    """
    held = min(max(round(share * count), 1 if share else 0), count - 1)
    return count - held


def data_fingerprint(documents: Texts) -> str:
    """16 hexadecimal digits over the token ids of all documents, in order."""
    digest = hashlib.sha256()
    for _, ids in documents:
        digest.update(json.dumps(ids.tolist()).encode())
    return digest.hexdigest()[:16]


def require_long_enough(documents: Texts, tokens: int) -> None:
    """Raise ValueError for fewer than two documents, or one that is no longer than the largest budget's ``tokens``."""
    short = [(document.name, ids.numel()) for document, ids in documents if ids.numel() <= tokens + 1]
    if short:
        name, length = short[0]
        raise ValueError(
            f"document {name!r} has {length} tokens: nothing to learn from beside a budget that holds {tokens}"
        )
    if len(documents) < 2:
        raise ValueError(f"training takes two documents or more, not {len(documents)}")

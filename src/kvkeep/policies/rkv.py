"""R-KV: SnapKV's attention, minus redundancy among the keys held."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvkeep.budget import Budget
from kvkeep.policies.base import Held
from kvkeep.policies.snapkv import SnapKV
from kvkeep.slots import gather_slots

ROWS = 512  # keys compared with all others at a time


class RKV(SnapKV):
    """R-KV: ``mix * attention - (1 - mix) * similarity``, so that one of several alike tokens is enough.

    Paper: arXiv 2505.24133, section 3. Attention as in SnapKV. Similarity of token j is the softmax over all tokens
    held of the mean cosine between its key and the others', where each token does not count the **newest** token
    that resembles it, so that of several alike the newest stays.

    Args:
        mix: weight of attention, lambda in the paper.
        threshold: cosine above which two tokens are alike.
        observation, kernel, head_reduce, normalise: see :class:`SnapKV`.
    """

    name = "rkv"
    paper = "arXiv 2505.24133"

    def __init__(self, budget: Budget, mix: float = 0.1, threshold: float = 0.5, **attention):
        super().__init__(budget, **attention)
        if not 0 <= mix <= 1:
            raise ValueError(f"mix must be in [0, 1], not {mix}")
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold is a cosine in [0, 1], not {threshold}")
        self.mix, self.threshold = mix, threshold

    def keep_scores(self, held: Held) -> Tensor:
        order = held.positions.argsort(-1)
        redundancy = key_similarity(gather_slots(held.keys, order), self.threshold).softmax(-1)
        scores = torch.empty_like(redundancy).scatter_(-1, order, redundancy)
        return self.mix * super().keep_scores(held) - (1 - self.mix) * scores


def key_similarity(keys: Tensor, threshold: float) -> Tensor:
    """Mean cosine of every key with the others, sparing the newest that resembles it.

    Args:
        keys: ``[B, H, N, D]``, oldest first.
        threshold: cosine above which two keys are alike.

    Returns:
        ``[B, H, N]``: the column means of the cosine matrix after its diagonal and, in each row, the last entry above
        the threshold are set to zero. A row without an entry above it loses nothing.
    """
    keys = normalize(keys.to(torch.promote_types(keys.dtype, torch.float32)), dim=-1)
    count = keys.shape[2]
    column = torch.arange(count, device=keys.device)
    total = keys.new_zeros(keys.shape[:3])
    for start in range(0, count, ROWS):
        cosine = keys[:, :, start : start + ROWS] @ keys.transpose(-1, -2)  # [B, H, rows, N]
        row = column[start : start + ROWS, None]
        cosine = cosine.masked_fill(column == row, 0)
        newest_alike = torch.where(cosine > threshold, column, -1).amax(-1, keepdim=True)
        total += cosine.masked_fill(column == newest_alike, 0).sum(2)
    return total / count

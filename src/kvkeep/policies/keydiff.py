"""KeyDiff: keep the keys that are least like the others."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvkeep.policies.base import AttentionPolicy, Held


class KeyDiff(AttentionPolicy):
    """KeyDiff: of the tokens held, those go whose keys are most like the mean direction of all keys held.

    Paper: arXiv 2504.15364, section 3, with the normalised anchor: ``anchor = mean_i k_i / |k_i|`` over the tokens
    held, keep score ``-cos(k_i, anchor)``; keys are those of the cache, after the rotary embedding. Keys alone decide.
    The paper evicts after every block of tokens, here every ``interval``; of its two variants this is the one that
    keeps a window of the newest tokens.
    """

    name = "keydiff"
    paper = "arXiv 2504.15364"

    def keep_scores(self, held: Held) -> Tensor:
        keys = held.keys.to(torch.promote_types(held.keys.dtype, torch.float32))
        directions = normalize(keys, dim=-1)  # [B, H, N, D]
        anchor = normalize(directions.mean(2, keepdim=True), dim=-1)
        return -(directions * anchor).sum(-1)

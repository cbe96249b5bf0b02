"""Slow, independent references: dense masked attention, and policies written down naively, one query at a time."""

from __future__ import annotations

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from kvkeep.lifetimes import visible


def masked_forward(model, ids, lifetimes, gradients=False):
    """Logits of the stock model with layer l's attention masked by ``visible(lifetimes[l])``; no kvkeep runtime.

    Also returns per layer (query, key, value, probabilities [B, Hq, S, S]).
    """
    seen = {}

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        layer, group = module.layer_idx, query.shape[1] // key.shape[1]
        length = query.shape[2]
        mask = torch.ones(length, length).tril().bool().expand(1, 1, -1, -1)
        if lifetimes[layer] is not None:
            mask = visible(lifetimes[layer]).repeat_interleave(group, 1)
        elif attention_mask is not None:
            mask = attention_mask
        keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        logits = (query @ keys.transpose(-1, -2) * scaling).masked_fill(~mask, -torch.inf)
        probabilities = logits.softmax(-1)
        seen[layer] = (query, key, value, probabilities)
        return (probabilities @ values).transpose(1, 2).contiguous(), None

    AttentionInterface.register("reference", attend)
    AttentionMaskInterface.register("reference", sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("reference")
    try:
        with torch.set_grad_enabled(gradients):
            return model(ids, use_cache=False).logits, seen
    finally:
        model.set_attn_implementation(before)


def interval_lifetimes(scores, budget, length, kv_heads):
    """Lifetimes of an attention policy, naively.

    ``scores(head, query_index, held)`` gives the keep scores of the held tokens (sorted) at the start of a query.
    """
    evicted_at = torch.full((1, kv_heads, length), length, dtype=torch.int32)
    for head in range(kv_heads):
        held = []
        for query in range(length):
            if len(held) == budget.slots:
                keep = scores(head, query, list(held))
                order = sorted(range(len(held)), key=lambda i: (float(keep[i]), held[i]))
                free = [i for i in order if budget.sinks <= held[i] < query - budget.window]
                for token in [held[i] for i in free[: budget.interval]]:
                    held.remove(token)
                    evicted_at[0, head, token] = query
            held.append(query)
    return evicted_at

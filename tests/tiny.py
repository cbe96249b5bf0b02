"""Tiny random models of every family, sharp enough that attention and eviction matter."""

from __future__ import annotations

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import kvkeep
from kvkeep.runtime.cache import HANDS_KEYWORDS, transformers_version

# Below this version the cache meets neither queries nor padding: attention policies are refused, padding is given, and
# a prompt above the budget goes in token by token. The tests then run what is supported, and that the rest is refused.
HANDED = transformers_version() >= HANDS_KEYWORDS

VOCABULARY = 61
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 9,
            "query_pre_attn_scalar": 8,
        },
    ),
}


def tiny_model(family="llama", group=3, kv_heads=2, dtype=torch.float64, attention="kvkeep", seed=0):
    """A two-layer model with ``kv_heads * group`` query heads of size 8, large random weights, in eval mode."""
    config_class, model_class, extra = FAMILIES[family]
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8 * kv_heads * group,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    model = model_class(config_class(**settings | extra)).to(dtype).eval()
    model.set_attn_implementation(attention)
    return model.requires_grad_(False)


def make_cache(model, policy, mask=None, batch=1, **options):
    """An evicting cache, told the padding where transformers does not tell it."""
    if not HANDED:
        options["padding"] = [0] * batch if mask is None else (mask == 0).sum(-1).tolist()
    return kvkeep.EvictingCache(model.config, policy, **options)


def random_ids(length, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def left_pad(rows):
    """Rows of different lengths -> ids and mask ``[B, longest]``."""
    longest = max(len(row) for row in rows)
    ids = torch.stack([torch.cat([torch.zeros(longest - len(row), dtype=torch.long), row]) for row in rows])
    mask = torch.stack([(torch.arange(longest) >= longest - len(row)).long() for row in rows])
    return ids, mask

"""What a transformers config says of a model's layers: which are ours to bound, and how they rotate."""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvkeep.policies.base import Geometry, Policy, Rotary

# Models whose attention pairs dimension i with i + n, checked one by one in the tests; a config does not say it, and a
# wrong guess (GLM and Cohere interleave their pairs) would go unnoticed.
HALF_ROTATION = {
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("granite", "olmo2", "phi3", "smollm3", "stablelm", "starcoder2"),
}
# Frequencies that change with the length seen so far cannot be undone for a query of an earlier length.
LENGTH_DEPENDENT = ("dynamic", "longrope")


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The decoder's part of a config, itself for text-only models."""
    return config.get_text_config(decoder=True)


def stock_cache_layers(config: PreTrainedConfig) -> list:
    """The cache layers transformers would make for this model.

    Raises:
        ValueError: for a model without a KV cache.
    """
    name = type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; kvkeep bounds decoder-only models")
    if not getattr(config, "num_hidden_layers", 0) or not getattr(config, "num_attention_heads", 0):
        raise ValueError(f"{name} describes a model without a KV cache: it has no attention layers")
    layers = DynamicCache(config=config).layers
    if not layers:
        raise ValueError(f"{name} describes a model without a KV cache")
    return layers


def bounded_layers(config: PreTrainedConfig, policy: Policy | None = None) -> list[bool]:
    """True for every full-attention layer; sliding, linear and shared layers keep what they are.

    Args:
        config: of the decoder.
        policy: the one that is to bound them; None where that does not matter yet.

    Raises:
        ValueError: for a model without a KV cache, one whose layers are all bounded or stateless already, or one that
            the policy was not made for.
    """
    bounded = [type(layer) is DynamicLayer for layer in stock_cache_layers(config)]
    if not any(bounded):
        raise ValueError(
            f"{type(config).__name__} has no full-attention layer: its sliding or linear layers are bounded already"
        )
    if policy is not None:
        policy.require_fits(config)
    return bounded


def layer_geometry(config: PreTrainedConfig, policy: Policy, layer: int, query_heads: int, keys, scaling) -> Geometry:
    """Geometry of one layer from what its attention was called with (keys ``[B, H, n, D]``)."""
    kv_heads, size = keys.shape[1], keys.shape[-1]
    return Geometry(
        layer=layer,
        kv_heads=kv_heads,
        group=query_heads // kv_heads,
        head_dim=size,
        scaling=size**-0.5 if scaling is None else scaling,
        rotary=rotary(config, layer, size) if policy.needs_rotary else None,
    )


def rotary(config: PreTrainedConfig, layer: int, head_dim: int) -> Rotary | None:
    """The rotary embedding of a layer, None for a model without one.

    Raises:
        ValueError: for an embedding whose layout is not known, or whose frequencies depend on the length.
    """
    parameters = getattr(config, "rope_parameters", None)
    rotates = getattr(config, "no_rope_layers", None)  # 1 where a layer rotates (SmolLM3)
    if not parameters or (rotates and not rotates[layer]):
        return None
    if config.model_type not in HALF_ROTATION:
        raise ValueError(f"the layout of the rotary embedding of {config.model_type!r} models is not known to kvkeep")
    layer_type = None
    if "rope_type" not in parameters and "rope_theta" not in parameters:  # one set of parameters per type of layer
        layer_type = config.layer_types[layer]
        parameters = parameters[layer_type]
        if parameters is None:
            return None
    kind = parameters.get("rope_type", "default")
    if kind in LENGTH_DEPENDENT:
        raise ValueError(f"rotary embedding {kind!r} depends on the length, so past queries cannot be unrotated")
    if kind == "default":
        size = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponent = torch.arange(0, size, 2, dtype=torch.float32) / size
        return Rotary(1.0 / parameters["rope_theta"] ** exponent)
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, layer_type=layer_type)
    return Rotary(frequencies.float(), float(factor))

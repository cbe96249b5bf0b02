"""Models to measure: by name, or of a known shape with random weights, without a download."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from kvkeep.runtime import attention, models

PREFIX = "random:"

_QWEN3 = {
    "vocab_size": 151_936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "bos_token_id": None,
    "eos_token_id": None,
}
SHAPES = {
    "qwen3-4b": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "qwen3-8b": _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12_288, "tie_word_embeddings": False},
    "qwen3-tiny": _QWEN3  # to try a command with
    | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
}


def is_random(name: str) -> bool:
    """Whether a name asks for random weights.

    Raises:
        ValueError: for a shape that is not known.
    """
    if not name.startswith(PREFIX):
        return False
    if name.removeprefix(PREFIX) not in SHAPES:
        raise ValueError(f"there is no shape {name!r}; there are {', '.join(PREFIX + shape for shape in SHAPES)}")
    return True


def load(name: str, dtype: str | None = None, device: str | None = None) -> PreTrainedModel:
    """A model by any name that the command line takes.

    Args:
        name: of :func:`kvkeep.runtime.models.load`, or ``random:`` and a shape.
        dtype: None = the checkpoint's own; bfloat16 for random weights.
        device: None = the CPU.

    Raises:
        ValueError: for an unknown shape, or as :func:`kvkeep.runtime.models.load`.
    """
    if not is_random(name):
        return models.load(name, dtype, device=device)[0]
    kind = getattr(torch, dtype or "bfloat16")
    return random_model(Qwen3Config(**SHAPES[name.removeprefix(PREFIX)]), kind, device or "cpu", name)


def random_model(config: Qwen3Config, dtype: torch.dtype, device: str | torch.device, name: str) -> PreTrainedModel:
    """A Qwen3 of that config whose weights are drawn in their dtype where they will lie ("meta": nowhere).

    Args:
        config: of transformers.
        dtype: of the weights.
        device: where they lie.
        name: what the result calls the model.
    """
    config.name_or_path = name
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    return model.eval().requires_grad_(False)

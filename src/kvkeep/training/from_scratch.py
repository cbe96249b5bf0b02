"""A tiny decoder trained from scratch on drawn token rows, for experiments whose data no real model has seen.

Every step draws fresh rows, so there is nothing to overfit and no epoch. What comes out is a folder that transformers
loads like any other model.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

RECORD = "from_scratch.json"  # beside the weights: how they were made


@dataclass(frozen=True)
class Tiny:
    """A tiny Llama and how it is trained.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, intermediate: sizes.
        init: deviation of the initial weights, about hidden ** -0.5; the usual 0.02 learns far later at such a size.
        steps, batch: optimiser steps, rows per step.
        sink: weight of a second loss, minus the log of the attention that idle queries, those whose prediction counts
            less than 1, pay to the first token. Large models learn such a sink by themselves; without one the attention
            that idle queries scatter over everything drowns that of the few queries which look something up.
        lr, warmup, betas, weight_decay, clip: AdamW with a linear warm-up, then cosine to 0; clip = gradient norm.
        seed: of the initial weights.
    """

    layers: int = 2
    hidden: int = 64
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    intermediate: int = 128
    init: float = 0.12
    steps: int = 900
    batch: int = 32
    sink: float = 0.1
    lr: float = 4e-3
    warmup: int = 50
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0


def train(
    vocabulary: int,
    length: int,
    draw: Callable[[int, int], tuple[Tensor, Tensor]],
    out: str | Path,
    settings: Tiny | None = None,
    made_by: dict[str, Any] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> PreTrainedModel:
    """Train a model and save it in ``out``; a model that is there already is only loaded.

    Args:
        vocabulary: tokens there are.
        length: of the longest row.
        draw: ``draw(count, step)`` returns fresh rows, int64 ``[count, S]``, and ``[S - 1]`` what the loss of each
            prediction counts; entry p is the prediction of token p + 1.
        out: the folder; it appears when training is over.
        settings: None = the defaults.
        made_by: what decides the rows, recorded beside the weights.
        progress: called with ("from scratch", step, steps).

    Returns:
        The model, frozen, in evaluation mode.

    Raises:
        ValueError: if ``out`` holds a model made otherwise, or the loss stops being finite.
    """
    settings, out = settings or Tiny(), Path(out)
    record = json.loads(json.dumps({"rows": made_by, "vocabulary": vocabulary, "length": length, **asdict(settings)}))
    if (out / RECORD).exists():
        if json.loads((out / RECORD).read_text()) != record:
            raise ValueError(f"{out} holds a model that was made with other settings")
        return load(out)
    model = build(vocabulary, length, settings)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * rate(step, settings)
        loss = weighted_loss(model, *draw(settings.batch, step), settings.sink)
        if not bool(torch.isfinite(loss)):
            raise ValueError(f"the loss is not finite at step {step}")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        if progress is not None:
            progress("from scratch", step + 1, settings.steps)
    beside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    model.config.save_pretrained(beside)
    save_file(model.state_dict(), beside / "model.safetensors", {"format": "pt"})
    (beside / RECORD).write_text(json.dumps(record))
    beside.rename(out)
    return load(out)


def load(folder: str | Path) -> PreTrainedModel:
    """A model that :func:`train` saved, frozen, in evaluation mode and float32."""
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    weights = load_file(Path(folder) / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return model.eval().requires_grad_(False)


def build(vocabulary: int, length: int, settings: Tiny) -> LlamaForCausalLM:
    """The untrained model.

    Args:
        vocabulary: tokens there are.
        length: of the longest row.
        settings: sizes and seed.
    """
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=length,
        initializer_range=settings.init,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return LlamaForCausalLM._from_config(config, attn_implementation="eager")


def weighted_loss(model: PreTrainedModel, rows: Tensor, weights: Tensor, sink: float = 0.0) -> Tensor:
    """Weighted mean of the losses in nats of rows ``[B, S]``, plus ``sink`` times that of idle queries.

    Args:
        model: with eager attention.
        rows: int64 ``[B, S]``.
        weights: ``[S - 1]``.
        sink: see :class:`Tiny`.
    """
    decoded = model.get_decoder()(input_ids=rows[:, :-1], use_cache=False, output_attentions=True)
    logits = model.get_output_embeddings()(decoded.last_hidden_state).float()
    losses = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(len(rows), -1)
    loss = (losses * weights).sum() / (len(rows) * weights.sum())
    idle = weights < 1
    paid = [attention[:, :, idle, 0] for attention in decoded.attentions]  # [B, heads, idle]
    return loss - sink * torch.stack(paid).clamp(min=1e-9).log().mean()


def rate(step: int, settings: Tiny) -> float:
    """Share of the peak learning rate."""
    if step < settings.warmup:
        return (step + 1) / (settings.warmup + 1)
    past = (step - settings.warmup) / max(settings.steps - settings.warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * past))

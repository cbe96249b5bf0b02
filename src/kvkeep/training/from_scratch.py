"""A tiny decoder trained from scratch on drawn token rows, for experiments whose data no real model has seen.

Every step draws fresh rows, so there is nothing to overfit and no epoch; the seed decides weights and rows. What comes
out is a folder that transformers loads like any other model.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

RECORD = "from_scratch.json"  # beside the weights: how they were made


@dataclass(frozen=True)
class Tiny:
    """A tiny Llama and how it is trained.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, intermediate: sizes.
        steps, batch: optimiser steps, rows per step.
        lr, warmup, betas, weight_decay, clip: AdamW with a linear warm-up, then cosine to 0; clip = gradient norm.
        seed: of weights and rows.
    """

    layers: int = 2
    hidden: int = 64
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 128
    steps: int = 1500
    batch: int = 32
    lr: float = 3e-3
    warmup: int = 50
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0


def train(
    vocabulary: int,
    draw: Callable[[int, int], Tensor],
    weights: Tensor,
    out: str | Path,
    settings: Tiny | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> PreTrainedModel:
    """Train a model and save it in ``out``; a model that is there already is only loaded.

    Args:
        vocabulary: tokens there are.
        draw: ``draw(count, seed)`` returns fresh rows, int64 ``[count, S]``.
        weights: ``[S - 1]``, what the loss of each prediction counts; entry p is the prediction of token p + 1.
        out: the folder; it appears when training is over.
        settings: None = the defaults.
        progress: called with ("from scratch", step, steps).

    Returns:
        The model, frozen, in evaluation mode.

    Raises:
        ValueError: if ``out`` holds a model made otherwise, or the loss stops being finite.
    """
    settings, out = settings or Tiny(), Path(out)
    record = json.loads(json.dumps({"vocabulary": vocabulary, "weights": weights.tolist()} | asdict(settings)))
    if (out / RECORD).exists():
        if json.loads((out / RECORD).read_text()) != record:
            raise ValueError(f"{out} holds a model that was made with other settings")
        return LlamaForCausalLM.from_pretrained(out).eval().requires_grad_(False)
    model = build(vocabulary, len(weights) + 1, settings)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * rate(step, settings)
        rows = draw(settings.batch, settings.seed * 1_000_003 + step)
        loss = weighted_loss(model, rows, weights)
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
    model.save_pretrained(beside)
    (beside / RECORD).write_text(json.dumps(record))
    beside.rename(out)
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
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return LlamaForCausalLM(config)


def weighted_loss(model: PreTrainedModel, rows: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of the losses in nats of rows ``[B, S]``; predictions of weight 0 are not even computed."""
    counted = weights.nonzero()[:, 0]
    hidden = model.get_decoder()(input_ids=rows[:, :-1], use_cache=False).last_hidden_state[:, counted]
    logits = model.get_output_embeddings()(hidden).float()
    losses = cross_entropy(logits.flatten(0, 1), rows[:, counted + 1].flatten(), reduction="none")
    weight = weights[counted].repeat(len(rows))
    return (losses * weight).sum() / weight.sum()


def rate(step: int, settings: Tiny) -> float:
    """Share of the peak learning rate."""
    if step < settings.warmup:
        return (step + 1) / (settings.warmup + 1)
    past = (step - settings.warmup) / max(settings.steps - settings.warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * past))

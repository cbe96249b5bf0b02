"""Teacher-forced replay: a whole sequence in one forward, eviction applied inside each layer.

Offline form of every policy: each full-attention layer feeds its queries, keys and values to a fresh residency in one
piece. A token's loss is what a model would have paid for it had it generated the sequence under the policy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from kvkeep.policies.base import Geometry, Policy
from kvkeep.policies.learned import Learned
from kvkeep.runtime import attention
from kvkeep.runtime.entry import EntryResidency
from kvkeep.runtime.geometry import bounded_layers, layer_geometry, text_config
from kvkeep.runtime.interval import IntervalResidency
from kvkeep.runtime.residency import rows_by
from kvkeep.scorers import model_fingerprint
from kvkeep.slots import pad_front
from kvkeep.sparse_attention import causal_attention, live_attention

Observer = Callable[[Geometry, Tensor, Tensor, Tensor, Tensor], None]
"""Called with (geometry, query ``[B, Hq, S, D]``, key, value ``[B, H, S, D]``, evicted_at ``[B, H, S]``) of a layer,
for each group of rows that are padded alike, without the pads."""

HEAD_BLOCK = 256  # positions whose logits exist at a time


@dataclass
class Replay:
    """What a replay measured; index p of a loss or entropy is the prediction of token p + 1.

    Attributes:
        token_loss: float32 ``[B, S-1]`` nats; 0 where ``valid`` is False.
        entropy: float32 ``[B, S-1]`` nats, of the predicted distribution.
        valid: bool ``[B, S-1]``, False where the token or its context is padding.
        evicted_at: per layer int32 ``[B, H, S]``, the column of the query at which each column's token is gone
            (S = it survives, 0 = padding, which is never seen); None for layers that are not ours.
        logits: ``[B, S, V]`` if asked for.
    """

    token_loss: Tensor
    entropy: Tensor
    valid: Tensor
    evicted_at: list[Tensor | None]
    logits: Tensor | None = None


def replay(
    model: PreTrainedModel,
    input_ids: Tensor,
    policy: Policy,
    attention_mask: Tensor | None = None,
    return_logits: bool = False,
    gradients: bool = False,
    observe: Observer | None = None,
) -> Replay:
    """Run ``input_ids`` through the model as if it had been generated under ``policy``.

    The model's attention is switched to kvkeep's for the call and restored, whatever happens.

    Args:
        model: a decoder of transformers with a language-modelling head.
        input_ids: int64 ``[B, S]``, S >= 2.
        policy: any, oracles included.
        attention_mask: ``[B, S]``, 0 at left padding; None = no padding.
        return_logits: also return all logits; otherwise only ``HEAD_BLOCK`` positions of them exist at a time.
        gradients: keep the graph (entry policies and ``full`` only); otherwise the call runs without gradients.
        observe: called in every bounded layer, see :data:`Observer`.

    Raises:
        ValueError: for a model without full-attention layers, one that does not hand keywords down to its attention,
            a scorer made for another model, padding other than on the left, a sequence of one token, or values that are
            not finite.
        TypeError: for anything but a transformers model, a tensor of ids and a policy.
    """
    _require_fits(model, policy)
    hidden, lifetimes = hidden_states(model, input_ids, policy, attention_mask, gradients, observe)
    with torch.set_grad_enabled(gradients):
        loss, entropy, logits = _score(model, hidden, input_ids, return_logits)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    valid = (mask[:, 1:] * mask[:, :-1]).bool()
    return Replay(loss * valid, entropy * valid, valid, lifetimes, logits)


@torch.no_grad()
def token_losses(model: PreTrainedModel, input_ids: Tensor, policy: Policy) -> Tensor:
    """The ``token_loss`` ``[B, S-1]`` that :func:`replay` measures of ids ``[B, S]`` without padding, in nats, alone:
    entropies cost as much again.

    Raises:
        ValueError, TypeError: as :func:`replay`.
    """
    _require_fits(model, policy)
    hidden, _ = hidden_states(model, input_ids, policy)
    blocks = by_blocks(model, hidden, lambda logits, start: _token_loss(logits, input_ids, start)[0])
    return torch.cat(blocks, 1)


def _require_fits(model: PreTrainedModel, policy: Policy) -> None:
    """Weights too: the cache sees a config only."""
    if isinstance(policy, Learned) and isinstance(model, PreTrainedModel):
        policy.scorer.require_fits(model.config, model_fingerprint(model))


def _token_loss(logits: Tensor, input_ids: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Losses ``[B, n]`` of the tokens after the n positions from ``start`` on that have one, and their logits
    ``[B, n, V]``, in float32 or wider."""
    target = input_ids[:, start + 1 : start + 1 + logits.shape[1]]
    wide = logits[:, : target.shape[1]].to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(wide.flatten(0, 1), target.flatten(), reduction="none").view(target.shape), wide


def hidden_states(
    model: PreTrainedModel,
    input_ids: Tensor,
    policy: Policy,
    attention_mask: Tensor | None = None,
    gradients: bool = False,
    observe: Observer | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """What :func:`replay` measures logits of: for losses of one's own, see :func:`by_blocks`.

    With gradient checkpointing, a layer that is computed again in backward sees the tokens that it saw in forward, is
    not scored again and not observed again; backward must then run inside :func:`kvkeep_attention`.

    Args: as :func:`replay`.

    Returns:
        The decoder's last hidden states ``[B, S, hidden]``, and ``evicted_at`` per layer as in :class:`Replay`.

    Raises:
        ValueError, TypeError: as :func:`replay`.
    """
    if not isinstance(model, PreTrainedModel) or not isinstance(policy, Policy) or not isinstance(input_ids, Tensor):
        raise TypeError(
            "replay takes a transformers model, a tensor of token ids and a policy of kvkeep.policies.create, not a "
            f"{type(model).__name__}, a {type(input_ids).__name__} and a {type(policy).__name__}"
        )
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must be {list(input_ids.shape)} like the ids, not {list(attention_mask.shape)}"
        )
    if input_ids.dim() != 2 or input_ids.shape[1] < 2:
        raise ValueError(f"input_ids must be [batch, length >= 2], not {list(input_ids.shape)}")
    if gradients and policy.kind == "attention":
        raise ValueError(f"policy {policy.name!r} writes its slots in place and has no gradients")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    pads = attention.left_padding(mask.bool())
    session = _Session(model, policy, pads, observe)
    with torch.set_grad_enabled(gradients), kvkeep_attention(model):
        return session.forward(model, input_ids, mask), session.lifetimes


def by_blocks(model: PreTrainedModel, hidden: Tensor, measure: Callable[[Tensor, int], Any]) -> list:
    """Logits of ``HEAD_BLOCK`` positions at a time, handed to ``measure`` and forgotten.

    Where gradients are wanted a block's logits are computed again in backward, so that ``HEAD_BLOCK x V`` numbers, and
    never ``S x V``, exist at a time.

    Args:
        model: whose head is used.
        hidden: ``[B, S, hidden]``, from :func:`hidden_states`.
        measure: called with logits ``[B, n, V]`` and the first of their n positions.

    Returns:
        What ``measure`` returned for each block, in order.
    """

    def part(start: int, block: Tensor) -> Any:
        return measure(project(model, block), start)

    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    parts = []
    for start in range(0, hidden.shape[1], HEAD_BLOCK):
        block = hidden[:, start : start + HEAD_BLOCK]
        parts.append(again(part, start, block) if torch.is_grad_enabled() else part(start, block))
    return parts


class _Session:
    """Attends for every bounded layer during one replay and collects the lifetimes."""

    def __init__(self, model: PreTrainedModel, policy: Policy, pads: list[int], observe: Observer | None):
        self.config = text_config(model.config)
        self.policy = policy
        self.bounded = bounded_layers(self.config, policy)
        self.observe = observe
        self.groups = rows_by(pads)  # rows of equal padding are run together, on their unpadded columns
        self.padded = any(pads)
        self.lifetimes: list[Tensor | None] = [None] * len(self.bounded)
        self.foreseen: dict[tuple[int, int], dict] = {}  # (layer, padding) -> memory, of an oracle's dense pass
        self.looking_ahead = False
        self.finished = False  # layers that attend from then on are computed again, in backward
        self.visited = 0

    def forward(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Hidden states ``[B, S, hidden]`` of the decoder; twice for an oracle that reads the dense model."""
        inputs = {"input_ids": input_ids, "use_cache": False, "kvkeep": self}
        if self.padded:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
            inputs |= {"attention_mask": mask, "position_ids": positions}
        decoder = model.get_decoder()
        if self.policy.oracle and self.policy.labels == "full":
            self.looking_ahead = True
            decoder(**inputs)
            self.looking_ahead = False
        hidden = decoder(**inputs).last_hidden_state
        self.finished = True
        if not self.visited:
            raise ValueError(
                f"{type(model).__name__} does not hand keyword arguments down to its attention, which replay needs"
            )
        return hidden

    def takes(self, module: torch.nn.Module) -> bool:
        return self.bounded[module.layer_idx]

    def attend(self, module, query: Tensor, key: Tensor, value: Tensor, mask, scaling) -> Tensor:
        layer = module.layer_idx
        if self.finished:
            return self._attend_again(layer, query, key, value, scaling)
        self.visited += 1
        geometry = layer_geometry(self.config, self.policy, layer, query.shape[1], key, scaling)
        outputs, lifetimes = [], []
        for pad, rows in self.groups:
            real = [tensor[rows, :, pad:] if self.padded else tensor for tensor in (query, key, value)]
            output, evicted_at = self._attend_rows(geometry, pad, *real)
            if self.observe is not None and not self.looking_ahead:
                self.observe(geometry, *real, evicted_at)
            outputs.append(pad_front(output, pad))
            lifetimes.append(pad_front(evicted_at + pad, pad))
        if not self.looking_ahead:
            self.lifetimes[layer] = self._in_order(lifetimes)
        return self._in_order(outputs) if self.padded else outputs[0]

    def _attend_again(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling) -> Tensor:
        """The same attention under the lifetimes that are known, whatever the recomputed keys would score."""
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        outputs = []
        for pad, rows in self.groups:
            real = [tensor[rows, :, pad:] if self.padded else tensor for tensor in (query, key, value)]
            evicted_at = self.lifetimes[layer][rows, :, pad:] - pad
            outputs.append(pad_front(live_attention(*real, evicted_at, scaling), pad))
        return self._in_order(outputs) if self.padded else outputs[0]

    def _in_order(self, parts: list[Tensor]) -> Tensor:
        """Rows of the groups, each ``[rows, ...]``, in the order of the batch."""
        order = torch.tensor([row for _, rows in self.groups for row in rows], device=parts[0].device).argsort()
        return torch.cat(parts)[order]

    def _attend_rows(self, geometry, pad: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        length = key.shape[2]
        if self.policy.kind == "full" or self.looking_ahead:
            if self.looking_ahead:
                self.foreseen[geometry.layer, pad] = self.policy.foresee(geometry, query, key)
            survive = torch.full(key.shape[:3], length, dtype=torch.int32, device=key.device)
            return causal_attention(query, key, value, geometry.scaling), survive
        if self.policy.kind == "entry":
            residency = EntryResidency(self.policy, geometry, key, value, keep=False)
        else:
            residency = IntervalResidency(self.policy, geometry, key, value)
        if self.policy.oracle:
            memory = self.foreseen.pop((geometry.layer, pad), None)
            residency.memory = self.policy.foresee(geometry, query, key) if memory is None else memory
        residency.record_lifetimes(length)
        residency.check(key.detach(), value.detach())
        return residency.ingest(query, key, value), residency.lifetimes


@contextlib.contextmanager
def kvkeep_attention(model: PreTrainedModel):
    """Inside, the model uses kvkeep's attention; afterwards its own again. May be nested."""
    before = {"": model.config._attn_implementation}
    for name in model.config.sub_configs:
        part = getattr(model.config, name, None)
        if part is not None:
            before[name] = part._attn_implementation
    model.set_attn_implementation(attention.NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before if len(before) > 1 else before[""])


def _score(model: PreTrainedModel, hidden: Tensor, input_ids: Tensor, keep: bool):
    """Loss and entropy of every prediction, a block of positions at a time."""
    losses, entropies, kept = [], [], []
    for start in range(0, hidden.shape[1], HEAD_BLOCK):
        logits = project(model, hidden[:, start : start + HEAD_BLOCK])
        if keep:
            kept.append(logits)
        loss, wide = _token_loss(logits, input_ids, start)
        losses.append(loss)
        log_probabilities = wide.log_softmax(-1)
        entropies.append(-(log_probabilities.exp() * log_probabilities).sum(-1))
    return torch.cat(losses, 1), torch.cat(entropies, 1), torch.cat(kept, 1) if keep else None


def project(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Hidden states ``[B, n, hidden]`` -> logits ``[B, n, V]`` as the model's own head computes them.

    Raises:
        ValueError: for a model without a language-modelling head.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no language-modelling head")
    config = text_config(model.config)
    logits = head(hidden)
    if getattr(config, "logit_scale", None) is not None:  # Cohere
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None) is not None:  # Granite
        logits = logits / config.logits_scaling
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return logits if cap is None else torch.tanh(logits / cap) * cap

"""The attention function registered with transformers as ``"kvkeep"``, and the mask that goes with it.

Without a handler in its keywords it is stock attention. With one (a layer of :class:`~kvkeep.EvictingCache`, or a
:func:`~kvkeep.replay`) the handler attends. The handler arrives as the keyword ``kvkeep`` among those that a model
hands down to its attention function: a documented path, without hooks, patches or global state.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvkeep.sparse_attention import causal_attention, masked_output

NAME = "kvkeep"
UNSUPPORTED = frozenset(("softcap", "s_aux", "position_bias"))  # keywords that change the softmax


class Handler(Protocol):
    """Whoever attends in place of stock attention."""

    def takes(self, module: torch.nn.Module) -> bool:
        """Whether this layer is the handler's; the others are left to stock attention."""
        ...

    def attend(self, module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling) -> Tensor:
        """``[B, Hq, n, D]`` -> ``[B, Hq, n, Dv]``.

        ``mask`` is None, or bool ``[B, 1, 1, m]`` marking the columns that are no padding.
        """
        ...


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    kvkeep: Handler | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention in the form transformers calls it; returns ``[B, n, Hq, Dv]``.

    Raises:
        ValueError: for models whose softmax is not the plain one, for dropout, and for masks other than padding.
    """
    if kvkeep is not None and kvkeep.takes(module):
        if dropout or attention_mask is not None or not UNSUPPORTED.isdisjoint(kwargs):
            _require_plain(module, attention_mask, dropout, query.shape[2], kwargs)
        output = kvkeep.attend(module, query, key, value, attention_mask, scaling)
        return output.transpose(1, 2).contiguous(), None
    plain = not dropout and getattr(module, "is_causal", True) and all(kwargs.get(name) is None for name in UNSUPPORTED)
    if not plain or (attention_mask is not None and attention_mask.shape[2] != 1):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.shape[2] == 1:  # packed heads: faster than sdpa's grouped heads on CPU, and the same in every cache
        output = masked_output(query, key, value, attention_mask, scaling)
    else:
        live = None if attention_mask is None else attention_mask[:, :, 0]
        output = causal_attention(query, key, value, scaling, live)
    return output.transpose(1, 2).contiguous(), None


def _require_plain(module, mask: Tensor | None, dropout: float, count: int, kwargs: dict) -> None:
    changed = [name for name in sorted(UNSUPPORTED) if kwargs.get(name) is not None]
    if changed:
        raise ValueError(
            f"{type(module).__name__} uses {', '.join(changed)}, which kvkeep's attention does not support"
        )
    if dropout:
        raise ValueError(f"kvkeep's attention has no dropout (got {dropout}); put the model in eval mode")
    if mask is not None and (mask.dim() != 4 or (mask.shape[2] != 1 and count > 1)):
        raise ValueError("kvkeep evicts under causal attention with left padding only, not under a custom 4D mask")


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs,
) -> Tensor | None:
    """The mask under ``"kvkeep"``: for full attention just the padding, bool ``[B, 1, 1, kv]``, never queries x keys.

    Layers of any other shape (sliding, packed, bidirectional, a static cache with columns not yet written) get the
    mask that ``sdpa`` would. Offsets may be tensors: where there are as many columns as queries, the newest is last
    whatever they say.
    """
    known = isinstance(q_offset, int) and isinstance(kv_offset, int)
    newest_is_last = q_length == kv_length or (known and q_offset + q_length == kv_offset + kv_length)
    if mask_function is causal_mask_function and kwargs.get("local_size") is None and newest_is_last:
        if attention_mask is None:
            return None
        last = kv_offset + kv_length if known else attention_mask.shape[1]
        return attention_mask[:, None, None, last - kv_length : last].bool()
    return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs)


def left_padding(mask: Tensor) -> list[int]:
    """Leading padding columns of each row of a bool mask ``[B, S]``, S for a row of padding only.

    Raises:
        ValueError: for a hole or right padding, naming the row.
    """
    real = mask.sum(-1)
    pads = mask.shape[-1] - real
    expected = torch.arange(mask.shape[-1], device=mask.device) >= pads[:, None]
    wrong = (expected != mask).any(-1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(f"row {row} of the attention mask has padding after a token; kvkeep takes left padding only")
    return pads.tolist()


def register() -> None:
    """Make ``attn_implementation="kvkeep"`` known to transformers."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)

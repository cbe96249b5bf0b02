"""The transformers Cache whose full-attention layers hold a fixed number of tokens.

The way of a token: a model calls :meth:`EvictingLayer.update`, which hands itself on to kvkeep's attention function
(or, under stock attention, takes the pair at once); the layer's residency (``entry.py`` or ``interval.py``) chooses a
slot; ``slots.py`` writes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from kvkeep.policies.base import Geometry, Policy
from kvkeep.runtime import attention
from kvkeep.runtime.entry import EntryResidency
from kvkeep.runtime.geometry import bounded_layers, layer_geometry, stock_cache_layers, text_config
from kvkeep.runtime.interval import IntervalResidency
from kvkeep.runtime.residency import Residency

# First release whose attention hands its own keywords to ``cache.update``: through them a layer meets the queries.
HANDS_KEYWORDS = Version("5.24.0")

RESIDENCIES = {"entry": EntryResidency, "attention": IntervalResidency}


class EvictingCache(Cache):
    """A cache of fixed size: ``model.generate(**inputs, cache=EvictingCache(model.config, policy))``.

    Full-attention layers hold at most ``policy.budget.slots`` tokens per KV head, in buffers allocated once; sliding,
    linear and shared layers stay as transformers makes them. Keys keep their true positions; left padding is never
    held. A second turn on the same cache continues exactly; it cannot be rewound.

    Under stock attention (``"sdpa"``, ``"eager"``) entry policies work too; padding is then read from the position
    ids that ``generate`` makes, so a bare forward of a padded batch must be given them. On transformers below 5.24
    the cache is not told them and ``padding`` must be given for a batch.

    Args:
        config: the model's config (the live one: it says which attention is in use).
        policy: from :func:`kvkeep.policies.create`.
        prefill: "sparse" = a prompt longer than the budget is kept and seen exactly as token-by-token decoding would;
            "dense" = it attends densely and is pruned once.
        padding: left padding of each row, an int or one per row; None = find it out.

    Raises:
        ValueError: for an oracle, an unknown ``prefill``, a model without full-attention layers, or an attention
            policy without the attention function or transformers version it needs.
        TypeError: for anything but a config and a policy.

    Example:
        >>> policy = kvkeep.policies.create("h2o_decayed", 256)
        >>> cache = kvkeep.EvictingCache(model.config, policy)
        >>> model.generate(**inputs, cache=cache, max_new_tokens=1000)
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        policy: Policy,
        prefill: str = "sparse",
        padding: int | Sequence[int] | None = None,
    ):
        if not isinstance(policy, Policy) or not isinstance(config, PreTrainedConfig):
            raise TypeError(
                "EvictingCache takes a model's config and a policy of kvkeep.policies.create, not a "
                f"{type(config).__name__} and a {type(policy).__name__}"
            )
        if prefill not in ("sparse", "dense"):
            raise ValueError(f"prefill must be 'sparse' or 'dense', not {prefill!r}")
        if policy.oracle:
            raise ValueError(
                f"policy {policy.name!r} is an oracle: it reads the future and cannot generate; use replay"
            )
        config = text_config(config)
        bounded = bounded_layers(config, policy)
        if policy.kind == "attention":
            _require_queries(policy, config)
        layers = stock_cache_layers(config)
        if policy.kind != "full":
            layers = [
                EvictingLayer(config, policy, index, prefill == "dense", padding) if ours else layer
                for index, (layer, ours) in enumerate(zip(layers, bounded, strict=True))
            ]
        super().__init__(layers=layers)
        self.policy = policy
        for layer in self.evicting_layers:
            layer.leader = self.evicting_layers[0]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        if layer_idx >= len(self.layers):
            raise ValueError(f"the cache was made for {len(self.layers)} layers; the model has a layer {layer_idx}")
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    @property
    def evicting_layers(self) -> list[EvictingLayer]:
        return [layer for layer in self.layers if isinstance(layer, EvictingLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes held: keys, values and side state of all layers, however long the generation."""
        total = 0
        for layer in self.layers:
            if isinstance(layer, EvictingLayer):
                total += layer.residency.nbytes if layer.residency else 0
            elif getattr(layer, "keys", None) is not None:
                total += layer.keys.nbytes + layer.values.nbytes
        return total

    @property
    def evicted(self) -> float:
        """Tokens evicted so far, mean over rows (every layer and head of a row has evicted as many)."""
        gone = [
            seen - held
            for layer in self.evicting_layers
            if layer.residency
            for seen, held in zip(layer.residency.seen, layer.residency.slots.held, strict=True)
        ]
        return sum(gone) / len(gone) if gone else 0.0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.evicting_layers:
            raise ValueError(
                "an evicting cache cannot be rewound: evicted tokens are gone (assisted decoding needs a full cache)"
            )
        super().crop(tokens_to_remove)


class EvictingLayer(CacheLayerMixin):
    """One bounded layer. ``keys`` and ``values`` are the slots' own buffers ``[batch, kv_heads, slots, head_dim]``."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, config: PreTrainedConfig, policy: Policy, index: int, dense: bool, padding):
        super().__init__()
        self.config, self.policy, self.index, self.dense, self.padding = config, policy, index, dense, padding
        self.hands_keywords = transformers_version() >= HANDS_KEYWORDS
        self.leader, self.handing = self, None  # the first of the cache's evicting layers, and what it found
        self.residency: Residency | None = None
        self.geometry: Geometry | None = None
        self.made_for: tuple[int, int, int] | None = None  # rows, KV heads, size of a head
        self.lead = 0  # columns of padding of the first row
        self.awaiting = False  # handed on to the attention function, which has not attended yet

    # What transformers asks

    @property
    def columns(self) -> int:
        """Columns seen, padding included: what transformers calls the sequence length."""
        return self.residency.seen[0] + self.lead if self.residency else 0

    def get_seq_length(self) -> int | Tensor:
        """``columns``; a tensor, for which nobody waits, where a step runs on an accelerator or is being compiled.

        The device counts tokens, so that a step that runs from a captured graph counts too.
        """
        steady = self.hands_over and self.residency is not None and self.residency.steady
        if steady and (is_dynamo_compiling() or self.residency.clock.device.type != "cpu"):
            return self.residency.clock[0] + self.lead
        return self.columns

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Under kvkeep's attention the mask is padding over all columns; stock attention sees what update returns.

        A row that is full has no padding to tell of: then the one new column is enough.
        """
        if self.hands_over:
            steady = query_length == 1 and self.residency is not None and self.residency.steady
            return (1, self.get_seq_length()) if steady else (self.columns + query_length, 0)
        slots = self.policy.budget.slots
        if query_length == 1:
            width = min(self.columns + 1, slots)
            return width, self.columns + 1 - width
        resident = min(self.columns, slots)
        return resident + query_length, self.columns - resident

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    @property
    def hands_over(self) -> bool:
        return self.hands_keywords and self.config._attn_implementation == attention.NAME

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Take n new pairs ``[B, H, n, D]``; returns what stock attention should read.

        Raises:
            ValueError: where the policy or the prompt needs kvkeep's attention and the model does not use it.
        """
        if self is self.leader or self.leader.handing is None:
            self.leader.handing = self.hands_over  # asked once a forward
        keywords = kwargs.get("kwargs")
        if keywords is None or self.awaiting or not self.leader.handing:
            return self._update_otherwise(key_states, value_states, *args, **kwargs)
        keywords["kvkeep"] = self  # the model passes these keywords on to the attention function
        self.awaiting = True
        return key_states, value_states

    def _update_otherwise(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self.awaiting:
            raise ValueError('the model did not call kvkeep\'s attention; load it with attn_implementation="kvkeep"')
        keywords = next((given for given in (*args, *kwargs.values()) if isinstance(given, dict)), None)
        if not self.leader.handing:
            return self._update_under_stock_attention(keys, values, keywords)
        if keywords is None:
            raise ValueError(
                "this model does not hand its attention's keywords to the cache, which kvkeep's attention needs; "
                'use an entry policy with attn_implementation="sdpa"'
            )
        return self.update(keys, values, kwargs=keywords)

    def takes(self, module) -> bool:
        return True

    def attend(self, module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling) -> Tensor:
        """Called by kvkeep's attention function with what :meth:`update` let through."""
        self.awaiting = False
        batch, kv_heads, count, head_dim = key.shape
        if self.made_for != (batch, kv_heads, head_dim):
            self._start(key, value, query.shape[1], scaling)
        residency = self.residency
        if count > 1 or not min(residency.slots.held):
            pads = self._new_pads(None if mask is None else attention.left_padding(mask[:, 0, 0]), count)
            self.lead += pads[0]
            return residency.advance(query, key, value, pads)
        return residency.step(query, key, value)

    def fill(self, query: Tensor, keys: Tensor, values: Tensor, columns: int) -> None:
        """Pretend that ``columns`` tokens have been seen of which the given pairs are held: benchmarks only."""
        self._start(keys, values, query.shape[1], None)
        self.residency.start_at([columns - keys.shape[2]] * keys.shape[0])
        self.residency.advance(query, keys, values)

    def _update_under_stock_attention(self, keys: Tensor, values: Tensor, keywords: dict | None):
        if self.policy.kind == "attention":
            _require_queries(self.policy, self.config)
        count, columns, slots = keys.shape[2], self.columns, self.policy.budget.slots
        self._start(keys, values, None, None)
        pads = None
        if count > 1 or min(self.residency.slots.held) <= 1:  # position 0: a first token or padding, the next tells
            pads = self._new_pads(self._padding_from_positions(keys, keywords), count)
            self.lead += pads[0]
        if count > 1:
            self._require_sparse_is_exact(count, pads)
        held = self.residency.slots
        if count == 1 and columns:
            self.residency.advance(None, keys, values, pads)
            width = min(columns + 1, slots)
            return held.keys[:, :, slots - width :], held.values[:, :, slots - width :]
        resident = slice(slots - min(columns, slots), slots)
        seen = (keys, values)
        if columns:  # this forward only: what is held, then the new tokens in order
            seen = torch.cat([held.keys[:, :, resident], keys], 2), torch.cat([held.values[:, :, resident], values], 2)
        self.residency.advance(None, keys, values, pads)
        return seen

    def _require_sparse_is_exact(self, count: int, pads: list[int]) -> None:
        longest = max(seen + count - pad for seen, pad in zip(self.residency.seen, pads, strict=True))
        if not self.dense and longest > self.policy.budget.slots:
            raise ValueError(
                f"a prompt of {longest} tokens is longer than the budget of {self.policy.budget.slots}: sparse prefill "
                f'needs attn_implementation="kvkeep" (transformers >= {HANDS_KEYWORDS}), and the config given to the '
                f'cache says {self.config._attn_implementation!r}; or use prefill="dense"'
            )

    def _start(self, keys: Tensor, values: Tensor, query_heads: int | None, scaling) -> None:
        shape = (keys.shape[0], keys.shape[1], keys.shape[3])
        if self.residency is not None:
            if shape != self.made_for:
                raise ValueError(
                    "this cache holds {} rows of {} KV heads of size {}, the new tokens have {}, {} and {}: ".format(
                        *self.made_for, *shape
                    )
                    + "make a new cache, or reset this one"
                )
            return
        heads = query_heads or self.config.num_attention_heads
        self.geometry = layer_geometry(self.config, self.policy, self.index, heads, keys, scaling)
        self.residency = RESIDENCIES[self.policy.kind](self.policy, self.geometry, keys, values, dense=self.dense)
        self.keys, self.values, self.made_for = self.residency.slots.keys, self.residency.slots.values, shape
        self.is_initialized = True

    def _padding_from_positions(self, keys: Tensor, keywords: dict | None) -> list[int] | None:
        """Left padding from the position of the newest column, which counts real tokens only."""
        batch, count = keys.shape[0], keys.shape[2]
        if self.padding is not None:
            return None
        positions = None if keywords is None else keywords.get("position_ids")
        if positions is None:
            if batch > 1:
                raise ValueError(
                    f"transformers {transformers_version()} does not tell the cache which tokens of a batch are "
                    "padding: give EvictingCache(..., padding=0) or the left padding of each row"
                )
            return None
        newest = positions[:, -1].expand(batch)
        return (self.columns + count - 1 - newest).clamp(min=0).tolist()

    def _new_pads(self, padding: list[int] | None, count: int) -> list[int]:
        """How many of the next ``count`` columns are padding, per row."""
        batch, columns = self.residency.clock.shape[0], self.columns
        if self.padding is not None:
            padding = [self.padding] * batch if isinstance(self.padding, int) else list(self.padding)
            if len(padding) != batch:
                raise ValueError(f"padding was given for {len(padding)} rows, the batch has {batch}")
        padding = padding or [0] * batch
        for row, (pad, seen) in enumerate(zip(padding, self.residency.seen, strict=True)):
            if seen and pad != columns - seen:
                raise ValueError(
                    f"row {row} had {columns - seen} columns of left padding before, now {pad} (under stock "
                    "attention the first piece of a prompt must reach into every row)"
                )
        return [min(max(pad - columns, 0), count) for pad in padding]

    # Rows

    def reset(self) -> None:
        self.residency, self.made_for, self.lead, self.awaiting = None, None, 0, False
        self.keys = self.values = None
        self.is_initialized = False

    def _select(self, rows: Tensor) -> None:
        if self.residency is not None:
            columns = self.columns
            self.residency = self.residency.select(rows.to(self.residency.slots.keys.device))
            self.lead = columns - self.residency.seen[0]
            self.made_for = (len(rows), *self.made_for[1:])
            self.keys, self.values = self.residency.slots.keys, self.residency.slots.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.residency is not None:
            self._select(torch.arange(self.residency.clock.shape[0]).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError("an evicting cache cannot be rewound: evicted tokens are gone")

    @property
    def positions(self) -> Tensor | None:
        """int32 ``[B, H, slots]``: the true position of the token in every slot, -1 where empty."""
        return None if self.residency is None else self.residency.slots.positions


def cache_keyword(model) -> str:
    """What the model's forward and ``generate`` call the cache: "cache", in older transformers "past_key_values"."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def transformers_version() -> Version:
    return Version(transformers.__version__)


def _require_queries(policy: Policy, config: PreTrainedConfig) -> None:
    if transformers_version() < HANDS_KEYWORDS:
        raise ValueError(
            f"policy {policy.name!r} needs the queries: transformers >= {HANDS_KEYWORDS}, this is "
            f"{transformers_version()}"
        )
    if config._attn_implementation != attention.NAME:
        raise ValueError(
            f"policy {policy.name!r} needs attention: load the model with attn_implementation={attention.NAME!r}, "
            f"not {config._attn_implementation!r}"
        )

"""What a scorer must know of a model: which layers are bounded, their heads, and how their keys are rotated.

Read from a config by attribute names alone, so that this floor needs no transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

BOUNDED = "full_attention"  # the one type of layer whose cache would grow
LARGEST_THETA = 1e12  # of a rotary embedding; models have 1e4 to 1e9


@dataclass(frozen=True)
class LayerShape:
    """One bounded layer: its index in the model, KV heads, query heads, and the size of a head."""

    index: int
    kv_heads: int
    query_heads: int
    head_dim: int


@dataclass(frozen=True)
class Layout:
    """The shape of a model as far as a scorer depends on it.

    Attributes:
        layers: all layers of the decoder.
        bounded: those with full attention, the ones a policy holds to a budget.
        rotary: rotary parameters of the bounded layers (``rope_type``, ``rope_theta``, ...); empty without rotary.
    """

    layers: int
    bounded: tuple[LayerShape, ...]
    rotary: Mapping[str, Any]

    @classmethod
    def of(cls, config) -> Layout:
        """The layout that a model config describes.

        Args:
            config: a transformers config, or anything with the same attributes.

        Raises:
            ValueError: where the config has no attention heads or no full-attention layer.
        """
        if hasattr(config, "get_text_config"):
            config = config.get_text_config(decoder=True)
        layers = getattr(config, "num_hidden_layers", None)
        if not layers or not getattr(config, "num_attention_heads", None):
            raise ValueError(f"{type(config).__name__} describes a model without attention layers")
        each = getattr(config, "per_layer_config", None) or [config] * layers
        types = _layer_types(config, list(each))
        bounded = [_shape(index, own) for index, own in enumerate(each) if types[index] == BOUNDED]
        if not bounded:
            raise ValueError(f"{type(config).__name__} has no full-attention layer for a scorer to work in")
        return cls(layers, tuple(bounded), _rotary(config))

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Layout:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: for what no model has, naming the field.
        """
        layers, bounded = record["layers"], tuple(LayerShape(**shape) for shape in record["bounded"])
        indices = [shape.index for shape in bounded]
        if not indices or indices != sorted(set(indices)) or indices[0] < 0 or indices[-1] >= layers:
            raise ValueError(f"layout.bounded has the layers {indices} of layout.layers {layers}")
        for shape in bounded:
            sizes = shape.kv_heads, shape.query_heads, shape.head_dim
            if min(sizes) < 1 or shape.query_heads % shape.kv_heads:
                raise ValueError(
                    f"layout.bounded has kv_heads, query_heads and head_dim {sizes} in layer {shape.index}: "
                    "they are 1 or more, and query_heads a multiple of kv_heads"
                )
        _require_rotary(record["rotary"])
        return cls(layers, bounded, record["rotary"])

    def to_json(self) -> dict[str, Any]:
        return {
            "layers": self.layers,
            "bounded": [asdict(shape) for shape in self.bounded],
            "rotary": dict(self.rotary),
        }

    def mismatch(self, model: Layout) -> str | None:
        """The first difference as "made for ..., the model has ...", None where there is none."""
        pairs = [
            ("{} layers", self.layers, model.layers),
            ("full attention in layers {}", _indices(self), _indices(model)),
        ]
        for own, other in zip(self.bounded, model.bounded, strict=False):
            where = f" in layer {own.index}"
            pairs += [
                ("{} KV heads" + where, own.kv_heads, other.kv_heads),
                ("{} query heads" + where, own.query_heads, other.query_heads),
                ("heads of size {}" + where, own.head_dim, other.head_dim),
            ]
        for name in sorted({*self.rotary, *model.rotary}, key=lambda name: (name != "rope_theta", name)):
            pairs.append((f"rotary {name} {{}}", self.rotary.get(name), model.rotary.get(name)))
        for text, own, other in pairs:
            if own != other:
                return f"made for {text.format(own)}, the model has {other}"
        return None


def _indices(layout: Layout) -> list[int]:
    return [shape.index for shape in layout.bounded]


def _layer_types(config, each: list) -> list[str]:
    """The type of every layer; layers that read another layer's cache are "shared"."""
    types = getattr(config, "layer_types", None)
    if types is None:
        types = [
            "sliding_attention"
            if getattr(own, "sliding_window", None) is not None
            else "chunked_attention"
            if getattr(own, "attention_chunk_size", None) is not None
            else BOUNDED
            for own in each
        ]
    types = list(types)
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is not None:
        return ["shared" if mode == "reuse" else kind for mode, kind in zip(modes, types, strict=True)]
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    return types[: len(types) - shared] + ["shared"] * shared


def _shape(index: int, config) -> LayerShape:
    query_heads = config.num_attention_heads
    return LayerShape(
        index=index,
        kv_heads=getattr(config, "num_key_value_heads", None) or query_heads,
        query_heads=query_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // query_heads,
    )


def _require_rotary(rotary: Mapping[str, Any]) -> None:
    """Raise ValueError for what :func:`_rotary` gives of no model."""
    kind, theta = rotary.get("rope_type"), rotary.get("rope_theta")
    number = isinstance(theta, int | float) and not isinstance(theta, bool)
    if rotary and not (isinstance(kind, str) and number and 0 < theta < LARGEST_THETA):
        raise ValueError(f"layout.rotary has rope_type {kind!r} and rope_theta {theta!r}: a name and a number above 0")


def _rotary(config) -> dict[str, Any]:
    """Rotary parameters of the full-attention layers without defaults, so that equal embeddings compare equal."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        theta, scaling = getattr(config, "rope_theta", None), getattr(config, "rope_scaling", None)
        parameters = {} if theta is None else {"rope_theta": theta, **(scaling or {})}
    if parameters and "rope_theta" not in parameters and "rope_type" not in parameters:  # one set per type of layer
        parameters = parameters.get(BOUNDED) or {}
    if not parameters:
        return {}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in parameters.items()}
    plain["rope_type"] = plain.get("rope_type") or plain.pop("type", None) or "default"
    if plain.get("partial_rotary_factor") == 1:
        del plain["partial_rotary_factor"]
    return {name: value for name, value in sorted(plain.items()) if value is not None}

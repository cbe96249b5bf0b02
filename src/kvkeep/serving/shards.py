"""A layer's heads on one of several devices (tensor parallelism): which they are, and the scorer's part for them.

Decisions are made per KV head from that head's keys and values, so devices agree on nothing and exchange nothing.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

from torch import nn

from kvkeep.policies.base import Policy
from kvkeep.scorers import LayerShape, Layout, Scorer
from kvkeep.serving.interval import watches


@dataclass(frozen=True)
class Shard:
    """The part of every layer's heads that device ``rank`` of ``size`` holds.

    Where there are fewer KV heads than devices, several hold copies of one, each with a part of its query heads.
    """

    rank: int = 0
    size: int = 1

    def shape(self, whole: LayerShape) -> LayerShape:
        """What the device holds of a layer.

        Raises:
            ValueError: where heads do not divide.
        """
        fewer, more = sorted((whole.kv_heads, self.size))
        if whole.query_heads % self.size or more % fewer:
            raise ValueError(
                f"{whole.query_heads} query and {whole.kv_heads} KV heads of layer {whole.index} do not divide over "
                f"{self.size} devices"
            )
        kv_heads = max(whole.kv_heads // self.size, 1)
        return replace(whole, kv_heads=kv_heads, query_heads=whole.query_heads // self.size)

    def first_head(self, whole: LayerShape) -> int:
        """Index of its first KV head in the model."""
        if whole.kv_heads >= self.size:
            return self.rank * (whole.kv_heads // self.size)
        return self.rank // (self.size // whole.kv_heads)

    def require_serves(self, policy: Policy, layout: Layout) -> None:
        """Raise ValueError where a policy's decisions need more than the heads of one device."""
        if self.size == 1:
            return
        for shape in layout.bounded:
            self.shape(shape)
            if policy.kind == "attention" and watches(policy) and shape.kv_heads < self.size:
                raise ValueError(
                    f"policy {policy.name!r} reads the attention of all query heads of a KV head, which {self.size} "
                    f"devices split: at most {shape.kv_heads} can share layer {shape.index}"
                )
        if not getattr(policy, "per_head", True):
            raise ValueError(
                f"policy {policy.name!r} makes one choice for all heads of a layer, which {self.size} devices split"
            )

    def scorer(self, whole: Scorer) -> Scorer:
        """The scorer for the heads of this device: every tensor of a layer has one entry a head.

        Raises:
            ValueError: where heads do not divide.
        """
        if self.size == 1:
            return whole
        part = copy.copy(whole)
        part._modules = dict(whole._modules)
        part.layers = nn.ModuleDict()
        shapes = []
        for shape in whole.geometry:
            shapes.append(self.shape(shape))
            first = self.first_head(shape)
            part.layers[str(shape.index)] = _slice(whole.layer(shape.index), shapes[-1], first)
        part.layout = replace(whole.layout, bounded=tuple(shapes))
        return part


def _slice(layer, shape: LayerShape, first: int):
    """A copy of a layer's scorer with the heads from ``first`` on."""
    heads, part = layer.shape.kv_heads, copy.deepcopy(layer)
    part.shape = shape
    for tensors in (part._parameters, part._buffers):
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if tensor.shape[0] != heads:
                raise ValueError(f"tensor {name} of the scorer has {tensor.shape[0]} entries, not one for each head")
            kept = tensor.detach()[first : first + shape.kv_heads].clone()
            tensors[name] = nn.Parameter(kept, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else kept
    return part

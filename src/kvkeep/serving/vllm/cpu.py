"""The backend on CPUs, whose kernels pack keys in orders of their own: where a number lies is found out by trying."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from kvkeep.serving.pages import plain_place
from kvkeep.serving.vllm.backend import Keeping, Planning, customised, multiple_of

DIGITS = 256  # whole numbers below it are exact in every number format of a cache


class Backend(CPUAttentionBackend):
    """The stock backend, under a budget where kvkeep is on."""

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        multiple = multiple_of(cls.get_supported_kernel_block_sizes())
        return customised(spec, multiple, super().customize_spec)

    @staticmethod
    def get_impl_cls() -> type[Implementation]:
        return Implementation

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


class Builder(Planning, CPUAttentionMetadataBuilder):
    """Metadata of a step."""


class Implementation(Keeping, CPUAttentionBackendImpl):
    """One layer's attention."""

    def place(self, layer, kv_cache: Tensor) -> Tensor:
        if self.serving.attends:  # no kernel reads the cache
            return plain_place(kv_cache)
        return packed_place(layer.isa, kv_cache.dtype, kv_cache.shape[2], self.head_size)


@functools.cache
def packed_place(isa: str, dtype: torch.dtype, slots: int, head_dim: int) -> Tensor:
    """Where the kernels of ``isa`` put the numbers of a pair: int64 ``[slots, 2 * head_dim]``, found by writing some.

    A block's head is its keys, in whatever order, then its values.

    Raises:
        ValueError: where the kernels do more than move numbers.
    """
    count = slots * head_dim
    codes = torch.arange(2 * count)  # keys, then values
    found = torch.zeros(2 * count, dtype=torch.int64)
    for digit in range(max((2 * count - 1).bit_length() - 1, 0) // 8 + 1):
        written = (codes // DIGITS**digit % DIGITS).to(dtype).view(2, slots, 1, head_dim)
        cache = torch.zeros(1, 1, 2 * slots, head_dim, dtype=dtype)
        key_cache, value_cache = cache.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            written[0], written[1], key_cache, value_cache, torch.arange(slots), isa, k_scale=1.0, v_scale=1.0,
            kv_cache_dtype="auto",
        )  # fmt: skip
        found += cache.flatten().long() * DIGITS**digit
    if not torch.equal(found.sort().values, codes):
        raise ValueError(f"the CPU kernels of {isa!r} do not keep the pairs they are given")
    place = torch.empty_like(codes)
    place[found] = codes.clone()
    keys, values = place.view(2, slots, head_dim)
    return torch.cat([keys, values], -1)

"""The backend on GPUs, over FlashAttention: ``--attention-backend CUSTOM``. Written, not yet run on one."""

from __future__ import annotations

from torch import Tensor
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from kvkeep.serving.pages import plain_place
from kvkeep.serving.vllm.backend import Keeping, Planning, customised, multiple_of


class Backend(FlashAttentionBackend):
    """FlashAttention, under a budget where kvkeep is on."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        multiple = multiple_of(cls.get_supported_kernel_block_sizes(spec))
        return customised(spec, multiple, super().customize_spec)

    @staticmethod
    def get_impl_cls() -> type[Implementation]:
        return Implementation

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


class Builder(Planning, FlashAttentionMetadataBuilder):
    """Metadata of a step."""


class Implementation(Keeping, FlashAttentionImpl):
    """One layer's attention."""

    def place(self, layer, kv_cache: Tensor) -> Tensor:
        return plain_place(kv_cache)

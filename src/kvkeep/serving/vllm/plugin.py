"""What is registered with vLLM: the backends by name, and who hands out the blocks."""

from __future__ import annotations

import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager
from vllm.v1.kv_cache_interface import CircularBufferSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvkeep.serving.vllm.spec import BudgetSpec


def register(versions: tuple[str, ...]) -> None:
    """See :func:`kvkeep.serving.vllm.register`."""
    supported = SpecifierSet(",".join(versions))
    if Version(vllm.__version__).release and Version(vllm.__version__).base_version not in supported:
        raise ValueError(f"kvkeep serves with vllm {supported}, this is {vllm.__version__}")
    KVCacheSpecRegistry._ensure_registered()  # else vLLM takes ours for a sign that its own are there
    KVCacheSpecRegistry.register(BudgetSpec, CircularBufferManager, CircularBufferSpec)
    if current_platform.is_cpu():  # where vLLM takes no choice of backend
        register_backend(AttentionBackendEnum.CPU_ATTN, "kvkeep.serving.vllm.cpu.Backend")
    else:
        register_backend(AttentionBackendEnum.CUSTOM, "kvkeep.serving.vllm.cuda.Backend")

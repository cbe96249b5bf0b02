"""How vLLM is told of a cache that does not grow: one block a request for life, of as many slots as a budget has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, FullAttentionSpec

from kvkeep.serving.pages import State
from kvkeep.serving.settings import block_slots


@dataclass(frozen=True, kw_only=True)
class BudgetSpec(CircularBufferSpec):
    """A block of ``block_size`` slots, the budget rounded up; behind the pairs lies what the policy keeps of them.

    Attributes:
        budget: tokens it holds at most.
    """

    budget: int = 0

    def max_num_blocks_per_req(self, vllm_config, max_len: int) -> int:
        """As for a cache that grows: the first model runner looks up a block for every token, and finds nothing."""
        return -(-max_len // self.block_size)


def budget_spec(spec: AttentionSpec, budget: int, multiple: int, state: State) -> BudgetSpec:
    """The layout of a layer under a budget.

    Args:
        spec: what vLLM would do.
        budget: tokens per KV head.
        multiple: what the kernel needs the slots of a block to be a multiple of.
        state: what the policy keeps of a request.

    Raises:
        ValueError: for a layer whose cache is not that of full attention.
    """
    if type(spec) is not FullAttentionSpec:
        raise ValueError(f"kvkeep bounds layers of full attention, and vLLM plans a {type(spec).__name__} for this one")
    slots = block_slots(budget, multiple)
    bounded = BudgetSpec(
        block_size=slots,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        dtype=spec.dtype,
        dcp_sharded=False,
        budget=budget,
    )
    return replace(bounded, page_size_padded=state.page_bytes(bounded.unpadded_page_size_bytes))

"""The attention of a layer under a budget, around a stock backend of vLLM.

Prompts attend by kvkeep's own code, piece by piece, as token by token decoding would. Requests that take in one token
do so together: kvkeep chooses and writes the slot of every head, and the stock kernel reads each request's block as a
short sequence (a policy that watches the attention attends itself).

:class:`Keeping` and :class:`Planning` are mixed into the stock implementation and metadata builder of a platform.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec

from kvkeep.serving.pages import Pages
from kvkeep.serving.rows import Rows, Schedule, held
from kvkeep.serving.settings import Attention
from kvkeep.serving.vllm.served import Refused, Served, latest, served
from kvkeep.serving.vllm.spec import BudgetSpec, budget_spec


@dataclass(frozen=True)
class Piece:
    """A piece of a prompt: its block, tokens seen before, and where it lies in the step's tokens."""

    block: int
    seen: int
    start: int
    stop: int


@dataclass
class Plan:
    """What a step does in every layer.

    Attributes:
        rows: requests that take in one token; they are the step's first.
        stock: the stock backend's metadata for them, None without any.
        pieces: of prompts.
        evicted: tokens that this step drops from every KV head.
        holding: tokens that its requests hold afterwards.
    """

    rows: Rows | None
    stock: Any
    pieces: list[Piece]
    evicted: int
    holding: int


def customised(spec: AttentionSpec, multiple: int, stock) -> AttentionSpec:
    """The spec of a layer: ``stock`` of it, unless kvkeep is on."""
    serving = latest()
    if serving is None:
        return stock(spec)
    try:
        return budget_spec(spec, serving.policy.budget.slots, multiple, serving.state(spec.dtype))
    except ValueError as error:
        raise Refused(error) from error


class Planning:
    """Mixed into a metadata builder."""

    _cudagraph_support = AttentionCGSupport.NEVER  # a step writes by what the host knows of its requests

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config, device, *args, **kwargs):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, *args, **kwargs)
        self.serving = served(vllm_config) if isinstance(kv_cache_spec, BudgetSpec) else None
        if self.serving is not None:
            self._init_reorder_batch_threshold(1)  # requests that take in one token come first
        self.schedule: Schedule | None = None  # where the block numbers are on the host
        if self.serving is not None and self.serving.scores_ahead and torch.device(device).type == "cpu":
            self.schedule = Schedule(self.serving.policy.budget)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False):
        if self.serving is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        common, budget = common_attn_metadata, self.serving.policy.budget
        count = split_decodes_and_prefills(common, decode_threshold=1)[0]
        ends, lengths = common.query_start_loc_cpu.tolist(), self.host_lengths(common)
        seen = [length - ends[i + 1] + ends[i] for i, length in enumerate(lengths)]
        after, before = (held(budget, torch.tensor(numbers)) for numbers in (lengths, seen))
        blocks = common.block_table_tensor[: common.num_reqs, 0]
        prompts = blocks[count:].tolist() if count < common.num_reqs else []
        pieces = [Piece(block, seen[i], ends[i], ends[i + 1]) for i, block in enumerate(prompts, start=count)]
        rows = stock = None
        if count:
            rows = Rows(blocks[:count].long(), common.seq_lens[:count].long() - 1, seen[:count])
            if not self.serving.attends:
                stock = super().build(0, self.decoding(common, count, after, rows.positions), fast_build)
        self.score_ahead(rows, pieces)
        evicted = sum(lengths) - sum(seen) - int((after - before).sum())
        return Plan(rows, stock, pieces, evicted, int(after.sum()))

    def score_ahead(self, rows: Rows | None, pieces: list[Piece]) -> None:
        """Have tokens scored a window at a time, where the policy and the device let them be."""
        if self.schedule is None:
            return
        for piece in pieces:
            self.schedule.begin(piece.block)
        if rows is not None:
            rows.ahead = self.schedule.ahead(rows.blocks.tolist(), rows.seen)

    def host_lengths(self, common: CommonAttentionMetadata) -> list[int]:
        """Tokens of every request after the step."""
        if common.seq_lens.device.type == "cpu":
            return common.seq_lens[: common.num_reqs].tolist()
        return common.seq_lens_cpu_upper_bound[: common.num_reqs].tolist()  # exact without speculative decoding

    def decoding(self, common: CommonAttentionMetadata, count: int, after: Tensor, positions: Tensor):
        """The first ``count`` requests as the kernel sees them: one query over the slots that hold something."""
        return common.replace(
            query_start_loc=common.query_start_loc[: count + 1],
            query_start_loc_cpu=common.query_start_loc_cpu[: count + 1],
            seq_lens=held(self.serving.policy.budget, positions + 1).to(common.seq_lens.dtype),
            num_reqs=count,
            num_actual_tokens=count,
            max_query_len=1,
            max_seq_len=int(after[:count].max()),
            block_table_tensor=common.block_table_tensor[:count],
            slot_mapping=common.slot_mapping[:count],
            seq_lens_cpu_upper_bound=after[:count].to(torch.int32),
            positions=None if common.positions is None else common.positions[:count],
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )


class Keeping:
    """Mixed into an attention implementation; a platform says where pairs lie (:meth:`place`)."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.serving: Served | None = served()
        if self.serving is not None:
            self.serving.take(self.told(*args, **kwargs))
        self.memory = 0  # where the cache that the layer was made for lies
        self.layer = None

    def told(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads,
        alibi_slopes,
        sliding_window,
        kv_cache_dtype,
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
        sinks=None,
        **_,
    ) -> Attention:
        """How the layer attends, of what vLLM constructs every implementation with."""
        return Attention(
            f"a layer of {num_heads} query and {num_kv_heads} KV heads",
            sliding_window,
            bool(logits_soft_cap),
            sinks is not None,
            alibi_slopes is not None,
            attn_type == AttentionType.DECODER,
            kv_sharing_target_layer_name,
        )

    def place(self, layer, kv_cache: Tensor) -> Tensor:
        """Where the numbers of a pair lie in a head of a block, see :class:`~kvkeep.serving.pages.Pages`."""
        raise NotImplementedError

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        if self.serving is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        """Tokens of a step: queries ``[T, Hq, D]``, keys and values ``[T, H, D]`` -> ``output`` ``[T, Hq, D]``."""
        if not isinstance(attn_metadata, Plan):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if self.memory != kv_cache.data_ptr():
            self.begin(layer, kv_cache)
        plan = attn_metadata
        if plan.rows is not None:
            count = len(plan.rows.seen)
            step = query[:count], key[:count], value[:count]
            attended = self.layer.step(plan.rows, *step)
            if attended is None:
                super().forward(layer, *step, kv_cache, plan.stock, output[:count], *args, **kwargs)
            else:
                output[:count] = attended
        for piece in plan.pieces:
            at = slice(piece.start, piece.stop)
            tensors = (tensor[at].transpose(0, 1)[None] for tensor in (query, key, value))  # [1, heads, n, D]
            output[at] = self.layer.prefill(piece.block, piece.seen, *tensors)[0].transpose(0, 1)
        if layer.layer_name == self.serving.first:
            self.serving.count(plan)
        return output

    def begin(self, layer, kv_cache: Tensor) -> None:
        """Lay the layer out over the cache that vLLM gave it."""
        serving = self.serving
        geometry = serving.geometry(extract_layer_index(layer.layer_name), self.scale)
        pair_bytes = kv_cache[0].numel() * kv_cache.dtype.itemsize
        pages = Pages(kv_cache, self.place(layer, kv_cache), self.head_size, pair_bytes, serving.state(kv_cache.dtype))
        self.layer = serving.layer(layer.layer_name, geometry, pages)
        self.memory = kv_cache.data_ptr()


def multiple_of(sizes: list) -> int:
    """What a backend's kernels need the slots of a block to be a multiple of."""
    return min(size if isinstance(size, int) else size.base for size in sizes)

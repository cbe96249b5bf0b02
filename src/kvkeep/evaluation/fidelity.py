"""How faithful a cache is to the full one, layer by layer: what it holds, and what attention makes of that.

Knows models through the replay; nothing of documents or of what is kept between runs. Both numbers are monitors, not
goals: a policy may hold little of the teacher's choice and lose nothing by it. Losses decide.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from kvkeep.attention_mass import future_attention
from kvkeep.budget import Budget
from kvkeep.lifetimes import lifetime_recall, running_topk
from kvkeep.policies.base import Geometry
from kvkeep.policies.full import Full
from kvkeep.runtime.replay import hidden_states
from kvkeep.sparse_attention import causal_attention, live_attention


@dataclass
class Fidelity:
    """A policy beside the full cache, over one sequence of S tokens.

    Attributes:
        recall: per layer, None for one that is not bounded. The share of the teacher's top-k that is held, mean over KV
            heads and the queries that evict: `|topk_teacher(E(q)) & held(E(q))| / k` (KVpop, arXiv 2607.05061, figure
            7). The teacher is KVpop's target without decay, the most attention that a query head of the group pays from
            `t + window` on, on average over queries, with the full cache. E(q) are the tokens that the policy chooses
            from: all but sinks and window. For a policy with an interval, its own evictions count.
        output_cosine: ``[S]`` float64, per query: cosine between a head's attention output over the tokens held and
            over all tokens, mean over layers and query heads. Queries, keys and values are those of the full cache.
    """

    recall: list[float | None]
    output_cosine: Tensor


def fidelity(
    model: PreTrainedModel, input_ids: Tensor, held: Mapping[Hashable, tuple[Budget, Sequence[Tensor | None]]]
) -> dict[Hashable, Fidelity]:
    """Measures policies by what they held, in one pass of the model with the full cache.

    What a policy held is what its own replay says, in which eviction has changed the layers above. So the teacher's own
    policy ``future_mass`` has a recall of exactly 1 in the first layer, and less above it.

    Args:
        model: the one that was replayed.
        input_ids: ``[1, S]``, the sequence that was replayed.
        held: any name -> budget and ``replay(...).evicted_at`` of a policy that evicts.

    Returns:
        The same names, with what was measured. Queries, keys and values of one layer exist at a time.

    Raises:
        ValueError: where S is too short for anything to be evicted, and as ``replay``.
    """
    found = {
        name: Fidelity([None] * len(lifetimes), torch.zeros(input_ids.shape[1], dtype=torch.float64))
        for name, (_, lifetimes) in held.items()
    }

    def observe(geometry: Geometry, query: Tensor, key: Tensor, value: Tensor, _) -> None:
        dense = causal_attention(query, key, value, geometry.scaling)
        targets = {}  # window -> [B, H, S]
        for name, (budget, lifetimes) in held.items():
            entry, evicted_at = budget.as_entry, lifetimes[geometry.layer]
            if entry.window not in targets:
                targets[entry.window] = future_attention(query, key, entry.window, scaling=geometry.scaling)
            teacher = running_topk(targets[entry.window], entry)
            found[name].recall[geometry.layer] = float(lifetime_recall(teacher, evicted_at, budget).mean())
            sparse = live_attention(query, key, value, evicted_at, geometry.scaling)
            found[name].output_cosine += _cosine(sparse, dense).cpu()

    hidden_states(model, input_ids, Full(), observe=observe)
    for one in found.values():
        one.output_cosine /= sum(layer is not None for layer in one.recall)
    return found


def _cosine(output: Tensor, reference: Tensor) -> Tensor:
    """Of two attention outputs ``[1, Hq, S, D]``, mean over heads: ``[S]`` float64."""
    return cosine_similarity(output.double(), reference.double(), dim=-1).mean((0, 1))

"""What is minimised, one file a method: tensors in, a number out.

Knows scores, labels and budgets; nothing of models, policies or optimisers. Every loss runs in float32 or its input's
dtype, whichever is wider, and is an exact zero with a zero gradient where it has nothing to say.
"""

from kvkeep.training.losses.distillation import TopLogits, distillation, top_logits
from kvkeep.training.losses.dms import dms_bias, dms_closed, dms_hinge, dms_key_bias, dms_relax
from kvkeep.training.losses.foresightkv import (
    Draw,
    advantages,
    grpo,
    gumbel_top_k,
    independent_log_prob,
    plackett_luce,
    plackett_luce_kl,
    ranking,
    rewards_to_go,
    spike_reward,
)
from kvkeep.training.losses.intensity import age_edges, age_ranges, intensity
from kvkeep.training.losses.kvpop import (
    BoundaryPairs,
    boundary,
    boundary_pairs,
    keep_rate,
    regression,
    target_statistics,
)
from kvkeep.training.losses.tweedie import tweedie

__all__ = [
    "BoundaryPairs",
    "Draw",
    "TopLogits",
    "advantages",
    "age_edges",
    "age_ranges",
    "boundary",
    "boundary_pairs",
    "distillation",
    "dms_bias",
    "dms_closed",
    "dms_hinge",
    "dms_key_bias",
    "dms_relax",
    "grpo",
    "gumbel_top_k",
    "independent_log_prob",
    "intensity",
    "keep_rate",
    "plackett_luce",
    "plackett_luce_kl",
    "ranking",
    "regression",
    "rewards_to_go",
    "spike_reward",
    "target_statistics",
    "top_logits",
    "tweedie",
]

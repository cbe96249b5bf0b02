"""StreamingLLM: attention sinks and the newest tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.kernels.place import Loop
from kvkeep.policies.base import EntryPolicy, Geometry, Step


class Streaming(EntryPolicy):
    """StreamingLLM: the first ``sinks`` tokens and the newest ``window + topk``.

    Paper: arXiv 2309.17453, section 3.2. A constant priority *is* this policy, since the newest of equals wins.
    Deviation: keys keep their true positions (the paper re-indexes them inside the cache).
    """

    name = "streaming"
    judges_alone = True
    paper = "arXiv 2309.17453"

    def priority(self, step: Step) -> Tensor:
        keys = step.leaving[0]
        return keys.new_zeros(keys.shape[:3])

    def loop(self, geometry: Geometry, dtype: torch.dtype) -> Loop:
        return Loop("places.replace_lowest")  # all are 0 from the start

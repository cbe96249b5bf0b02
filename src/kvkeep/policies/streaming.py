"""StreamingLLM: attention sinks and the newest tokens."""

from __future__ import annotations

from torch import Tensor

from kvkeep.policies.base import EntryPolicy, Step


class Streaming(EntryPolicy):
    """StreamingLLM: the first ``sinks`` tokens and the newest ``window + topk``.

    Paper: arXiv 2309.17453, section 3.2. A constant priority *is* this policy, since the newest of equals wins.
    Deviation: keys keep their true positions (the paper re-indexes them inside the cache).
    """

    name = "streaming"
    paper = "arXiv 2309.17453"
    foresees = True

    def priority(self, step: Step) -> Tensor:
        keys = step.leaving[0]
        return keys.new_zeros(keys.shape[:3])

"""What a worker tells of itself: the evidence that evictions happen, taken where they do.

vLLM mixes :class:`Reporting` into its worker when it is started with ``--worker-extension-cls``.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvkeep.serving.vllm.served import latest


class Reporting:
    """Mixed into vLLM's worker."""

    def kvkeep_report(self) -> dict[str, Any]:
        """Policy, budget, layers and counts of this worker; ``{"layers": 0}`` where it serves without kvkeep.

        ``layers`` were built to evict, ``running`` of them have; ``tokens``, ``evicted``, ``holding`` and ``requests``
        are those of :class:`~kvkeep.serving.vllm.served.Done`. Of a running layer: ``blocks`` that vLLM has, ``page``
        bytes of one, and ``token`` bytes that a token would take in a full cache.
        """
        serving = latest()
        if serving is None:
            return {"layers": 0}
        budget, report = serving.policy.budget, {"layers": serving.built, "running": len(serving.layers)}
        report |= {"policy": serving.policy.name, "budget": asdict(budget) | {"slots": budget.slots}}
        report |= asdict(serving.done)
        for layer in serving.layers.values():
            pages = layer.pages
            item = pages.dtype.itemsize
            token = pages.heads * pages.place.shape[1] * item
            report |= {"blocks": pages.blocks, "page": pages.block_stride * item, "token": token}
            break
        return report

"""The physical limit of decoding: every weight and every cached pair is read once per step, at the memory's bandwidth.

``floor = (bytes of weights + bytes of keys and values attended to) / measured read bandwidth``. Nothing that reads all
of them can be faster; what is above it is arithmetic, copies and dispatch. Knows models as bags of parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from kvkeep.benchmark.timing import Job, in_turns

BUFFER_BYTES = {"cpu": 2**28, "cuda": 2**31}  # far above any cache between memory and arithmetic
REPETITIONS = 7


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second that were read, and by what."""

    rate: float
    by: str

    def floor(self, weights: int, kv: int) -> float:
        """Milliseconds below which no step can be that reads so many bytes."""
        return 1000 * (weights + kv) / self.rate


def bandwidth(device: torch.device) -> Bandwidth:
    """Read bandwidth with the threads that torch has: the best of a sum and a maximum over a large float32 buffer.

    The best of several reads on purpose: a limit must not be lowered by what else the machine is doing.
    """
    buffer = torch.ones(BUFFER_BYTES["cuda" if device.type == "cuda" else "cpu"] // 4, device=device)
    reads = {"sum": buffer.sum, "maximum": buffer.amax}
    taken = in_turns([Job(read) for read in reads.values()], REPETITIONS, device)
    best, by = min((min(times), name) for name, times in zip(reads, taken, strict=True))
    how = f"{by} over {buffer.nbytes >> 20} MiB of float32, best of {REPETITIONS}"
    return Bandwidth(buffer.nbytes / best * 1000, how)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights that a step reads: all of them, but of an input embedding of its own only a row."""
    head = model.get_output_embeddings()
    table = model.get_input_embeddings().weight
    total = sum(parameter.nbytes for parameter in model.parameters())  # shared ones once
    return total if head is None or head.weight is table else total - table.nbytes

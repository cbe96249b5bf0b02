"""The processes that train together, or one alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, distributed


class Team:
    """The processes of ``torch.distributed``, or this one alone."""

    def __init__(self) -> None:
        several = distributed.is_available() and distributed.is_initialized()
        self.rank, self.size = (distributed.get_rank(), distributed.get_world_size()) if several else (0, 1)

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        """This process's part of ``items``."""
        return items[self.rank :: self.size]

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            distributed.barrier()

    def add(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self.size > 1:
            distributed.all_reduce(tensor)
        return tensor

    def joined(self, values: list[Any]) -> list[Any]:
        """What all have found for their shares, in the order of the items."""
        if self.size == 1:
            return values
        parts: list[list[Any]] = [[] for _ in range(self.size)]
        distributed.all_gather_object(parts, values)
        return [parts[place % self.size][place // self.size] for place in range(sum(map(len, parts)))]

"""The requests of one engine step as tensors: where each one's cache lies and how far it has come.

Knows integers and budgets. A request owns one block for life, so its block number and its position say everything; how
many tokens it holds follows from the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvkeep.budget import Budget


def held(budget: Budget, seen: Tensor) -> Tensor:
    """Tokens held by each KV head once ``seen`` tokens have come and the newest has attended; any shape.

    Example:
        >>> held(Budget(sinks=0, window=2, topk=2, interval=3), torch.tensor([3, 4, 7, 8, 11]))
        tensor([3, 4, 7, 5, 5])
    """
    if not budget.interval:
        return seen.clamp(max=budget.rest)
    return torch.where(seen <= budget.rest, seen, budget.rest + (seen - budget.rest - 1) % budget.interval + 1)


@dataclass
class Rows:
    """R requests that take in one token each.

    Attributes:
        blocks: int64 ``[R]``, the block of every request; all distinct.
        positions: int64 ``[R]``, of the token that comes; 0 begins a new request, whatever the block holds.
        seen: the positions on the host.
    """

    blocks: Tensor
    positions: Tensor
    seen: list[int]

    @classmethod
    def of(cls, blocks: list[int], seen: list[int], device: torch.device | str = "cpu") -> Rows:
        """Rows from numbers on the host."""
        return cls(torch.tensor(blocks, device=device), torch.tensor(seen, device=device), list(seen))

    @cached_property
    def fresh(self) -> Tensor | None:
        """bool ``[R]``: requests whose first token this is; None where there are none."""
        return self.positions == 0 if 0 in self.seen else None

    @cached_property
    def arrays(self) -> tuple:
        """Blocks and positions as numpy arrays, for what is compiled for the CPU."""
        return self.blocks.numpy(), self.positions.numpy()

    def subset(self, index: list[int]) -> Rows:
        """Some of the requests."""
        at = torch.tensor(index, device=self.blocks.device)
        return Rows(self.blocks[at], self.positions[at], [self.seen[i] for i in index])

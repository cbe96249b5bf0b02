"""The requests of one engine step as tensors: where each one's cache lies and how far it has come.

Knows integers and budgets. A request owns one block for life, so its block number and its position say everything; how
many tokens it holds follows from the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
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
        ahead: how many tokens of each window an entry policy scores in this step, from the one that leaves on; 0 where
            earlier steps have, see :class:`Schedule`.
    """

    blocks: Tensor
    positions: Tensor
    seen: list[int]
    ahead: int = 1

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
        return Rows(self.blocks[at], self.positions[at], [self.seen[i] for i in index], self.ahead)


class Schedule:
    """When tokens are scored by a policy that may be asked before they leave: rarely, and then all in every window.

    Small products cost a step more than their size; a window's worth at once, every window's worth of steps, does not.

    Args:
        budget: of an entry policy.
    """

    def __init__(self, budget: Budget):
        self.budget = budget
        self.scored = np.zeros(0, dtype=np.int64)  # by block, the position up to which a request's tokens are

    def begin(self, block: int) -> None:
        """A prompt, or a piece of one, is taken in: no token of its window is scored after it."""
        self.reach(block)
        self.scored[block] = 0

    def reach(self, block: int) -> None:
        if block >= len(self.scored):
            self.scored = np.pad(self.scored, (0, 2 * block + 1 - len(self.scored)))

    def ahead(self, blocks: list[int], seen: list[int]) -> int:
        """What :attr:`Rows.ahead` is at a step."""
        self.reach(max(blocks))
        at, positions = np.asarray(blocks), np.asarray(seen)
        self.scored[at[positions == 0]] = 0
        leaving = positions - self.budget.window
        if not bool(((leaving >= self.scored[at]) & (leaving >= self.budget.sinks)).any()):
            return 0
        self.scored[at] = positions
        return self.budget.window

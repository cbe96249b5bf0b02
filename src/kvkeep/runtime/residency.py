"""What one layer holds, and how a policy's decisions are carried out in it: shared by both kinds of policy.

Knows slots and the policy protocol; knows nothing of transformers. A residency is fed with the new queries, keys and
values of its layer, in order, in pieces of any size, and answers with the attention of those queries. That the answer
does not depend on the pieces is the central invariant of this package: a whole sequence in one piece is offline, one
token at a time is online.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kvkeep.policies.base import Geometry, Memory, Policy
from kvkeep.slots import Slots, pad_front


class NotFinite(ValueError):
    """Keys, values or scores of a layer are NaN or infinite."""


def require_finite(tensor: Tensor, what: str, layer: int, position: int) -> None:
    """Raise :class:`NotFinite` naming layer and step rather than let a NaN spread through the cache.

    On an accelerator a single token is not checked, since the answer would have to be waited for.
    """
    if (tensor.device.type == "cpu" or tensor.shape[2] > 1) and not bool(torch.isfinite(tensor).all()):
        raise NotFinite(f"layer {layer}: {what} not finite at position {position} or after (NaN or infinity)")


def rows_by(key: list) -> list[tuple[object, list[int]]]:
    """Rows grouped by equal ``key[row]``, in order of first appearance."""
    groups: dict[object, list[int]] = {}
    for row, value in enumerate(key):
        groups.setdefault(value, []).append(row)
    return list(groups.items())


class Residency(ABC):
    """The tokens one layer holds for a batch of rows, each at its own position.

    Attributes:
        seen: how many tokens each row has had; the position of its next one.
        slots: where the held ones are.
        memory: the policy's running state, batch first.
        lifetimes: int32 ``[B, H, S]`` in the row's own positions if they are recorded, else None.
    """

    def __init__(self, policy: Policy, geometry: Geometry, keys: Tensor, values: Tensor):
        self.policy = policy
        self.budget = policy.budget
        self.geometry = geometry
        self.seen = [0] * keys.shape[0]
        self.wide = torch.promote_types(keys.dtype, torch.float32)  # dtype of scores and statistics
        self.slots = Slots.empty(keys, values, self.budget.slots)
        self.memory: Memory = {}
        self.lifetimes: Tensor | None = None

    def advance(self, query: Tensor | None, keys: Tensor, values: Tensor, pads: list[int] | None = None):
        """Take in n new columns and attend.

        Args:
            query: ``[B, Hq, n, D]``, or None where the attention is somebody else's.
            keys, values: ``[B, H, n, D]``, rotated at their true positions.
            pads: how many leading columns of each row are padding; None = none.

        Returns:
            ``[B, Hq, n, Dv]`` (zeros at pads), or None without queries.

        Raises:
            NotFinite: naming layer and position.
        """
        count = keys.shape[2]
        pads = pads or [0] * len(self.seen)
        if count == 1 and not any(pads):
            self.check(keys, values)
            return self.step(query, keys, values)
        groups = rows_by(list(zip(pads, self.seen, strict=True)))
        if len(groups) == 1:
            return self._ingest_rows(self, query, keys, values, pads[0])
        output = None if query is None else query.new_zeros(*query.shape[:3], values.shape[-1])
        for (pad, _), rows in groups:
            index = torch.tensor(rows, device=keys.device)
            part = self.select(index)
            done = self._ingest_rows(part, query if query is None else query[index], keys[index], values[index], pad)
            self.assign(index, part)
            if output is not None:
                output[index] = done
        return output

    @staticmethod
    def _ingest_rows(part: Residency, query, keys, values, pad: int) -> Tensor | None:
        """Rows that are equally far, ``pad`` columns of which are padding."""
        if pad == keys.shape[2]:
            return None if query is None else query.new_zeros(*query.shape[:3], values.shape[-1])
        real = [None if tensor is None else tensor[:, :, pad:] for tensor in (query, keys, values)]
        part.check(real[1], real[2])
        output = part.ingest(*real)
        return None if output is None else pad_front(output, pad)

    def check(self, keys: Tensor, values: Tensor) -> None:
        require_finite(keys, "keys", self.geometry.layer, max(self.seen))
        require_finite(values, "values", self.geometry.layer, max(self.seen))

    @abstractmethod
    def step(self, query: Tensor | None, keys: Tensor, values: Tensor) -> Tensor | None:
        """One token per row, rows at positions of their own."""

    @abstractmethod
    def ingest(self, query: Tensor | None, keys: Tensor, values: Tensor) -> Tensor | None:
        """Any number of tokens, all rows at the same position."""

    def positions(self, count: int) -> Tensor:
        """int64 ``[B, count]``, the positions of the next tokens of every row."""
        device = self.slots.keys.device
        return torch.tensor(self.seen, device=device)[:, None] + torch.arange(count, device=device)

    def record_lifetimes(self, length: int) -> None:
        """Record when each of ``length`` tokens is gone; before the first token only."""
        batch, heads = self.slots.positions.shape[:2]
        self.lifetimes = torch.full((batch, heads, length), length, dtype=torch.int32, device=self.slots.keys.device)

    # Rows: beams, samples, and parts of a batch. Everything a row owns is batch first.

    def select(self, rows: Tensor) -> Residency:
        """A copy of the given rows (int64 ``[n]``, may repeat)."""
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__)
        part.slots = self.slots.select(rows)
        part.seen = [self.seen[row] for row in rows.tolist()]
        part.memory = {name: tensor.index_select(0, rows) for name, tensor in self.memory.items()}
        for name in self.row_tensors:
            tensor = getattr(self, name)
            setattr(part, name, None if tensor is None else tensor.index_select(0, rows))
        return part

    def assign(self, rows: Tensor, part: Residency) -> None:
        """Put ``part`` back over the given rows."""
        self.slots.assign(rows, part.slots)
        for row, seen in zip(rows.tolist(), part.seen, strict=True):
            self.seen[row] = seen
        for name, tensor in self.memory.items():
            tensor.index_copy_(0, rows, part.memory[name])
        for name in self.row_tensors:
            if getattr(self, name) is not None:
                getattr(self, name).index_copy_(0, rows, getattr(part, name))

    row_tensors: tuple[str, ...] = ("lifetimes",)
    """Names of further batch-first attributes."""

    @property
    def nbytes(self) -> int:
        """Bytes of slots and all side state."""
        side = [*self.memory.values(), *(getattr(self, name) for name in self.row_tensors if name != "lifetimes")]
        return self.slots.nbytes + sum(tensor.nbytes for tensor in side if tensor is not None)

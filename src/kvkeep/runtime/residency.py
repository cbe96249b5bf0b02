"""What one layer holds, and how a policy's decisions are carried out in it: shared by both kinds of policy.

Knows slots and the policy protocol; knows nothing of transformers. A residency is fed with the new queries, keys and
values of its layer, in order, in pieces of any size, and answers with the attention of those queries. That the answer
does not depend on the pieces is the central invariant of this package: a whole sequence in one piece is offline, one
token at a time is online.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kvkeep.policies.base import Geometry, Memory, Policy
from kvkeep.slots import Slots, pad_front


class NotFinite(ValueError):
    """Keys, values or scores of a layer are NaN or infinite."""


def rows_by(key: list) -> list[tuple[object, list[int]]]:
    """Rows grouped by equal ``key[row]``, in order of first appearance."""
    groups: dict[object, list[int]] = {}
    for row, value in enumerate(key):
        groups.setdefault(value, []).append(row)
    return list(groups.items())


class Residency(ABC):
    """The tokens one layer holds for a batch of rows, each at its own position.

    Attributes:
        clock: int64 ``[B]``, how many tokens each row has had, the position of its next one; written in place.
        slots: where the held ones are.
        steady: whether a step changes nothing on the host, so that every further step is like it.
        memory: the policy's running state, batch first.
        lifetimes: int32 ``[B, H, S]`` in the row's own positions if they are recorded, else None.
    """

    steady = False

    def __init__(self, policy: Policy, geometry: Geometry, keys: Tensor, values: Tensor):
        self.policy = policy
        self.budget = policy.budget
        self.geometry = geometry
        self.clock = torch.zeros(keys.shape[0], dtype=torch.int64, device=keys.device)
        self.wide = torch.promote_types(keys.dtype, torch.float32)  # dtype of scores and statistics
        self.slots = Slots.empty(keys, values, self.budget.slots)
        self.memory: Memory = {}
        self.lifetimes: Tensor | None = None

    @property
    def seen(self) -> list[int]:
        """How many tokens each row has had; on an accelerator this waits for it."""
        return self.clock.tolist()

    def start_at(self, seen: Sequence[int]) -> None:
        """Let every row have had so many tokens, whatever the slots hold."""
        self.clock.copy_(torch.tensor(seen))

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
        if keys.shape[2] == 1 and (pads is None or not any(pads)):
            return self.step(query, keys, values)
        seen = self.seen
        groups = rows_by(list(zip(pads or [0] * len(seen), seen, strict=True)))
        if len(groups) == 1:
            return self._ingest_rows(self, query, keys, values, groups[0][0][0])
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
        for tensor, what in ((keys, "keys"), (values, "values")):
            self.require_finite(tensor, what)

    def require_finite(self, tensor: Tensor, what: str) -> None:
        """Raise :class:`NotFinite` naming layer and step rather than let a NaN spread through the cache."""
        if not self.finite(tensor):
            raise self.not_finite(what)

    def not_finite(self, what: str) -> NotFinite:
        where = f"layer {self.geometry.layer}: {what} not finite at position {max(self.seen)}"
        return NotFinite(f"{where} or after (NaN or infinity)")

    @staticmethod
    def finite(tensor: Tensor) -> bool:
        """Whether all is finite. A single token on an accelerator, which would have to be waited for, is taken as such;
        so is everything inside ``torch.compile``."""
        if is_dynamo_compiling() or (tensor.device.type != "cpu" and tensor.shape[2] == 1):
            return True
        # A sum is one pass, and finite only if all of it is; but finite numbers may overflow it.
        return math.isfinite(tensor.detach().sum()) or bool(torch.isfinite(tensor).all())

    @abstractmethod
    def step(self, query: Tensor | None, keys: Tensor, values: Tensor) -> Tensor | None:
        """One token per row, rows at positions of their own; checks that it is finite."""

    @abstractmethod
    def ingest(self, query: Tensor | None, keys: Tensor, values: Tensor) -> Tensor | None:
        """Any number of tokens, all rows at the same position."""

    def positions(self, count: int) -> Tensor:
        """int64 ``[B, count]``, the positions of the next tokens of every row."""
        return self.clock[:, None] + torch.arange(count, device=self.clock.device)

    def pass_on(self, count: int) -> None:
        """Every row has had ``count`` more."""
        self.clock += count

    def record_lifetimes(self, length: int) -> None:
        """Record when each of ``length`` tokens is gone; before the first token only."""
        batch, heads = self.slots.positions.shape[:2]
        self.lifetimes = torch.full((batch, heads, length), length, dtype=torch.int32, device=self.slots.keys.device)

    # What compiled loops are bound to: arrays over the memory of these very tensors

    def unbind(self) -> None:
        self.__dict__.pop("bound", None)

    def __getstate__(self) -> dict:
        """Of a copy, whose tensors have memory of their own."""
        return {name: value for name, value in self.__dict__.items() if name != "bound"}

    # Rows: beams, samples, and parts of a batch. Everything a row owns is batch first.

    def select(self, rows: Tensor) -> Residency:
        """A copy of the given rows (int64 ``[n]``, may repeat)."""
        part = object.__new__(type(self))
        part.__dict__.update(self.__getstate__())
        part.slots = self.slots.select(rows)
        part.memory = {name: tensor.index_select(0, rows) for name, tensor in self.memory.items()}
        for name in self.row_tensors:
            tensor = getattr(self, name)
            setattr(part, name, None if tensor is None else tensor.index_select(0, rows))
        return part

    def assign(self, rows: Tensor, part: Residency) -> None:
        """Put ``part`` back over the given rows."""
        self.slots.assign(rows, part.slots)
        for name, tensor in self.memory.items():
            tensor.index_copy_(0, rows, part.memory[name])
        for name in self.row_tensors:
            if getattr(self, name) is not None:
                getattr(self, name).index_copy_(0, rows, getattr(part, name))

    row_tensors: tuple[str, ...] = ("clock", "lifetimes")
    """Names of further batch-first attributes."""

    @property
    def nbytes(self) -> int:
        """Bytes of slots and all side state that heads keep of their tokens (not of counters, a number a row)."""
        side = [*self.memory.values(), *(getattr(self, name) for name in self.row_tensors if name != "lifetimes")]
        side = [tensor for tensor in side if tensor is not None and tensor.dim() > 1]
        return self.slots.nbytes + sum(tensor.nbytes for tensor in side)

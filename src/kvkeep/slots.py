"""The fixed slots in which one layer holds its keys and values, written in place.

This room knows tensors only: nothing of models, policies or padding masks.

Layout
    ``keys``, ``values``  ``[batch, kv_heads, slots, head_dim]``, head-major, allocated once.
    ``positions``         ``[batch, kv_heads, slots]`` int32: the token's true position in its row, -1 where empty.
    ``extras``            name -> ``[batch, kv_heads, slots, ...]``: whatever belongs to a slot and travels with it.

Rows are **right-aligned**, like left padding: the ``held[b]`` tokens of row b occupy its last slots, in no particular
order, the same number in every head. Three things follow. Keys were rotated before they were cached, so order does
not matter to attention; a view of the last ``width`` slots never copies; and the key-padding mask that a model builds
for a left-padded batch marks exactly the empty slots, so stock attention functions read the view unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvkeep.kernels.place import compiled, raw

EMPTY = -1  # the position of a slot that holds nothing


def gather_slots(tensor: Tensor, index: Tensor) -> Tensor:
    """Pick slots per head: ``[B, H, N, ...]`` at ``[B, H, n]`` -> ``[B, H, n, ...]``."""
    tail = tensor.shape[3:]
    if tail and tensor.is_contiguous():  # whole vectors at a time
        batch, heads, slots = tensor.shape[:3]
        first = torch.arange(batch * heads, device=index.device).view(batch, heads, 1) * slots
        return tensor.flatten(0, 2).index_select(0, (index + first).flatten()).view(*index.shape, *tail)
    index = index.long().reshape(*index.shape, *(1,) * len(tail)).expand(*index.shape, *tail)
    return tensor.gather(2, index)


def scatter_slots(tensor: Tensor, index: Tensor, source: Tensor) -> None:
    """Write ``source`` ``[B, H, n, ...]`` into ``tensor`` ``[B, H, N, ...]`` at slots ``[B, H, n]``, in place."""
    tail = tensor.shape[3:]
    index = index.long().reshape(*index.shape, *(1,) * len(tail)).expand(*index.shape, *tail)
    tensor.scatter_(2, index, source)


def pad_front(tensor: Tensor, count: int, fill: float = 0) -> Tensor:
    """Put ``count`` columns of ``fill`` in front of axis 2."""
    if not count:
        return tensor
    return torch.cat([tensor.new_full((*tensor.shape[:2], count, *tensor.shape[3:]), fill), tensor], 2)


def lowest(scores: Tensor, positions: Tensor, candidates: Tensor, count: int) -> Tensor:
    """The ``count`` candidates with the lowest keep score per head; among equal scores the oldest goes first.

    Args:
        scores: ``[B, H, N]`` (or ``[B, 1, N]``, one decision for all heads), higher stays.
        positions: ``[B, H, N]`` true positions, the tie-break: the newest token wins.
        candidates: bool ``[B, H, N]``, True where a token may go. Every head has at least ``count`` of them.
        count: how many to pick.

    Returns:
        slot indices int64 ``[B, H, count]``.
    """
    if positions.device.type == "cpu" and count > 1:
        chosen = torch.empty(*positions.shape[:2], count, dtype=torch.int64)
        scores = scores.expand(positions.shape).contiguous()
        compiled("places.lowest")(raw(scores), raw(positions.contiguous()), raw(candidates.contiguous()), raw(chosen))
        return chosen
    return lowest_reference(scores, positions, candidates, count)


def lowest_reference(scores: Tensor, positions: Tensor, candidates: Tensor, count: int) -> Tensor:
    """:func:`lowest` in torch."""
    scores = scores.expand(positions.shape).masked_fill(~candidates, torch.inf)
    if count == 1:  # two linear passes instead of two sorts
        tied = scores == scores.amin(-1, keepdim=True)
        return torch.where(tied, positions, torch.iinfo(positions.dtype).max).argmin(-1, keepdim=True)
    by_age = positions.argsort(-1)
    by_score = scores.gather(-1, by_age).argsort(dim=-1, stable=True)[..., :count]
    return by_age.gather(-1, by_score)


@dataclass
class Slots:
    """Slots of one layer; see the module's docstring for the layout.

    ``held`` is the number of tokens each row holds. It is a function of how many tokens the row has seen, so it lives
    on the host and no step waits for the device.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    held: list[int]
    extras: dict[str, Tensor] = field(default_factory=dict)
    fills: dict[str, float] = field(default_factory=dict)  # what every extra of a new token starts from
    tidy: bool = True  # free slots have these in their extras: always, unless rows ever held different numbers

    @classmethod
    def empty(cls, like_keys: Tensor, like_values: Tensor, slots: int) -> Slots:
        """Allocate ``slots`` empty slots for rows, heads, sizes and dtypes like those of the given pairs.

        Raises:
            ValueError: where there is no memory for them.
        """
        batch, heads = like_keys.shape[:2]
        try:
            return cls(
                keys=like_keys.new_zeros(batch, heads, slots, like_keys.shape[-1]),
                values=like_values.new_zeros(batch, heads, slots, like_values.shape[-1]),
                positions=torch.full((batch, heads, slots), EMPTY, dtype=torch.int32, device=like_keys.device),
                held=[0] * batch,
            )
        except (RuntimeError, OverflowError, TypeError) as error:  # whatever torch calls it
            raise ValueError(
                f"no memory for {slots} slots of {batch} rows and {heads} KV heads: take a smaller budget"
            ) from error

    def add_extra(self, name: str, shape: Sequence[int], dtype: torch.dtype, fill: float = 0.0) -> None:
        """Give every slot a number (or a vector of ``shape``) that moves and disappears with it."""
        full = (*self.positions.shape, *shape)
        self.extras[name] = torch.full(full, fill, dtype=dtype, device=self.keys.device)
        self.fills[name] = fill

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    @property
    def width(self) -> int:
        """Slots of the fullest row; the view that attention reads."""
        return max(self.held)

    @property
    def uniform(self) -> bool:
        """Whether every row holds the same number, so that no mask is needed."""
        return min(self.held) == max(self.held)

    def view(self, tensor: Tensor) -> Tensor:
        """The last ``width`` slots of ``keys``, ``values``, ``positions`` or an extra; no copy."""
        capacity, width = self.keys.shape[2], max(self.held)
        return tensor if width == capacity else tensor.narrow(2, capacity - width, width)

    def live(self) -> Tensor | None:
        """bool ``[B, 1, width]``, True where a slot of the view holds a token; None where all do."""
        if min(self.held) == max(self.held):
            return None
        held = torch.tensor(self.held, device=self.keys.device)
        return (torch.arange(self.width, device=held.device) >= self.width - held[:, None])[:, None]

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Write n new tokens per row into the free slots before the held ones; their extras start from the fills.

        Args:
            keys, values: ``[B, H, n, head_dim]``.
            positions: int ``[B, n]``.

        Raises:
            ValueError: where a row has fewer than n free slots.
        """
        count, width = keys.shape[2], self.width
        if width + count > self.capacity:
            raise ValueError(f"{count} new tokens do not fit: {width} of {self.capacity} slots are taken")
        if self.uniform:
            first = self.capacity - width - count
            self.keys.narrow(2, first, count).copy_(keys)
            self.values.narrow(2, first, count).copy_(values)
            self.positions.narrow(2, first, count).copy_(positions[:, None])
            if not self.tidy:
                self.refill(first, count)
        else:
            first = torch.tensor([self.capacity - held - count for held in self.held], device=keys.device)
            index = (first[:, None] + torch.arange(count, device=keys.device))[:, None].expand(-1, keys.shape[1], -1)
            self.write(index, keys, values, positions)
        self.held = [held + count for held in self.held]

    def refill(self, first: int, count: int) -> None:
        """Let the extras of free slots start anew."""
        for name, extra in self.extras.items():
            extra.narrow(2, first, count).fill_(self.fills[name])

    def write(self, index: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Overwrite slots ``index`` ``[B, H, n]`` in place; ``held`` is the caller's to keep."""
        scatter_slots(self.keys, index, keys)
        scatter_slots(self.values, index, values)
        self.positions.scatter_(2, index, positions[:, None].expand(index.shape).to(self.positions.dtype))
        for name, extra in self.extras.items():
            shape = (*index.shape, *extra.shape[3:])
            scatter_slots(extra, index, extra.new_full((), self.fills[name]).expand(shape))

    def drop(self, victims: Tensor) -> None:
        """Forget n tokens per head and close the gaps by filling holes, at most n moves a head.

        The n front-most held slots become free. Survivors among them move into the holes that lie behind; there are
        as many of those as of such survivors. In torch all n front slots are paired with all n victims, which moves
        only what was dropped anyway besides, so that no head needs a mask.

        Args:
            victims: int ``[B, H, n]``, slots of the view (0 is the first slot of the last ``width``), all distinct.

        Raises:
            ValueError: where rows hold different numbers (their fronts differ; select rows first).
        """
        if not self.uniform:
            raise ValueError(f"rows hold {self.held} tokens; drop needs rows that hold the same number")
        count = victims.shape[-1]
        if victims.device.type == "cpu":
            self.fill_holes(victims)
        else:
            dropped = torch.zeros_like(self.view(self.positions), dtype=torch.bool).scatter_(2, victims, True)
            front = dropped[..., :count].to(torch.uint8).argsort(dim=-1, stable=True)  # survivors first
            holes = victims.sort(-1, descending=True).values  # holes behind the front first
            for tensor in self.tensors():
                view = self.view(tensor)
                scatter_slots(view, holes, gather_slots(view, front))
        first = self.capacity - self.width
        self.positions.narrow(2, first, count).fill_(EMPTY)
        self.refill(first, count)
        self.held = [held - count for held in self.held]

    def fill_holes(self, victims: Tensor) -> None:
        """The moves of :meth:`drop` on the CPU, and no others."""
        sources, targets = compiled("places.pair_holes")(raw(victims), self.width)
        for tensor in self.tensors():
            flat = tensor.view(*self.positions.shape, -1)
            compiled("places.move")(raw(flat), sources, targets, self.capacity - self.width)

    def select(self, rows: Tensor) -> Slots:
        """A copy of the given rows, int64 ``[n]``; rows may repeat (beam search)."""
        part = Slots(
            keys=self.keys.index_select(0, rows),
            values=self.values.index_select(0, rows),
            positions=self.positions.index_select(0, rows),
            held=[self.held[row] for row in rows.tolist()],
            extras={name: extra.index_select(0, rows) for name, extra in self.extras.items()},
            fills=self.fills,
            tidy=self.tidy,
        )
        if part.uniform and not part.tidy:
            part.refill(0, part.capacity - part.width)
            part.tidy = True
        return part

    def assign(self, rows: Tensor, other: Slots) -> None:
        """Put ``other`` back over the given (distinct) rows."""
        for mine, its in zip(self.tensors(), other.tensors(), strict=True):
            mine.index_copy_(0, rows, its)
        for row, held in zip(rows.tolist(), other.held, strict=True):
            self.held[row] = held
        # Whoever counts in the extras of the fullest row counts in free slots of the others.
        self.tidy = self.tidy and other.tidy and self.uniform

    def tensors(self) -> list[Tensor]:
        return [self.keys, self.values, self.positions, *self.extras.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and everything that travels with a slot."""
        return sum(tensor.nbytes for tensor in self.tensors())

"""From documents to rows of equal length: cut, or packed one after the other (KVpop, spec section 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PACKINGS = ("cut", "concat", "reset")


@dataclass(frozen=True)
class Row:
    """What one step reads.

    Attributes:
        name: of the document it begins in.
        pieces: int64 ``[n]`` each, n >= 2, read one by one: each has sinks, positions and a scorer's memory of its own.
    """

    name: str
    pieces: tuple[Tensor, ...]

    @property
    def tokens(self) -> int:
        return sum(piece.numel() for piece in self.pieces)


def pack_rows(documents: Sequence[tuple[object, Tensor]], packing: str = "cut", length: int | None = None) -> list[Row]:
    """Rows of documents.

    Args:
        documents: pairs of a document (``.name``) and its ids ``[S]``.
        packing: "cut", a document a row, cut to ``length``; "concat", documents one after the other in rows of
            ``length`` tokens under one mask, nothing reset at their boundaries (the paper's); "reset", the same rows,
            but every document in a row has its own sinks, positions, top-k and memory. A row is then read piece by
            piece, which is what one packed row whose masks never cross a boundary comes to, without the mask.
        length: tokens of a row; with "cut" None leaves the documents as they are.

    Returns:
        The rows, in order. Packed, what does not fill the last row is left out; with "reset" so are single tokens.

    Raises:
        ValueError: for an unknown packing, packing without a length, or too few tokens for one row.

    Example:
        >>> from types import SimpleNamespace as Text
        >>> documents = [(Text(name="a"), torch.arange(3)), (Text(name="b"), torch.arange(10, 16))]
        >>> [[piece.tolist() for piece in row.pieces] for row in pack_rows(documents, "reset", 4)]
        [[[0, 1, 2]], [[11, 12, 13, 14]]]
    """
    if packing not in PACKINGS:
        raise ValueError(f"packing is one of {', '.join(PACKINGS)}, not {packing!r}")
    if packing != "cut" and (length is None or length < 2):
        raise ValueError(f"packing {packing!r} needs the length of a row, 2 tokens or more, not {length}")
    if packing == "cut":
        return [Row(document.name, (ids[:length],)) for document, ids in documents]
    owner = torch.cat([torch.full((ids.numel(),), index) for index, (_, ids) in enumerate(documents)])
    tokens = torch.cat([ids.reshape(-1) for _, ids in documents])
    if tokens.numel() < length:
        raise ValueError(f"the documents have {tokens.numel()} tokens together, a row has {length}")
    rows = []
    for start in range(0, tokens.numel() - length + 1, length):
        row, owners = tokens[start : start + length], owner[start : start + length]
        pieces = (row,)
        if packing == "reset":
            sizes = owners.unique_consecutive(return_counts=True)[1].tolist()
            pieces = tuple(piece for piece in row.split(sizes) if piece.numel() > 1)
        rows.append(Row(documents[int(owners[0])][0].name, pieces))
    return rows

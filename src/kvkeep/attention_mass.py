"""Attention mass: how much softmax attention every key receives over a range of queries.

One computation behind many statistics: KVpop's target (all queries after the window), ForesightKV's golden labels (the
mean per block of queries, then a running maximum from the future) and the sums that H2O, SnapKV and others rank by.

A causal row block, some queries with all the keys they may see, is complete: it is softmaxed, added up and dropped. The
S x S matrix never exists; memory is O(block * S). Nothing here carries a gradient.

Knows queries and keys as the attention sees them (after RoPE and normalisation); nothing of models, masks other than
the causal one, or budgets. Query head `h * G + g` reads KV head h. Logits, softmax and sums are float32 or the input's
dtype, whichever is wider.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import frexp
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.kernels.choice import takes_flex
from kvkeep.kernels.products import bfloat16_product, rounds
from kvkeep.lifetimes import check_padding

ROW_BLOCK_SCORES = 2**17  # scores of one head in a row block: few enough to stay near the processor
BATCH_SCORES = 2**24  # scores of a whole row block: above it, the rows of a batch take turns


class _Rows(NamedTuple):
    """Rows of the batch with equal padding, without it. n = S - pad."""

    index: Tensor | slice  # which rows
    pad: int
    query: Tensor  # [b, Hkv, G, n, D]
    key: Tensor  # [b, Hkv, n, D]
    lse: Tensor | None  # [b, Hkv, G, n]
    block: int  # queries in a row block
    scaling: float  # that is left to do: 1 where the queries have it
    rounded: bool  # whether products are those of numbers rounded to bfloat16


@torch.no_grad()
def future_attention(
    query: Tensor,
    key: Tensor,
    window: int,
    group: str = "max",
    count_normalised: bool = True,
    eps: float = 1e-6,
    scaling: float | None = None,
    lse: Tensor | None = None,
    padding: Tensor | None = None,
    *,
    block: int | None = None,
    precision: str = "auto",
    backend: str = "auto",
) -> Tensor:
    """KVpop's target: the log of the mean attention a key receives from all queries after its window.

    `m[t] = sum over d in [t + w, S) of p[d -> t]`, divided by `N_t = max(1, S - (t + w))`; then `log(eps + m)`, reduced
    over the query heads of a KV head (arXiv 2607.05061, equations 3 and 4, appendices B.1 and B.2). The first query
    that counts is the first with the key outside its window, d = t + w.

    Args:
        query: `[B, Hq, S, D]`.
        key: `[B, Hkv, S, D]`, Hq a multiple of Hkv.
        window: w >= 1 tokens, the current one included.
        group: "max" over the group's heads (the paper's experiments), "mean_log" (mean of the logs) or "log_mean" (log
            of the mean mass).
        count_normalised: divide by `N_t`.
        eps: added to the mass; well below 1 / S.
        scaling: of the logits; None for `1 / sqrt(D)`.
        lse: `[B, Hq, S]`, natural logs: probabilities are then `exp(logit - lse)`. With the LSE of a sparse attention a
            mass may exceed 1.
        padding: `[B]` left pads. A padded row gets what it gets alone.
        block: queries per row block, chosen by itself if None.
        precision: of the products of queries and keys, which are added up in float32 or wider whatever it is. "wide"
            multiplies in float32; "bfloat16" rounds both to bfloat16 first (:mod:`kvkeep.kernels.products`), which
            moves the target of float32 inputs by less than 0.03, 0.004 on average, where logits reach 18; "auto" does
            so on CUDA for inputs that are bfloat16 already, where it loses nothing.
        backend: "rows", row blocks on any device; "flex", two passes of FlexAttention, which write no probabilities
            (:mod:`kvkeep.kernels.flex_mass`; linear memory on CUDA only); "auto", the second on CUDA where Triton is
            importable, D >= 16 and the input is not float64, else the first.

    Returns:
        `[B, Hkv, S]`. The last w keys of a row, and its pads, were seen by no counted query and hold `log(eps)`.

    Raises:
        ValueError: where shapes clash, window < 1, eps < 0, or the group, precision or backend is unknown or does not
            fit the input.

    Example:
        >>> query, key = torch.randn(1, 4, 64, 16), torch.randn(1, 2, 64, 16)
        >>> future_attention(query, key, window=8).shape
        torch.Size([1, 2, 64])
    """
    if group not in ("max", "mean_log", "log_mean"):
        raise ValueError(f'group must be "max", "mean_log" or "log_mean", got {group!r}')
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}: it holds the current token")
    if eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    by_flex = takes_flex(query, backend)
    target = _empty_result(query, key).fill_(eps).log_()
    for rows in _equally_padded(query, key, scaling, lse, padding, block, precision):
        mass = (_mass_by_flex if by_flex else _mass_after_window)(rows, window)  # [b, Hkv, G, n]
        if count_normalised:
            length = mass.shape[-1]
            mass /= (length - window - torch.arange(length, device=mass.device)).clamp(min=1)
        if group == "log_mean":
            reduced = (mass.mean(2) + eps).log()
        else:
            logs = (mass + eps).log()
            reduced = logs.amax(2) if group == "max" else logs.mean(2)
        target[rows.index, :, rows.pad :] = reduced
    return target


@torch.no_grad()
def block_attention(
    query: Tensor,
    key: Tensor,
    start: int,
    interval: int,
    scaling: float | None = None,
    lse: Tensor | None = None,
    padding: Tensor | None = None,
    *,
    partial: str = "mean",
    head: str = "mean",
    block: int | None = None,
    precision: str = "auto",
) -> Tensor:
    """The mean attention every key receives from each block of `interval` queries, block 0 beginning at query `start`.

    The block means of ForesightKV's golden eviction (arXiv 2602.03203), over the full causal attention; with
    `start = rest + L` and `interval = L` block t holds the queries from the t-th eviction to the next.

    Args:
        query: `[B, Hq, S, D]`.
        key: `[B, Hkv, S, D]`.
        start: first query of block 0, in the row's own positions.
        interval: queries in a block.
        scaling, lse, padding, block, precision: as in `future_attention`.
        partial: the last block may be short: "mean" over the queries that exist, or "zero_pad", their sum divided by
            `interval`, as the released code has it.
        head: "mean" or "max" over the query heads of a KV head.

    Returns:
        `[B, Hkv, S, blocks]`, blocks = ceil((S - start) / interval), or 0. Zero for pads, for keys younger than the
        block, and for blocks that a shorter row of a padded batch does not reach.

    Raises:
        ValueError: where shapes clash, start < 0, interval < 1, or an option is unknown.
    """
    if partial not in ("mean", "zero_pad"):
        raise ValueError(f'partial must be "mean" or "zero_pad", got {partial!r}')
    if head not in ("mean", "max"):
        raise ValueError(f'head must be "mean" or "max", got {head!r}')
    if start < 0 or interval < 1:
        raise ValueError(f"blocks need start >= 0 and interval >= 1, got start {start} and interval {interval}")
    blocks = -(-max(query.shape[2] - start, 0) // interval)
    means = _empty_result(query, key, blocks).zero_()
    for rows in _equally_padded(query, key, scaling, lse, padding, block, precision):
        length = rows.key.shape[2]
        for number, first in enumerate(range(start, length, interval)):
            last = min(first + interval, length)
            mean = _mass_from(rows, first, last) / (interval if partial == "zero_pad" else last - first)
            reduced = mean.mean(2) if head == "mean" else mean.amax(2)  # [b, Hkv, last]
            means[rows.index, :, rows.pad : rows.pad + last, number] = reduced
    return means


@torch.no_grad()
def attention_by_age(
    query: Tensor,
    key: Tensor,
    window: int,
    edges: Sequence[int],
    group: str = "max",
    scaling: float | None = None,
    lse: Tensor | None = None,
    padding: Tensor | None = None,
    *,
    block: int | None = None,
    precision: str = "auto",
) -> Tensor:
    """The attention a key receives after leaving its window, summed over ranges of its age.

    The age of key t at query d is `d - (t + w)`: 0 where KVpop's future begins (`future_attention`). How fast the sums
    fall from range to range is the decay of a head.

    Args:
        query: `[B, Hq, S, D]`.
        key: `[B, Hkv, S, D]`.
        window: w >= 1 tokens.
        edges: rising ages `e_0 < e_1 < ..`, e_0 >= 0; range j holds the ages `e_j <= age < e_(j + 1)`.
        group: "max" or "mean" of a range's sum over the query heads of a KV head.
        scaling, lse, padding, block, precision: as in `future_attention`.

    Returns:
        `[B, Hkv, S, len(edges) - 1]`, sums over queries, not divided by their number; 0 where the sequence ends before
        a range begins, and for pads.

    Raises:
        ValueError: where shapes clash, window < 1, the edges do not rise from 0 or more, or the group is unknown.
    """
    if group not in ("max", "mean"):
        raise ValueError(f'group must be "max" or "mean", got {group!r}')
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}: it holds the current token")
    if len(edges) < 2 or edges[0] < 0 or any(b <= a for a, b in pairwise(edges)):
        raise ValueError(f"edges must be two or more ages rising from 0 or more, got {list(edges)}")
    result = _empty_result(query, key, len(edges) - 1).zero_()
    for rows in _equally_padded(query, key, scaling, lse, padding, block, precision):
        sums = rows.query.new_zeros((*rows.query.shape[:3], len(edges) - 1, rows.query.shape[3]))
        starts = torch.arange(rows.query.shape[3], device=key.device) + window
        starts = starts + torch.tensor(list(edges), device=key.device)[:, None]  # [edges, n]: queries of those ages
        for a, b, probability in _row_blocks(rows, window, rows.query.shape[3]):
            until = torch.nn.functional.pad(probability.cumsum(-2), (0, 0, 1, 0))  # [b, Hkv, G, b - a + 1, b]
            row = (starts[:, :b] - a).clamp(0, b - a).expand(*until.shape[:3], -1, -1)
            sums[..., :b] += until.gather(-2, row).diff(dim=-2)
        result[rows.index, :, rows.pad :] = (sums.amax(2) if group == "max" else sums.mean(2)).transpose(-1, -2)
    return result


def future_maximum(block_means: Tensor) -> Tensor:
    """ForesightKV's golden label `alpha[i, t] = max over j >= t of block_means[i, j]` (arXiv 2602.03203).

    Args:
        block_means: `[..., blocks]`, from `block_attention`.

    Returns:
        the same shape: the most that any block from t on attends to a key. Never rises with t.

    Example:
        >>> future_maximum(torch.tensor([0.1, 0.3, 0.2]))
        tensor([0.3000, 0.3000, 0.2000])
    """
    return block_means.flip(-1).cummax(-1).values.flip(-1)


@torch.no_grad()
def query_sums(
    query: Tensor,
    key: Tensor,
    ranges: Sequence[tuple[int, int]],
    scaling: float | None = None,
    lse: Tensor | None = None,
    padding: Tensor | None = None,
    *,
    block: int | None = None,
    precision: str = "auto",
) -> Tensor:
    """The attention every key receives, summed over each of several ranges of queries, per query head.

    Ranges may overlap ("the last 8, 16, 32 queries", "all of them"): every row of attention is computed once.

    Args:
        query: `[B, Hq, S, D]`.
        key: `[B, Hkv, S, D]`.
        ranges: pairs (a, b), the queries a <= q < b in the row's own positions. What lies beyond a padded row's end
            does not count.
        scaling, lse, padding, block, precision: as in `future_attention`.

    Returns:
        `[B, Hq, S, len(ranges)]`, 0 for pads.

    Raises:
        ValueError: where shapes clash or a range does not lie within 0 <= a <= b <= S.
    """
    length = query.shape[2]
    for a, b in ranges:
        if not 0 <= a <= b <= length:
            raise ValueError(f"a range of queries must lie between 0 and the length {length}, got ({a}, {b})")
    sums = _empty_result(query, key, len(ranges), per_query_head=True).zero_()
    bounds = sorted({bound for pair in ranges for bound in pair})
    for rows in _equally_padded(query, key, scaling, lse, padding, block, precision):
        for first, last in pairwise(bounds):  # a piece lies within a range or outside of it
            last = min(last, rows.key.shape[2])
            covering = [number for number, (a, b) in enumerate(ranges) if a <= first and last <= b]
            if first >= last or not covering:
                continue
            mass = _mass_from(rows, first, last).flatten(1, 2)  # [b, Hq, last]
            for number in covering:
                sums[rows.index, :, rows.pad : rows.pad + last, number] += mass
    return sums


# ---------------------------------------------------------------------------------------------------------------------
# Row blocks


def _empty_result(query: Tensor, key: Tensor, *last: int, per_query_head: bool = False) -> Tensor:
    heads = (query if per_query_head else key).shape[1]
    return query.new_empty((key.shape[0], heads, key.shape[2], *last), dtype=_wide(query))


def _wide(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _check_shapes(query: Tensor, key: Tensor, lse: Tensor | None) -> None:
    if query.dim() != 4 or key.dim() != 4:
        raise ValueError(
            f"query and key must be [batch, heads, length, head_dim], got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    for axis, name in ((0, "batch size"), (2, "length"), (3, "head_dim")):
        if query.shape[axis] != key.shape[axis]:
            raise ValueError(f"query and key differ in {name}: {query.shape[axis]} and {key.shape[axis]}")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads are not a multiple of {key.shape[1]} KV heads")
    if not bool(torch.isfinite(query).all() & torch.isfinite(key).all()):
        raise ValueError("queries or keys are not finite (NaN or infinity)")
    if lse is not None and lse.shape != query.shape[:3]:
        raise ValueError(f"lse must be {tuple(query.shape[:3])} like the queries, got {tuple(lse.shape)}")


def _equally_padded(
    query: Tensor,
    key: Tensor,
    scaling: float | None,
    lse: Tensor | None,
    padding: Tensor | None,
    block: int | None,
    precision: str,
) -> Iterator[_Rows]:
    """Splits a batch into groups of rows with equal padding and cuts it off, so that no later step knows about pads."""
    _check_shapes(query, key, lse)
    rounded = rounds(query, key, precision)
    if block is not None and block < 1:
        raise ValueError(f"block must be at least 1 query, got {block}")
    batch, query_heads, length, head_dim = query.shape
    scaling = head_dim**-0.5 if scaling is None else scaling
    later = scaling if rounded and abs(frexp(scaling)[0]) != 0.5 else 1.0  # only a power of two survives rounding
    grouped = (key.shape[1], query_heads // key.shape[1])  # Hkv, G
    padding = check_padding(padding, batch, length, torch.device("cpu"))
    pads = [0] * batch if padding is None else padding.tolist()
    for pad in sorted(set(pads) - {length}):
        members = [row for row, row_pad in enumerate(pads) if row_pad == pad]
        size = block or max(32, min(64, ROW_BLOCK_SCORES // (length - pad)))
        at_once = max(1, BATCH_SCORES // (query_heads * size * (length - pad)))
        for some in (members[i : i + at_once] for i in range(0, len(members), at_once)):
            whole = len(some) == batch
            index = slice(None) if whole else torch.tensor(some, device=query.device)
            yield _Rows(
                index,
                pad,
                (query[index, :, pad:].to(_wide(query)) * (scaling / later)).unflatten(1, grouped),
                key[index, :, pad:].to(_wide(query)),
                None if lse is None else lse[index, :, pad:].to(_wide(query)).unflatten(1, grouped),
                size,
                later,
                rounded,
            )


def _row_blocks(rows: _Rows, first: int, last: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yields (a, b, p): probabilities `[.., Hkv, G, b - a, b]` of queries a..b-1 over keys 0..b-1, block by block."""
    group = rows.query.shape[2]
    for a in range(first, last, rows.block):
        b = min(a + rows.block, last)
        queries = rows.query[..., a:b, :].flatten(2, 3)  # [b, Hkv, G * (b - a), D]: one product per KV head
        logits = (bfloat16_product if rows.rounded else torch.matmul)(queries, rows.key[..., :b, :].mT)
        logits = (logits if rows.scaling == 1 else logits.mul_(rows.scaling)).unflatten(2, (group, b - a))
        younger = torch.ones(b - a, b - a, dtype=torch.bool, device=logits.device).triu_(1)
        logits[..., a:].masked_fill_(younger, float("-inf"))
        yield a, b, logits.softmax(-1) if rows.lse is None else logits.sub_(rows.lse[..., a:b, None]).exp_()


def _mass_from(rows: _Rows, first: int, last: int) -> Tensor:
    """Attention received from queries first..last-1 by the keys before `last`: `[b, Hkv, G, last]`."""
    mass = rows.query.new_zeros((*rows.query.shape[:3], last))
    for _, b, probability in _row_blocks(rows, first, last):
        mass[..., :b] += probability.sum(-2)
    return mass


def _mass_after_window(rows: _Rows, window: int) -> Tensor:
    """Attention received by each key t from the queries d >= t + w: `[b, Hkv, G, n]`."""
    length = rows.key.shape[2]
    mass = rows.query.new_zeros(rows.query.shape[:4])
    for a, b, probability in _row_blocks(rows, window, length):
        past = a - window + 1  # the keys that all queries of this block count for: t + w <= a
        mass[..., :past] += probability[..., :past].sum(-2)
        # query a + i counts for i more
        mass[..., past : b - window] += probability[..., past : b - window].tril(-1).sum(-2)
    return mass


def _mass_by_flex(rows: _Rows, window: int) -> Tensor:
    """:func:`_mass_after_window` without a probability that is written down."""
    from kvkeep.kernels.flex_mass import mass_after_window  # here, because importing it takes a second

    query, lse = rows.query.flatten(1, 2), None if rows.lse is None else rows.lse.flatten(1, 2)  # [b, Hq, n, D]
    dtype = torch.bfloat16 if rows.rounded else query.dtype
    mass = mass_after_window(query.to(dtype), rows.key.to(dtype), window, rows.scaling, lse)
    return mass.unflatten(1, rows.query.shape[1:3])

"""Distillation into a student that sees less: forward KL on the teacher's most likely tokens.

KVpop (arXiv 2607.05061) trains the backbone on `KL(teacher || student)` over the teacher's 256 largest
logits, which are all that has to be stored of a teacher: ids, log-probabilities and the log of what the rest share.

The paper's form renormalises both sides on those ids ("renorm"); it says nothing about the mass that the student puts
elsewhere, and in a trial that mass drifted. Ours, the default, adds one bucket for the rest of the vocabulary ("tail"):
a lower bound of the full KL that sees such a drift. Both are 0, with zero gradient, when the two models agree.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class TopLogits(NamedTuple):
    """What is kept of a teacher's prediction."""

    ids: Tensor  # integers [..., K], most likely first
    log_probs: Tensor  # [..., K], natural logs of the probabilities over the whole vocabulary
    log_rest: Tensor  # [...], log of the probability of all other tokens; -inf where K is the vocabulary


@torch.no_grad()
def top_logits(logits: Tensor, k: int = 256, chunk: int | None = None) -> TopLogits:
    """The k most likely tokens of a teacher.

    Args:
        logits: `[..., V]`.
        k: at most V.
        chunk: positions at a time; memory beyond the result is `chunk * V`. None for all at once.

    Returns:
        `TopLogits`, in float32 or the dtype of `logits`, whichever is wider.

    Raises:
        ValueError: where k does not lie in [1, V] or `chunk` is below 1.

    Example:
        >>> top = top_logits(torch.tensor([2.0, 1.0, 0.0, -1.0]), k=2)
        >>> top.ids.tolist(), round(float(top.log_probs.exp().sum() + top.log_rest.exp()), 6)
        ([0, 1], 1.0)
    """
    shape, vocabulary = logits.shape[:-1], logits.shape[-1]
    if not 1 <= k <= vocabulary:
        raise ValueError(f"k must lie between 1 and the vocabulary of {vocabulary}, got {k}")
    parts = []
    for part in _split(logits.reshape(-1, vocabulary), chunk):
        part = _wide(part)
        top, ids = part.topk(k)
        log_top, log_rest = _two_masses(part, ids)
        lse = torch.logaddexp(log_top, log_rest)
        parts.append((ids, top - lse[:, None], log_rest - lse))
    ids, log_probs, log_rest = (torch.cat(column) for column in zip(*parts, strict=True))
    return TopLogits(ids.view(*shape, k), log_probs.view(*shape, k), log_rest.view(shape))


def distillation(
    student_logits: Tensor,
    teacher: TopLogits,
    kl: str = "tail",
    reduction: str = "mean",
    mask: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """`KL(teacher || student)` on the teacher's top tokens, in nats per position.

    Args:
        student_logits: `[..., V]`.
        teacher: of the same positions, from `top_logits`; ids of any integer type.
        kl: "tail", sums over the K tokens and one bucket for all others; "renorm", both sides renormalised on the K
            tokens (the paper's). With K = V both are the full KL.
        reduction: "mean" over the positions, "sum", or "none" for `[...]`.
        mask: bool `[...]`, positions that count (not the pads, for instance). None for all.
        chunk: positions at a time. Each chunk is computed again in backward, so that memory beyond the logits and their
            gradient is `chunk * V`. None for all at once.

    Returns:
        A scalar, or `[...]` with 0 where the mask is False.

    Raises:
        ValueError: where an option is unknown or the shapes do not fit.
    """
    shape, vocabulary = student_logits.shape[:-1], student_logits.shape[-1]
    if kl not in ("tail", "renorm"):
        raise ValueError(f'kl must be "tail" or "renorm", got {kl!r}')
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')
    masked = shape if mask is None else mask.shape
    if not teacher.ids.shape[:-1] == masked == shape:
        raise ValueError(
            f"the student has the positions {tuple(shape)}, the teacher {tuple(teacher.ids.shape[:-1])} "
            f"and the mask {tuple(masked)}"
        )
    divergence = _tail if kl == "tail" else _renormalised
    columns = (
        student_logits.reshape(-1, vocabulary),
        teacher.ids.long().reshape(-1, teacher.ids.shape[-1]),
        _finite(teacher.log_probs).reshape(-1, teacher.log_probs.shape[-1]),
        _finite(teacher.log_rest).reshape(-1),
    )
    parts = zip(*(_split(column, chunk) for column in columns), strict=True)
    if chunk is None:
        losses = [divergence(*part) for part in parts]
    else:
        losses = [checkpoint(divergence, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    loss = torch.cat(losses).view(shape)
    if mask is not None:
        loss = loss.masked_fill(~mask, 0.0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / max(loss.numel() if mask is None else int(mask.sum()), 1)


def _tail(logits: Tensor, ids: Tensor, log_probs: Tensor, log_rest: Tensor) -> Tensor:
    """KL over K + 1 outcomes: `[n, V]`, `[n, K]`, `[n, K]`, `[n]` -> `[n]`."""
    logits = _wide(logits)
    student_top, student_rest = _two_masses(logits, ids)
    lse = torch.logaddexp(student_top, student_rest)
    gap = log_probs - (logits.gather(-1, ids) - lse[:, None])
    top = (log_probs.exp() * gap).sum(-1)
    if ids.shape[-1] == logits.shape[-1]:
        return top
    return top + log_rest.exp() * (log_rest - (student_rest - lse))


def _renormalised(logits: Tensor, ids: Tensor, log_probs: Tensor, log_rest: Tensor) -> Tensor:
    """KL of the two softmaxes over the K tokens alone; shapes as in `_tail`."""
    teacher, student = log_probs.log_softmax(-1), _wide(logits.gather(-1, ids)).log_softmax(-1)
    return (teacher.exp() * (teacher - student)).sum(-1)


def _two_masses(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the summed exponentials of the tokens in `ids` and of all others: `[n, V]`, `[n, K]` -> two `[n]`.

    The rest is summed itself, not taken as 1 minus the top: where the teacher is sure, little of that would be left.
    """
    top = logits.gather(-1, ids).logsumexp(-1)
    if ids.shape[-1] == logits.shape[-1]:
        return top, torch.full_like(top, -torch.inf)
    return top, logits.scatter(-1, ids, -torch.inf).logsumexp(-1)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _finite(log_probability: Tensor) -> Tensor:
    """A probability of 0 as the lowest number: times itself it is 0, where -inf would give NaN."""
    wide = _wide(log_probability.detach())
    return wide.clamp(min=torch.finfo(wide.dtype).min)


def _split(column: Tensor, chunk: int | None) -> tuple[Tensor, ...]:
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    return column.split(chunk or max(len(column), 1))

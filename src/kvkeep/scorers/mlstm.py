"""The stateful scorer: a small matrix memory per KV head, read with a delay (KVpop, arXiv 2607.05061).

At query q the pair that enters is written, then the memory is read with the token ``q - window`` that has just left:
its score knows what came after it. Written once as a recurrence (decoding) and once in chunks (prefill, training);
both update the same state, so tokens may arrive in pieces of any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad, silu

from kvkeep.kernels.place import Loop
from kvkeep.scorers.base import SHARE, LayerScorer, ScorerError, State
from kvkeep.scorers.layout import LayerShape, Layout
from kvkeep.scorers.linear import drawn, per_head
from kvkeep.scorers.mlp import MLP, SMALL

LEAST = 1e-12  # of the ratio's denominator, in units where the largest write weighs 1


def state_entries(features: int, head_dim: int, value_dim: int | None = None, extra: int = 0) -> int:
    """Tokens of a 2-byte cache that the memory of one KV head costs.

    ``F * Dv + F + 1`` float32 numbers (memory, normaliser, stabiliser) over ``2 * D`` 2-byte numbers per token, rounded
    up: ``F + 1`` where ``Dv = D`` and ``F + 1 <= D``.

    Args:
        features, head_dim, value_dim: F, D and Dv (None = D).
        extra: further float32 numbers per head.

    Example:
        >>> state_entries(8, head_dim=64)
        9
    """
    numbers = features * (value_dim or head_dim) + features + 1 + extra
    return math.ceil(4 * numbers / (2 * head_dim * 2))


def features_for(slots: float, entries: Callable[[int], int] = lambda features: features + 1) -> int:
    """The largest power of two whose memory costs at most 8 % of ``slots``; 1 where even 2 would cost more.

    Args:
        slots: tokens per KV head, the memory included.
        entries: what a number of features costs, in tokens.

    Example:
        >>> features_for(128), features_for(256)
        (8, 16)
    """
    features = 1
    while entries(2 * features) <= SHARE * slots:
        features *= 2
    return features


@dataclass(frozen=True)
class MLSTMOptions:
    """Options of the stateful scorer.

    Args:
        features: F; None = from the smallest budget, see :func:`features_for`.
        value_dim: what the memory stores of a pair: None = the value itself, else a learned projection to so many.
        hidden: width of the readout; None = the size of a head.
        delay: read with the token that leaves; False = with the one that enters, the ablation, whose scores then wait
            in a ring of ``window`` numbers.
        normaliser: "ratio" = ``q.C / q.z``; "xlstm" = ``q.C / max(|q.z|, 1)``.
        chunk: tokens computed at a time; changes nothing but speed.
        forget_bias: of the first and the last head, evenly spread between.
        input_bias: cancels under "ratio".

    Raises:
        ScorerError: for a size below 1 or an unknown normaliser.
    """

    features: int | None = None
    value_dim: int | None = None
    hidden: int | None = None
    delay: bool = True
    normaliser: str = "ratio"
    chunk: int = 64
    forget_bias: tuple[float, float] = (3.0, 6.0)
    input_bias: float = -1.0

    def __post_init__(self) -> None:
        for name in ("features", "value_dim", "hidden", "chunk"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ScorerError(f"{name} must be at least 1, not {size}")
        if self.normaliser not in ("ratio", "xlstm"):
            raise ScorerError(f"normaliser must be 'ratio' or 'xlstm', not {self.normaliser!r}")


class MLSTM(LayerScorer):
    """mLSTM with delayed readout, weights and memory of its own in every layer and KV head.

    Paper: KVpop, arXiv 2607.05061, its delayed mLSTM. With x = [k; v] of a pair, standardised::

        q~ = softmax(Wq x), k~ = softmax(Wk x) over F features,  v~ = v or Wv x
        i = exp(wi.x + bi), f = sigmoid(wf.x + bf)
        C_u = f C_{u-1} + i k~ v~^T,   z_u = f z_{u-1} + i k~
        h_t = q~_t C_{t+w} / q~_t z_{t+w}
        r_t = w2 . silu(W1 [h_t; x_t] + b1) + b2

    Ours where the paper is silent: F, the readout, inputs standardised, biases of the gates.
    """

    method = "kvpop"
    remembers = True
    Options = MLSTMOptions

    def __init__(self, shape: LayerShape, options: MLSTMOptions, generator: torch.Generator):
        super().__init__(shape, options, generator)
        heads, inputs, hidden = shape.kv_heads, 2 * shape.head_dim, options.hidden or shape.head_dim
        self.value_dim = options.value_dim or shape.head_dim
        self.w_query = drawn(generator, heads, inputs, options.features, std=inputs**-0.5)
        self.w_key = drawn(generator, heads, inputs, options.features, std=inputs**-0.5)
        self.w_gates = drawn(generator, heads, inputs, 2, std=SMALL * inputs**-0.5)
        input_bias = torch.full((heads,), float(options.input_bias))
        forget_bias = _spread(*options.forget_bias, heads).to(input_bias.device)  # transformers patches linspace
        self.b_gates = nn.Parameter(torch.stack([input_bias, forget_bias], -1))  # [H, 2]
        if options.value_dim is not None:
            self.w_value = drawn(generator, heads, inputs, self.value_dim, std=inputs**-0.5)
        readout = self.value_dim + inputs
        self.w1 = drawn(generator, heads, readout, hidden, std=readout**-0.5)
        self.b1 = nn.Parameter(torch.zeros(heads, hidden))
        self.w2 = drawn(generator, heads, hidden, 1, std=SMALL * hidden**-0.5)
        self.b2 = nn.Parameter(torch.zeros(heads, 1))

    @classmethod
    def complete(cls, options: MLSTMOptions, layout: Layout, room: float, window: int) -> MLSTMOptions:
        def entries(features: int) -> int:
            sized = replace(options, features=features)
            return max(cls.state_entries(sized, shape.head_dim, window) for shape in layout.bounded)

        return replace(options, features=options.features or features_for(room, entries))

    @classmethod
    def state_entries(cls, options: MLSTMOptions, head_dim: int, window: int) -> int:
        return state_entries(options.features, head_dim, options.value_dim, 0 if options.delay else window)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype = torch.float32, window: int = 0):
        heads, features = self.shape.kv_heads, self.options.features
        state = initial_memory(batch, heads, features, self.value_dim, device, dtype)
        if not self.options.delay:
            state["waiting"] = torch.zeros(batch, heads, window, dtype=dtype, device=device)
        return state

    def loop(self, decay: Tensor, decay_step: int, dtype: torch.dtype) -> Loop | None:
        if not self.options.delay:
            return None
        options = self.options
        memory = [self.w_query, self.w_key, self.w_gates, self.b_gates]
        memory += [] if options.value_dim is None else [self.w_value]
        readout = self.w1, self.b1, self.w2, self.b2, self.score_mean, self.score_std
        weights = self.packed(dtype, *memory, *readout, decay)
        widths = options.features, self.w1.shape[-1], options.value_dim is not None
        arguments = weights, *widths, options.normaliser == "ratio", LEAST, decay_step
        return Loop("scores.replace_lowest_by_mlstm", arguments)

    @torch.no_grad()
    def start_from(self, other: LayerScorer) -> None:
        """Score as an MLP scorer of the same width does; what the memory recalls weighs nothing until it is trained."""
        if not isinstance(other, MLP):
            super().start_from(other)
        if other.w1.shape[-1] != self.w1.shape[-1]:
            raise ScorerError(
                f"a readout {self.w1.shape[-1]} wide cannot start from a scorer {other.w1.shape[-1]} wide"
            )
        self.w1[:, : self.value_dim] = 0.0
        self.w1[:, self.value_dim :] = other.w1
        for mine, its in ((self.b1, other.b1), (self.w2, other.w2), (self.b2, other.b2)):
            mine.copy_(its)
        self.standardise_inputs(other.input_mean, other.input_std)

    def raw(self, entering: Tensor, leaving: Tensor, state: State) -> Tensor:
        if self.options.delay:
            return self.readout(leaving, self.recall(entering, leaving, state))
        fresh = self.readout(entering, self.recall(entering, entering, state))
        queue = torch.cat([state["waiting"], fresh], -1)  # scores in the order their tokens will leave
        state["waiting"] = queue[..., fresh.shape[-1] :]
        return queue[..., : fresh.shape[-1]]

    def recall(self, write: Tensor, read: Tensor, state: State) -> Tensor:
        """Write n pairs, reading after each: inputs ``[B, H, n, 2D]`` twice -> ``[B, H, n, Dv]``."""
        query = per_head(read, self.w_query).softmax(-1)  # [B, H, n, F]
        key = per_head(write, self.w_key).softmax(-1)
        value = write[..., self.shape.head_dim :] if self.options.value_dim is None else per_head(write, self.w_value)
        gates = per_head(write, self.w_gates, self.b_gates)  # [B, H, n, 2]
        inputs, forgets = gates[..., 0], logsigmoid(gates[..., 1])
        return mlstm(query, key, value, inputs, forgets, state, self.options.normaliser, self.options.chunk)

    def readout(self, inputs: Tensor, recalled: Tensor) -> Tensor:
        hidden = silu(per_head(torch.cat([recalled, inputs], -1), self.w1, self.b1))
        return per_head(hidden, self.w2, self.b2)[..., 0]


def _spread(first: float, last: float, count: int) -> Tensor:
    return torch.linspace(first, last, count) if count > 1 else torch.tensor([(first + last) / 2])


# ---------------------------------------------------------------------------------------------------------------------
# The memory. State: "memory" [B, H, F, Dv + 1], C with z as its last column, and "stabiliser" m [B, H]; C and z are
# kept times exp(-m). m cancels in everything that is read, so it needs no gradient.


def initial_memory(batch: int, heads: int, features: int, value_dim: int, device=None, dtype=torch.float32) -> State:
    """An empty memory; its first write forgets nothing since m = -inf."""
    memory = torch.zeros(batch, heads, features, value_dim + 1, device=device, dtype=dtype)
    return {"memory": memory, "stabiliser": memory.new_full((batch, heads), -torch.inf)}


def mlstm(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    log_forget: Tensor,
    state: State,
    normaliser: str = "ratio",
    chunk: int = 64,
) -> Tensor:
    """At each of n steps forget, write, then read: by recurrence for n = 1, in chunks otherwise.

    Args:
        query, key: ``[B, H, n, F]``, positive.
        value: ``[B, H, n, Dv]``.
        input_gate: ``[B, H, n]``, log of the weight of a write.
        log_forget: ``[B, H, n]``, log of what is kept of earlier writes, <= 0.
        state: see :func:`initial_memory`; its tensors are replaced.
        normaliser, chunk: see :class:`MLSTMOptions`.

    Returns:
        ``[B, H, n, Dv]``.
    """
    value = torch.cat([value, torch.ones_like(value[..., :1])], -1)  # the normaliser as one more value
    if query.shape[2] == 1:
        read, scale = _recurrent(query, key, value, input_gate, log_forget, state)
    else:
        read, scale = _chunkwise(query, key, value, input_gate, log_forget, state, chunk)
    numerator, denominator = read[..., :-1], read[..., -1:]
    if normaliser == "xlstm":
        return numerator / torch.maximum(denominator.abs(), torch.exp(-scale)[..., None])
    return numerator / denominator.clamp(min=LEAST)


def _recurrent(query, key, value, input_gate, log_forget, state: State) -> tuple[Tensor, Tensor]:
    """One step: what is read ``[B, H, 1, Dv + 1]``, in units of exp(m), and m ``[B, H, 1]``."""
    kept = log_forget + state["stabiliser"][..., None]  # [B, H, 1]
    scale = torch.maximum(kept, input_gate).detach()
    written = key.transpose(-1, -2) * torch.exp(input_gate - scale)[..., None] @ value  # [B, H, F, Dv + 1]
    memory = torch.exp(kept - scale)[..., None] * state["memory"] + written
    state["memory"], state["stabiliser"] = memory, scale[..., 0]
    return query @ memory, scale


def _chunkwise(query, key, value, input_gate, log_forget, state: State, chunk: int) -> tuple[Tensor, Tensor]:
    """n steps: what is read ``[B, H, n, Dv + 1]``, in units of exp(m), and m ``[B, H, n]``.

    A read finds what was written in its own chunk, by a triangle of weights, and the memory as it was before. With b
    the running sum of ``log_forget`` in a chunk, the write of step s weighs ``exp(b_u + (input_gate_s - b_s))`` at u.
    """
    count, chunk = query.shape[2], min(chunk, query.shape[2])
    spare = -count % chunk  # filled up with steps that keep everything and write nothing
    query, key, value = (
        pad(tensor, (0, 0, 0, spare)).unflatten(2, (-1, chunk)) for tensor in (query, key, value)
    )  # [B, H, c, L, ...]
    input_gate = pad(input_gate, (0, spare), value=-torch.inf).unflatten(2, (-1, chunk))
    kept = pad(log_forget, (0, spare)).unflatten(2, (-1, chunk)).cumsum(-1)  # b [B, H, c, L]
    weight = input_gate - kept
    before, scale_before = _carry(key, value, weight, kept[..., -1], state)

    scale = (kept + torch.maximum(scale_before[..., None], weight.cummax(-1).values)).detach()  # m [B, H, c, L]
    decay = torch.exp(kept + scale_before[..., None] - scale)
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
    exponent = ((kept - scale)[..., None] + weight[..., None, :]).masked_fill(future, -torch.inf)
    within = (query @ key.transpose(-1, -2)) * torch.exp(exponent)  # [B, H, c, L, L]
    read = decay[..., None] * (query @ before) + within @ value
    return read.flatten(2, 3)[:, :, :count], scale.flatten(2, 3)[:, :, :count]


def _carry(key, value, weight, kept, state: State) -> tuple[Tensor, Tensor]:
    """The memory before every chunk ``[B, H, c, F, Dv + 1]`` and its m ``[B, H, c]``; ``state`` moves to the end."""
    own_scale = (kept + weight.amax(-1)).detach().clamp(min=torch.finfo(kept.dtype).min)  # [B, H, c], never -inf
    own = torch.exp(kept[..., None] + weight - own_scale[..., None])[..., None] * key
    own = own.transpose(-1, -2) @ value  # [B, H, c, F, Dv + 1]: what each chunk writes
    memory, scale = state["memory"], state["stabiliser"]
    memories, scales = [], []
    for index in range(key.shape[2]):
        memories.append(memory)
        scales.append(scale)
        old, new = kept[:, :, index] + scale, own_scale[:, :, index]
        scale = torch.maximum(old.detach(), new)
        memory = (
            torch.exp(old - scale)[..., None, None] * memory
            + torch.exp(new - scale)[..., None, None] * own[:, :, index]
        )
    state["memory"], state["stabiliser"] = memory, scale
    return torch.stack(memories, 2), torch.stack(scales, 2)

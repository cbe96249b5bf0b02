"""What a scorer is: small networks, one per bounded layer, that foresee which tokens later queries will attend to.

A :class:`Scorer` holds a :class:`LayerScorer` for every bounded layer, all its KV heads packed in one. It turns cached
pairs (keys after the rotary embedding, values) into a number per token; higher stays. Three steps, each in float32 or
wider whatever the cache is made of:

1. the network's raw output, from inputs standardised per head and dimension;
2. the **score**, the raw output standardised per head, so that one decay means the same in every head;
3. the **priority**, ``score - floor(t / decay_step) * log_gamma``, which ranks the tokens
   (KVpop, arXiv 2607.05061, section 3, as a static priority).

Knows tensors, budgets and the shape of a model; nothing of caches, policies or transformers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from kvkeep.budget import Budget
from kvkeep.kernels.place import Loop
from kvkeep.lifetimes import static_priority
from kvkeep.scorers.layout import LayerShape, Layout
from kvkeep.scorers.linear import full_precision
from kvkeep.slots import pad_front

Pair = tuple[Tensor, Tensor]  # keys, values [B, H, n, D]
State = dict[str, Tensor]  # a scorer's memory in one layer: name -> tensor whose first axis is the batch

DECAY_STEP = 64  # tokens per step of the decay
SHARE = 0.08  # of the slots, what a memory may cost


class ScorerError(ValueError):
    """A scorer cannot be made, read, or used with this model; the message is one sentence."""


class LayerScorer(nn.Module):
    """The scorer of one layer, all KV heads at once. Methods subclass it and fill in :meth:`raw`.

    Args:
        shape: the layer.
        options: what ``Options`` of the subclass holds.
        generator: draws the initial weights.

    Attributes:
        input_mean, input_std: ``[H, inputs]`` of what the network reads; fitted on training data, frozen; 0 and 1
            before.
        score_mean, score_std: ``[H]`` of the raw output; likewise.
        log_gamma: ``[H]``, log of the decay per step in standard deviations of the score, <= 0; 0 = none.
    """

    method: ClassVar[str]  # the policy it serves
    remembers: ClassVar[bool] = False  # whether it reads what enters
    Options: ClassVar[type]  # a frozen dataclass

    def __init__(self, shape: LayerShape, options, generator: torch.Generator):
        super().__init__()
        self.shape, self.options = shape, options
        heads, inputs = shape.kv_heads, self.inputs(shape, options)
        self.register_buffer("input_mean", torch.zeros(heads, inputs))
        self.register_buffer("input_std", torch.ones(heads, inputs))
        self.register_buffer("score_mean", torch.zeros(heads))
        self.register_buffer("score_std", torch.ones(heads))
        self.register_buffer("log_gamma", torch.zeros(heads))

    @classmethod
    def inputs(cls, shape: LayerShape, options) -> int:
        """How many numbers the network reads of a token: by default those of its key and value."""
        return 2 * shape.head_dim

    @classmethod
    def split(cls, slots: int, options) -> Budget:
        """The budget that a number of slots means by default: 4 sinks, a window of 32 (256 from 2,048 slots on).

        Args:
            slots: the hard bound.
            options: an ``Options``.

        Raises:
            ScorerError: naming the numbers, where nothing is left.
        """
        sinks, window = 4, 256 if slots >= 2048 else 32
        if slots <= sinks + window:
            parts = f"sinks {sinks} + window {window} = {sinks + window}"
            raise ScorerError(f"a budget of {slots} slots must be above {parts}")
        return Budget(sinks=sinks, window=window, topk=slots - sinks - window)

    @classmethod
    def parts(cls, options) -> dict[str, int]:
        """Parts of a budget that belong to the scorer, because it was trained with them; none by default."""
        return {}

    @classmethod
    def complete(cls, options, layout: Layout, room: float, window: int):
        """Options with what follows from model and budget filled in.

        Args:
            options: an ``Options``.
            layout: the model.
            room: slots of the smallest budget, the memory included.
            window: of the largest budget.
        """
        return options

    @classmethod
    def state_entries(cls, options, head_dim: int, window: int) -> int:
        """Tokens of a 2-byte cache that the memory of one KV head costs."""
        return 0

    def initial_state(
        self, batch: int, device: torch.device, dtype: torch.dtype = torch.float32, window: int = 0
    ) -> State:
        """The memory before the first token; none for a stateless scorer.

        Args:
            batch, device, dtype: of the tensors; float32, or float64 for a float64 cache.
            window: tokens between the entering and the leaving one.
        """
        return {}

    def start_from(self, other: LayerScorer) -> None:
        """Take over what a trained scorer of another method knows, so that training only has the rest to learn.

        Raises:
            ScorerError: where nothing can be taken over.
        """
        raise ScorerError(f"a {self.method} scorer cannot start from a {other.method} scorer")

    def raw(self, entering: Tensor | None, leaving: Tensor, state: State) -> Tensor:
        """The network: inputs ``[B, H, n, 2D]``, standardised -> ``[B, H, n]``, replacing the tensors of ``state``.

        ``entering`` is None where the scorer does not remember.
        """
        raise NotImplementedError

    def loop(self, decay: Tensor, decay_step: int, dtype: torch.dtype) -> Loop | None:
        """A step of its policy on the CPU as one compiled loop, with the weights as they are now; None where there is
        none.

        Args:
            decay: ``[H]``, log of the decay per ``decay_step`` tokens.
            dtype: of priorities and state.
        """
        return None

    def packed(self, dtype: torch.dtype, *weights: Tensor) -> np.ndarray:
        """``[H, total]``: what inputs are standardised by, then ``weights``, each ``[H, ...]``; a copy."""
        parts = [tensor.detach().to(dtype).reshape(self.shape.kv_heads, -1) for tensor in weights]
        return torch.cat([self.input_mean.to(dtype), self.input_std.to(dtype), *parts], 1).numpy()

    def score(self, entering: Pair, leaving: Pair, state: State) -> Tensor:
        """Scores of the leaving tokens at n steps.

        Args:
            entering: keys and values ``[B, H, n, D]`` of the tokens that enter at these steps.
            leaving: those of the tokens that leave the window at the same steps.
            state: memory, whose tensors are replaced.

        Returns:
            ``[B, H, n]``, in float32 or the dtype of the pairs or parameters, whichever is wider.
        """
        with full_precision(leaving[0].device):
            entered = self.standardised(entering) if self.remembers else None
            raw = self.raw(entered, self.standardised(leaving), state)
            return (raw - self.score_mean.to(raw.dtype)[:, None]) / self.score_std.to(raw.dtype)[:, None]

    def standardised(self, pair: Pair) -> Tensor:
        """Keys and values ``[B, H, n, D]`` -> inputs ``[B, H, n, 2D]`` of mean 0 and deviation 1."""
        wide = torch.promote_types(pair[0].dtype, self.input_mean.dtype)
        wide = torch.promote_types(wide, torch.float32)
        inputs = torch.cat(pair, -1).to(wide)
        return (inputs - self.input_mean.to(wide)[:, None]) / self.input_std.to(wide)[:, None]

    def priority(self, score: Tensor, positions: Tensor, decay_step: int, factor: float = 1.0) -> Tensor:
        """Scores ``[B, H, n]`` of tokens at ``positions`` ``[B, n]`` -> static priorities ``[B, H, n]``.

        ``factor`` multiplies the decay, see :meth:`Scorer.decay_factor`.
        """
        return static_priority(score, self.log_gamma * factor, decay_step, positions=positions[:, None])

    @torch.no_grad()
    def standardise_inputs(self, mean: Tensor, std: Tensor) -> None:
        """Freeze the statistics ``[H, inputs]`` of the training data; a constant dimension counts as deviation 1."""
        self.input_mean.copy_(mean)
        self.input_std.copy_(torch.where(std > 0, std, torch.ones_like(std)))

    @torch.no_grad()
    def standardise_scores(self, mean: Tensor, std: Tensor) -> None:
        """Freeze mean and deviation ``[H]`` of the raw output on the training data."""
        self.score_mean.copy_(mean)
        self.score_std.copy_(torch.where(std > 0, std, torch.ones_like(std)))


class Scorer(nn.Module):
    """A trained scorer, or one to train: made by :func:`kvkeep.scorers.new` or :func:`kvkeep.load_scorer`.

    Args:
        kind: the method's :class:`LayerScorer`.
        layout: the model it belongs to.
        options: the method's ``Options``, complete.
        budgets: those it is trained for.
        state_entries: what its memory is charged as, in tokens; None computes it.
        decay_step: tokens per step of the decay.
        seed: of the initial weights.

    Attributes:
        method: name of the policy it serves.
        options: JSON-friendly.
        decay_factors: tokens held after an eviction -> what the decays are multiplied by there; empty = 1 everywhere.
        metadata: whatever :meth:`save_pretrained` is to record beside; filled by loading.
    """

    def __init__(
        self,
        kind: type[LayerScorer],
        layout: Layout,
        options,
        budgets: Sequence[Budget],
        state_entries: int | None = None,
        decay_step: int = DECAY_STEP,
        seed: int = 0,
    ):
        super().__init__()
        if decay_step < 1:
            raise ScorerError(f"decay_step must be at least 1 token, not {decay_step}")
        self.method, self.layout, self.budgets, self.decay_step = kind.method, layout, tuple(budgets), decay_step
        self.options: dict[str, Any] = json.loads(json.dumps(asdict(options)))
        window = max(budget.window for budget in self.budgets)
        needed = [kind.state_entries(options, shape.head_dim, window) for shape in layout.bounded]
        self.state_entries = max(needed) if state_entries is None else state_entries
        self.metadata: dict[str, Any] = {}
        self.decay_factors: dict[int, float] = {}
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleDict({str(shape.index): kind(shape, options, generator) for shape in layout.bounded})

    @property
    def geometry(self) -> tuple[LayerShape, ...]:
        """The bounded layers: index, KV heads, query heads, head size."""
        return self.layout.bounded

    @property
    def parts(self) -> dict[str, int]:
        """Parts of a budget that follow from the scorer, as :func:`kvkeep.policies.budget` takes them."""
        layer = self.layer(self.geometry[0].index)
        return {"state_entries": self.state_entries} | layer.parts(layer.options)

    def parts_at(self, tokens: int, at_rest: bool = False) -> dict[str, int]:
        """The same for a number of slots, with the interval of a budget of as many that it was trained for.

        Args:
            tokens: slots, or with ``at_rest`` the tokens held after an eviction.
        """
        trained = [one.interval for one in self.budgets if (one.rest if at_rest else one.slots) == tokens]
        return self.parts | ({"interval": trained[0]} if any(trained[:1]) else {})

    @property
    def stateful(self) -> bool:
        """Whether a score depends on the tokens before it, so that sequences have to be read whole."""
        return any(layer.initial_state(1, layer.log_gamma.device) for layer in self.layers.values())

    def layer(self, index: int) -> LayerScorer:
        """The scorer of the model's layer ``index``.

        Raises:
            ScorerError: for a layer that is not bounded.
        """
        if str(index) not in self.layers:
            raise ScorerError(f"this scorer has nothing for layer {index}, only for layers {', '.join(self.layers)}")
        return self.layers[str(index)]

    def initial_state(
        self, layer: int, batch: int, device: torch.device, dtype: torch.dtype = torch.float32, window: int = 0
    ) -> State:
        """The memory of a layer before the first token; see :meth:`LayerScorer.initial_state`."""
        return self.layer(layer).initial_state(batch, device, dtype, window)

    def score(self, layer: int, entering: Pair, leaving: Pair, state: State) -> Tensor:
        """Scores ``[B, H, n]`` of the tokens that leave; see :meth:`LayerScorer.score`."""
        return self.layer(layer).score(entering, leaving, state)

    def priority(self, layer: int, score: Tensor, positions: Tensor, rest: int | None = None) -> Tensor:
        """Static priorities ``[B, H, n]`` of tokens at ``positions`` ``[B, n]``, the decay included.

        ``rest`` is the number of tokens that the budget holds; None takes the decays as they are.
        """
        factor = 1.0 if rest is None else self.decay_factor(rest)
        return self.layer(layer).priority(score, positions, self.decay_step, factor)

    def decay_factor(self, rest: int) -> float:
        """What the decays are multiplied by where ``rest`` tokens are held.

        A larger cache holds a token for longer, and heads forget old tokens more slowly than new ones. So it is factor
        times tokens that is carried from the calibrated budgets to others: on a line over log(rest) between two of
        them, unchanged outside.
        """
        if not self.decay_factors:
            return 1.0
        known = sorted(self.decay_factors)
        products = [self.decay_factors[tokens] * tokens for tokens in known]
        above = next((i for i, tokens in enumerate(known) if tokens >= rest), len(known))
        if above in (0, len(known)):
            return products[min(above, len(known) - 1)] / rest
        low, high = known[above - 1 : above + 1]
        share = math.log(rest / low) / math.log(high / low)
        return (products[above - 1] * (1 - share) + products[above] * share) / rest

    def forward(self, layer: int, keys: Tensor, values: Tensor, window: int) -> Tensor:
        """Scores of all tokens of whole sequences, for training; the pairs' graph is cut, the scorer's is not.

        Args:
            layer: index in the model.
            keys, values: ``[B, H, S, D]`` from the first token on, rotated, without pads.
            window: of the budget.

        Returns:
            ``[B, H, S]``; 0 for the newest ``window`` tokens, which have not left and are never eligible.
        """
        keys, values = keys.detach(), values.detach()
        length = keys.shape[2]
        ahead = min(window, length)
        leaving = tuple(pad_front(pair[:, :, : length - ahead], ahead) for pair in (keys, values))
        wide = torch.promote_types(keys.dtype, torch.float32)
        state = self.initial_state(layer, keys.shape[0], keys.device, wide, window)
        scores = self.score(layer, (keys, values), leaving, state)
        return torch.cat([scores[..., ahead:], scores.new_zeros(*scores.shape[:2], ahead)], -1)

    @torch.no_grad()
    def set_decay(self, log_gamma: float | Tensor | Mapping[int, Any], decay_step: int | None = None) -> None:
        """Set the decay of all layers, or of those in a mapping ``{layer: log_gamma}``, the same for all budgets.

        Args:
            log_gamma: log of the decay per step, in standard deviations of the score: a number or ``[H]``, <= 0.
            decay_step: tokens per step; None leaves it.

        Raises:
            ScorerError: for a decay above 0 or not finite, or a step below 1.
        """
        if decay_step is not None and decay_step < 1:
            raise ScorerError(f"decay_step must be at least 1 token, not {decay_step}")
        given = log_gamma if isinstance(log_gamma, Mapping) else {shape.index: log_gamma for shape in self.geometry}
        for index, value in given.items():
            value = torch.as_tensor(value, dtype=torch.float32)
            if not bool((torch.isfinite(value) & (value <= 0)).all()):
                raise ScorerError(f"log_gamma must be finite and at most 0, not {value.tolist()} in layer {index}")
            self.layer(index).log_gamma.copy_(value)
        self.decay_factors = {}
        self.decay_step = self.decay_step if decay_step is None else decay_step

    def fingerprint(self) -> str:
        """16 hexadecimal digits over everything that decides a priority: options, layout, decay and all tensors."""
        record = [self.method, self.options, self.layout.to_json(), self.decay_step]
        record += [self.decay_factors] if self.decay_factors else []
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode() + tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def require_fits(self, config, fingerprint: str | None = None) -> None:
        """Refuse a model this scorer was not made for.

        Args:
            config: the model's config.
            fingerprint: of its weights, from :func:`kvkeep.scorers.model_fingerprint`; None does not compare them.

        Raises:
            ScorerError: naming the two values that differ: layers, full-attention layers, heads, head size, rotary
                embedding, or fingerprint.
        """
        difference = self.layout.mismatch(Layout.of(config))
        made_for = self.metadata.get("base_fingerprint")
        if difference is None and fingerprint is not None and made_for is not None and fingerprint != made_for:
            difference = f"trained on weights with fingerprint {made_for}, the model has {fingerprint}"
        if difference is not None:
            raise ScorerError(f"this {self.method} scorer does not fit the model: {difference}")

    def save_pretrained(self, path: str | Path, half: bool = False, **metadata: Any) -> Path:
        """Write scorer and model card into a folder; see :func:`kvkeep.scorers.checkpoint.save`."""
        from kvkeep.scorers import checkpoint  # here: it builds on this file

        return checkpoint.save(self, path, half, metadata)

    def push_to_hub(self, repo_id: str, token: str | None = None, private: bool = False) -> str:
        """Upload to the Hugging Face hub; see :func:`kvkeep.scorers.checkpoint.push`."""
        from kvkeep.scorers import checkpoint  # here: it builds on this file

        return checkpoint.push(self, repo_id, token, private)

    def extra_repr(self) -> str:
        return f"method={self.method}, options={self.options}, budgets={list(self.budgets)}"

"""What this process serves: the policy that vLLM's configuration asks for, its layers, and what they have done.

vLLM builds a model's layers under its configuration, plans their caches and runs them; :class:`Served` is made with the
first of these and found by the others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from kvkeep.policies.base import Geometry, Policy
from kvkeep.runtime.geometry import rotary, text_config
from kvkeep.scorers import LayerShape, Layout
from kvkeep.serving.entry import EntryLayer, entry_state
from kvkeep.serving.interval import IntervalLayer, interval_state, watches
from kvkeep.serving.pages import Pages, State
from kvkeep.serving.settings import KEY, MISTAKE, Attention, Engine, Settings
from kvkeep.serving.shards import Shard

logger = init_logger(f"vllm.{__name__}")  # vLLM prints the loggers below its own

_lock = threading.Lock()
_latest: tuple[VllmConfig, Served | None] | None = None


class Refused(ValueError):
    """The engine cannot run as it was started; the message is one sentence."""

    def __init__(self, reason: object):
        super().__init__(f"{MISTAKE} {reason}")


def served(config: VllmConfig | None = None) -> Served | None:
    """What is served under ``config``, vLLM's current one by default; None where it does not mention kvkeep.

    Raises:
        Refused: for settings that cannot work.
    """
    global _latest
    config = config or get_current_vllm_config()
    with _lock:
        if _latest is None or _latest[0] is not config:
            record = (config.additional_config or {}).get(KEY) if isinstance(config.additional_config, dict) else None
            try:
                with plainly():
                    _latest = (config, None if record is None else Served.of(Settings.of(record), config))
            except ValueError as error:
                raise Refused(error) from error
        return _latest[1]


@contextmanager
def plainly() -> Iterator[None]:
    """Scorers are in float32 on the CPU until a layer moves its own, whatever vLLM builds a model in."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def latest() -> Served | None:
    """What the model built last in this process is served with: for callers that vLLM gives no configuration."""
    return None if _latest is None else _latest[1]


@dataclass
class Done:
    """Counts of what one layer's rank has done; every layer and head does as many.

    Attributes:
        tokens: taken in.
        evicted: tokens that are gone from every KV head, each counted once.
        holding: tokens held at the end of the latest step, by its requests together.
        requests: of the latest step.
    """

    tokens: int = 0
    evicted: int = 0
    holding: int = 0
    requests: int = 0


@dataclass
class Served:
    """A policy at work in this process.

    Attributes:
        settings: what was asked for.
        policy: made for the heads of this device.
        model: the config of the decoder.
        shapes: what this device holds of every layer, by index in the model.
        first_heads: index of the first of those KV heads in the model, likewise.
        layers: those that have run, by name.
        built: how many layers were built for it.
        first: the one that counts what is done.
        done: what they have done.
    """

    settings: Settings
    policy: Policy
    model: object
    shapes: dict[int, LayerShape]
    first_heads: dict[int, int]
    layers: dict[str, EntryLayer | IntervalLayer] = field(default_factory=dict)
    built: int = 0
    first: str | None = None
    done: Done = field(default_factory=Done)

    @classmethod
    def of(cls, settings: Settings, config: VllmConfig) -> Served:
        """Made of vLLM's configuration.

        Raises:
            ValueError: for what cannot work.
        """
        engine(config).require_possible()
        model = text_config(config.model_config.hf_config)
        layout = Layout.of(model)
        if len(layout.bounded) < layout.layers:
            raise ValueError(
                f"only {len(layout.bounded)} of {layout.layers} layers have full attention: such models are run by "
                "kvkeep under transformers, not yet under vLLM"
            )
        scorer = settings.scorer_for(model, config.model_config.model)
        whole = settings.make(scorer)
        whole.require_fits(model)
        budget, longest = whole.budget, config.model_config.max_model_len
        if longest < budget.slots + 2:  # the last token of a sequence never enters its cache
            raise ValueError(
                f"a budget of {budget.slots} tokens is never exceeded by sequences of at most {longest} "
                "(--max-model-len): nothing would be evicted"
            )
        size = config.parallel_config.tensor_parallel_size
        shard = Shard(get_tensor_model_parallel_rank() if size > 1 else 0, size)
        shard.require_serves(whole, layout)
        policy = whole if scorer is None else settings.make(shard.scorer(scorer))
        logger.info("kvkeep: %s at %s tokens per KV head: %s", settings.policy, budget.slots, budget)
        return cls(
            settings,
            policy,
            model,
            shapes={shape.index: shard.shape(shape) for shape in layout.bounded},
            first_heads={shape.index: shard.first_head(shape) for shape in layout.bounded},
        )

    def take(self, attention: Attention) -> None:
        """A layer was built.

        Raises:
            Refused: where it does not attend plainly.
        """
        try:
            attention.require_plain()
        except ValueError as error:
            raise Refused(error) from error
        self.built += 1

    @property
    def attends(self) -> bool:
        """Whether steps attend here and not in the engine's kernel."""
        return self.policy.kind == "attention" and watches(self.policy)

    @property
    def scores_ahead(self) -> bool:
        """Whether tokens may be scored before they leave the window."""
        return self.policy.kind == "entry" and self.policy.judges_alone

    def count(self, plan) -> None:
        """Note what a layer did in a step; every layer does as much."""
        rows = 0 if plan.rows is None else len(plan.rows.seen)
        self.done.tokens += rows + sum(piece.stop - piece.start for piece in plan.pieces)
        self.done.evicted += plan.evicted
        self.done.holding, self.done.requests = plan.holding, rows + len(plan.pieces)

    def geometry(self, index: int, scaling: float) -> Geometry:
        """Of the layer ``index`` of the model."""
        shape = self.shapes[index]
        return Geometry(
            layer=index,
            kv_heads=shape.kv_heads,
            group=shape.query_heads // shape.kv_heads,
            head_dim=shape.head_dim,
            scaling=scaling,
            rotary=rotary(self.model, index, shape.head_dim) if self.policy.needs_rotary else None,
            first_head=self.first_heads[index],
        )

    def state(self, dtype: torch.dtype) -> State:
        """What the policy keeps of a request in one layer; every layer keeps as much."""
        kind = entry_state if self.policy.kind == "entry" else interval_state
        return kind(self.policy, self.geometry(min(self.shapes), 1.0), dtype)

    def layer(self, name: str, geometry: Geometry, pages: Pages) -> EntryLayer | IntervalLayer:
        """The layer at work over its pages."""
        self.first = self.first or name
        kind = EntryLayer if self.policy.kind == "entry" else IntervalLayer
        self.layers[name] = kind(self.policy, geometry, pages)
        return self.layers[name]


def engine(config: VllmConfig) -> Engine:
    """What vLLM is about to do, in our words."""
    parallel = config.parallel_config
    return Engine(
        prefix_caching=bool(config.cache_config.enable_prefix_caching),
        speculative=None if config.speculative_config is None else str(config.speculative_config.method),
        cache_dtype=str(config.cache_config.cache_dtype),
        context_parallel=max(
            parallel.decode_context_parallel_size, getattr(parallel, "prefill_context_parallel_size", 1)
        ),
        microbatches=bool(getattr(parallel, "enable_dbo", False)),
        connector=None if config.kv_transfer_config is None else str(config.kv_transfer_config.kv_connector),
    )

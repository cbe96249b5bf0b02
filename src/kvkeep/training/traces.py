"""What an oracle has to say of a trace, eviction by eviction: harvested once, kept on disk (ForesightKV, section 3.3).

Neither labels nor features depend on the scorer that is fitted to them: one dense forward for the labels and one along
the evictions serve all epochs. The paper follows the oracle's own evictions, where what is old is there because it will
be needed; under a rule's evictions, or a scorer's (DAgger), the oracle labels states like those that a scorer reaches.

A shard holds keys and values once and, for every eviction, which tokens could go, the raw sums of attention that they
had received, and their future attention alpha; features are built from it when they are read, so that scorers with
different features share shards.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep import policies
from kvkeep.budget import Budget
from kvkeep.policies.base import AttentionPolicy, Geometry, Held, Memory, Observation, Rotary, Statistic
from kvkeep.policies.foresightkv import ForesightKV, Watching
from kvkeep.policies.golden import Golden
from kvkeep.runtime.replay import hidden_states
from kvkeep.scorers import Scorer, model_fingerprint
from kvkeep.scorers.features import FeatureSpec
from kvkeep.slots import gather_slots
from kvkeep.training.harvest import STORAGE, digest, readable
from kvkeep.training.loop import Progress

SPACING = "float16"  # of keys, values and sums on disk
ACTOR = "actor."  # what its statistics are called beside those of the features


def collected(spec: FeatureSpec) -> FeatureSpec:
    """The features whose sums a shard holds: all those of ``spec``, and the usual ones, so that others may share it."""
    usual = (8, 16, 32, "L")
    windows = (*usual, *(width for width in spec.windows if width not in usual))
    decay = 0.9 if spec.decay is None else spec.decay
    return FeatureSpec(extremes=True, windows=windows, cumulative=True, decay=decay)


class Tracing(Watching, Golden):
    """Golden eviction, or another policy's, that writes down what it sees; see :func:`harvest`.

    Args:
        budget: as the scorer's.
        spec: whose sums are kept.
        actor: decides instead of the oracle; what its own budget protects stays, even if it is labelled.
        head_reduce: of golden's labels.
    """

    def __init__(
        self, budget: Budget, spec: FeatureSpec, actor: AttentionPolicy | None = None, head_reduce: str = "mean"
    ):
        super().__init__(budget, head_reduce=head_reduce)
        self._features, self._actor = spec, actor
        self._seen: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}  # layer -> (tokens, sums, alpha) by eviction

    @property
    def needs_rotary(self) -> bool:
        return self._actor is not None and self._actor.needs_rotary

    @property
    def recent_queries(self) -> int:
        return 0 if self._actor is None else self._actor.recent_queries

    def foresee(self, geometry: Geometry, query: Tensor, key: Tensor) -> Memory:
        memory = super().foresee(geometry, query, key)
        if self._actor is not None:
            memory |= self._actor.new_memory(geometry, key.shape[0], key.device, key.dtype)
        return memory

    def slot_statistics(self, geometry: Geometry) -> dict[str, Statistic]:
        others = {} if self._actor is None else self._actor.slot_statistics(geometry)
        return super().slot_statistics(geometry) | {ACTOR + name: kept for name, kept in others.items()}

    def end_interval(self, statistics: dict[str, Tensor]) -> None:
        own, others = parted(statistics)
        super().end_interval(own)
        if self._actor is not None:
            self._actor.end_interval(others)

    def begin_interval(self, statistics: dict[str, Tensor]) -> None:
        own, others = parted(statistics)
        super().begin_interval(own)
        if self._actor is not None:
            self._actor.begin_interval(others)

    def observe(self, seen: Observation) -> None:
        own, others = parted(seen.statistics)
        super().observe(replace(seen, statistics=own))
        if self._actor is not None:
            self._actor.observe(replace(seen, statistics=others))

    def keep_scores(self, held: Held) -> Tensor:
        own, others = parted(held.statistics)
        alpha = super().keep_scores(held)
        count = int(held.candidates[0, 0].sum())
        oldest = held.positions.masked_fill(~held.candidates, torch.iinfo(held.positions.dtype).max)
        order = oldest.argsort(-1)[..., :count]  # the candidates, in order of position
        sums = stacked(self._features, own)
        parts = tuple(gather_slots(tensor, order) for tensor in (held.positions, sums, alpha))
        self._seen.setdefault(held.geometry.layer, []).append(parts)
        if self._actor is None:
            return alpha
        scores = self._actor.keep_scores(replace(held, statistics=others))
        mine = self._actor.budget
        protected = (held.positions < mine.sinks) | (held.positions >= held.query_index - mine.window)
        return torch.where(protected, scores.amax(-1, keepdim=True) + 1, scores)

    def tensors(self) -> dict[str, Tensor]:
        """Of the one row replayed: ``tokens.L`` ``[M, H, C]``, ``sums.L`` ``[M, H, C, K]`` and ``alpha.L``."""
        found = {}
        for layer, evictions in self._seen.items():
            tokens, sums, alpha = (torch.cat(parts) for parts in zip(*evictions, strict=True))
            found |= {f"tokens.{layer}": tokens.int(), f"sums.{layer}": sums, f"alpha.{layer}": alpha.float()}
        return found


def parted(statistics: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Those of the features and those of the actor, under the names that each has for them."""
    others = {name.removeprefix(ACTOR): kept for name, kept in statistics.items() if name.startswith(ACTOR)}
    return {name: kept for name, kept in statistics.items() if not name.startswith(ACTOR)}, others


def stacked(spec: FeatureSpec, kept: dict[str, Tensor]) -> Tensor:
    """Accumulators ``[B, H, N, G]`` and ``[B, H, N]`` by name -> ``[B, H, N, K]``, in the order of their names."""
    group = next(iter(kept.values())).shape[-1]
    return torch.cat([kept[name].reshape(*kept[name].shape[:3], -1) for name in spec.accumulators(group)], -1)


def unstacked(spec: FeatureSpec, sums: Tensor, group: int) -> dict[str, Tensor]:
    """The inverse of :func:`stacked`."""
    found, first = {}, 0
    for name, (shape, _) in spec.accumulators(group).items():
        size = group if shape else 1
        part = sums[..., first : first + size]
        found[name] = part if shape else part[..., 0]
        first += size
    return found


@dataclass(frozen=True)
class Trace:
    """One document's evictions at one budget, on disk; tensors are read when asked for.

    Attributes:
        name: of the document.
        path: safetensors with ``key.L``, ``value.L`` ``[H, S, D]`` and what :meth:`Tracing.tensors` says.
        budget: under which it was read.
        spec: whose sums it holds.
    """

    name: str
    path: Path
    budget: Budget
    spec: FeatureSpec

    @functools.cached_property
    def evictions(self) -> int:
        """How many there are in every head."""
        names = self._file.keys()
        return self._file.get_slice(next(name for name in names if name.startswith("alpha."))).get_shape()[0]

    def features(
        self, layer: int, group: int, spec: FeatureSpec, evictions: Tensor, rotary: Rotary | None = None
    ) -> Tensor:
        """Features ``[m, H, C, width]`` of the candidates at some evictions (int64 ``[m]``), not standardised."""
        tokens = self._read(f"tokens.{layer}")[evictions]  # [m, H, C]
        kept = unstacked(self.spec, self._read(f"sums.{layer}")[evictions].float(), group)
        keys, values = (
            gather_slots(self._read(f"{part}.{layer}").expand(len(evictions), -1, -1, -1), tokens).float()
            for part in ("key", "value")
        )
        if spec.kv and spec.keys == "pre" and rotary is not None:
            keys = rotary.unrotate(keys, tokens)
        interval = self.budget.interval
        queries = self.budget.rest + (evictions + 1) * interval  # the t-th eviction, t >= 1, is at rest + t L
        return spec.build(keys, values, kept, tokens, queries[:, None, None], interval)

    def alpha(self, layer: int, evictions: Tensor) -> Tensor:
        """Future attention ``[m, H, C]`` of the candidates."""
        return self._read(f"alpha.{layer}")[evictions]

    @functools.cached_property
    def _file(self):
        return safe_open(self.path, framework="pt")

    def _read(self, name: str) -> Tensor:
        return self._file.get_tensor(name)


def harvest(
    model: PreTrainedModel,
    documents: Sequence[tuple[object, Tensor]],
    budgets: Sequence[Budget],
    folder: str | Path,
    spec: FeatureSpec,
    follow: Scorer | str = "golden",
    head_reduce: str = "mean",
    storage: str = SPACING,
    progress: Progress | None = None,
) -> list[Trace]:
    """Traces of documents at budgets; those that exist already are left as they are, damaged ones are read again.

    Args:
        model: the frozen backbone.
        documents: pairs of a document (``.name``) and its ids ``[S]``, longer than every budget's slots.
        budgets: with an interval.
        folder: where shards live; created.
        spec: features that will be read; more are kept, see :func:`collected`.
        follow: whose evictions the traces follow: "golden", another attention policy that needs no scorer, or a
            ForesightKV scorer, by its lowest scores.
        head_reduce: alpha is the "mean" of the query heads of a group, as in the paper, or their "max".
        storage: of keys, values and sums: "float16", "bfloat16" or "float32".
        progress: called with (stage, done, total).

    Returns:
        One trace per document and budget, document after document.

    Raises:
        ValueError: for an unknown storage, policy or reduction, or keys and values that do not fit it.
    """
    if storage not in STORAGE:
        raise ValueError(f"storage is one of {', '.join(STORAGE)}, not {storage!r}")
    folder, kept = Path(folder), collected(spec)
    folder.mkdir(parents=True, exist_ok=True)
    require_followed(follow)
    followed = follow if isinstance(follow, str) else follow.fingerprint()
    settings = [model_fingerprint(model), kept.to_json(), storage, followed, head_reduce]
    wanted = [(document, ids, budget) for document, ids in documents for budget in budgets]
    traces = []
    for done, (document, ids, budget) in enumerate(wanted):
        if progress is not None:
            progress("harvest", done, len(wanted))
        name = f"trace-{digest([*settings, json.dumps(vars(budget))], ids)}.safetensors"
        trace = Trace(document.name, folder / name, budget, kept)
        if not readable(trace.path):
            policy = Tracing(budget, kept, acting(budget, follow), head_reduce)
            _write(trace, _read(model, ids, policy, STORAGE[storage]))
        traces.append(trace)
    if progress is not None:
        progress("harvest", len(wanted), len(wanted))
    return traces


def require_followed(follow: Scorer | str) -> None:
    """Raise ValueError for the name of a policy whose evictions a trace cannot follow."""
    rules = [name for name in policies.names() if _is_rule(name)]
    if isinstance(follow, str) and follow not in ("golden", *rules):
        raise ValueError(
            f"a trace follows golden, or one of {', '.join(rules)}, not {follow!r}; stage dagger follows a scorer"
        )


def _is_rule(name: str) -> bool:
    policy = policies.describe(name)
    return policy.kind == "attention" and not policy.oracle and not policy.learned


def acting(budget: Budget, follow: Scorer | str) -> AttentionPolicy | None:
    """Who decides in a trace; None = the oracle itself.

    A rule has its usual sinks and window, or the window of the budget where that leaves nothing to choose from.
    """
    if follow == "golden":
        return None
    if not isinstance(follow, str):
        return ForesightKV(budget, follow)
    try:
        split = policies.budget(follow, budget.slots, interval=budget.interval)
    except ValueError:
        split = policies.budget(follow, budget.slots, sinks=0, window=budget.window, interval=budget.interval)
    return policies.create(follow, split)


def _read(model: PreTrainedModel, ids: Tensor, policy: Tracing, storage: torch.dtype) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}

    def observe(geometry: Geometry, query: Tensor, key: Tensor, value: Tensor, evicted_at: Tensor) -> None:
        tensors[f"key.{geometry.layer}"], tensors[f"value.{geometry.layer}"] = key[0], value[0]

    hidden_states(model, ids.reshape(1, -1).to(model.device), policy, observe=observe)  # no logits are needed
    tensors |= policy.tensors()
    for name, tensor in tensors.items():
        if name.startswith(("key.", "value.", "sums.")):
            finite = tensor.where(tensor.isfinite(), 0.0)  # the least attention of a token that nobody has seen
            if not bool(torch.isfinite(finite.to(storage)).all()):
                part, layer = name.split(".")
                raise ValueError(f"{part} of layer {layer} does not fit {storage}: store float32")
            tensors[name] = tensor.to(storage)
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _write(trace: Trace, tensors: dict[str, Tensor]) -> None:
    beside = trace.path.with_suffix(".tmp")
    save_file(tensors, beside)
    beside.rename(trace.path)

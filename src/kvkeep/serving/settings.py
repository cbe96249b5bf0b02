"""What an engine is told of kvkeep: one JSON record, made a policy, and everything that cannot work refused.

The record is ``{"policy": ..., "budget": ..., "sinks", "window", "interval", "budget_at_rest", "scorer", "seed"}``, the
flags of the command line. Knows policies and scorers; nothing of engines.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from kvkeep import policies
from kvkeep.evaluation.contenders import Contender
from kvkeep.policies.base import Policy
from kvkeep.scorers import Scorer, load_scorer, model_fingerprint
from kvkeep.scorers.shipped import shipped

KEY = "kvkeep"  # where the record stands in an engine's additional configuration
MISTAKE = "kvkeep refuses:"  # what an engine's log says before a sentence for the user
EXTENSION = "kvkeep.serving.vllm.report.Reporting"  # what vLLM mixes into its workers so that they tell of evictions


@dataclass(frozen=True)
class Settings:
    """The record, checked.

    Attributes:
        policy: a registered one that can generate.
        budget: tokens per KV head.
        sinks, window, interval: parts of the budget; None = the policy's defaults.
        budget_at_rest: whether the budget counts tokens after an eviction.
        scorer: folder or name; None = the one shipped for the model.
        seed: of a policy that draws.
    """

    policy: str
    budget: int
    sinks: int | None = None
    window: int | None = None
    interval: int | None = None
    budget_at_rest: bool = False
    scorer: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        method = policies.describe(self.policy)
        if method.oracle:
            raise ValueError(f"policy {self.policy!r} is an oracle: it reads the future and cannot serve")
        if method.kind == "full":
            raise ValueError(f"policy {self.policy!r} evicts nothing: start the server without kvkeep")
        for name in ("budget", "sinks", "window", "interval", "seed"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{name} must be an integer, not {value!r}")

    @classmethod
    def of(cls, record: Any) -> Settings:
        """Settings from the record.

        Raises:
            ValueError: for anything but a record with a policy and a budget, an unknown field, or a bad value.
        """
        if not isinstance(record, Mapping):
            raise ValueError(f"the settings of {KEY} are a record with policy and budget, not {record!r}")
        unknown = set(record) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"the settings of {KEY} have no {', '.join(sorted(unknown))}")
        missing = {"policy", "budget"} - set(record)
        if missing:
            raise ValueError(f"the settings of {KEY} need {' and '.join(sorted(missing))}")
        return cls(**record)

    def to_json(self) -> dict[str, Any]:
        """The record without what is not given."""
        return {name: value for name, value in asdict(self).items() if value not in (None, False)}

    def contender(self, scorer: Scorer | None = None) -> Contender:
        """The policy with everything but a number of tokens."""
        overrides = {"sinks": self.sinks, "window": self.window, "interval": self.interval}
        takes_seed = "seed" in inspect.signature(policies.describe(self.policy).__init__).parameters
        options = {"seed": self.seed} if takes_seed else {}
        return Contender(self.policy, options=options, overrides=overrides, at_rest=self.budget_at_rest, scorer=scorer)

    def scorer_for(self, config, folder: str | Path | None = None) -> Scorer | None:
        """The scorer of a learned policy, None for a rule.

        Args:
            config: of the model.
            folder: with its weights, which are compared too; None, or anything but a folder with safetensors,
                compares the shape alone.

        Raises:
            ValueError: where none is given nor shipped, or the one given was made for another model.
        """
        if not policies.describe(self.policy).learned:
            if self.scorer is not None:
                raise ValueError(f"policy {self.policy!r} is a rule and takes no scorer")
            return None
        fingerprint = None if folder is None else checkpoint_fingerprint(folder)
        if self.scorer is None:
            scorer = shipped(self.policy, config, fingerprint)
            if scorer is None:
                raise ValueError(f"no {self.policy} scorer is shipped for this model: train one and give its folder")
            return scorer
        scorer = load_scorer(self.scorer)
        scorer.require_fits(config, fingerprint)
        return scorer

    def make(self, scorer: Scorer | None) -> Policy:
        """The policy at the budget."""
        return self.contender(scorer).policy(self.budget)


def checkpoint_fingerprint(folder: str | Path) -> str | None:
    """The fingerprint of the weights in a local folder; None where it has no safetensors.

    It is that of :func:`kvkeep.scorers.model_fingerprint`, taken of the files, before an engine fuses its weights.
    """
    files = sorted(Path(folder).glob("*.safetensors")) if Path(folder).is_dir() else []
    return model_fingerprint(_Weights(files)) if files else None


class _Weights(Mapping):
    """The tensors of safetensors files, of which one is in memory at a time."""

    def __init__(self, files: list[Path]):
        self.places = {}
        for file in files:
            with safe_open(file, "pt") as weights:
                self.places.update(dict.fromkeys(weights.keys(), file))

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.places[name], "pt") as weights:
            return weights.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def block_slots(slots: int, multiple: int) -> int:
    """Slots of a block that holds a budget, rounded up to what an engine's kernel needs; the surplus stays empty.

    Example:
        >>> block_slots(300, 32)
        320
    """
    return -(-slots // multiple) * multiple


@dataclass(frozen=True)
class Engine:
    """What an engine is about to do, as far as it can clash with a cache that forgets.

    Attributes:
        prefix_caching: shares blocks between requests.
        speculative: the method of speculative decoding; None = off.
        cache_dtype: of the pairs, "auto" for the model's own.
        context_parallel: devices that share the tokens of a sequence.
        microbatches: splits a step in two that overlap.
        connector: moves blocks to other engines or memories; None = none.
    """

    prefix_caching: bool = False
    speculative: str | None = None
    cache_dtype: str = "auto"
    context_parallel: int = 1
    microbatches: bool = False
    connector: str | None = None

    def require_possible(self) -> None:
        """Raise ValueError with one sentence for the first thing that cannot work."""
        if self.prefix_caching:
            raise ValueError(
                "prefix caching shares blocks whose tokens kvkeep evicts: start with --no-enable-prefix-caching"
            )
        if self.speculative is not None:
            raise ValueError(
                f"speculative decoding ({self.speculative}) takes tokens back, and an evicting cache cannot be "
                "rewound: start without it"
            )
        if self.cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
            raise ValueError(
                f"kvkeep moves pairs as they are, not quantised: kv-cache-dtype auto, not {self.cache_dtype}"
            )
        if self.context_parallel > 1:
            raise ValueError(
                f"context parallelism over {self.context_parallel} devices splits a sequence's tokens, and a budget is "
                "per sequence: use tensor or data parallelism"
            )
        if self.microbatches:
            raise ValueError("overlapping microbatches are not supported by kvkeep: start without them")
        if self.connector is not None:
            raise ValueError(
                f"the KV connector {self.connector} would move pairs without what kvkeep knows of them: start without "
                "it"
            )


@dataclass(frozen=True)
class Attention:
    """How a layer attends, as far as kvkeep must do it too.

    Attributes:
        layer: its name.
        sliding_window: its own window; None = full attention.
        softcap, sinks, alibi: what changes its softmax.
        decoder: False for encoder or cross attention.
        shares: the layer whose cache it reads; None = its own.
    """

    layer: str
    sliding_window: int | None = None
    softcap: bool = False
    sinks: bool = False
    alibi: bool = False
    decoder: bool = True
    shares: str | None = None

    def require_plain(self) -> None:
        """Raise ValueError with one sentence for what kvkeep does not serve."""
        if self.sliding_window is not None:
            raise ValueError(
                f"{self.layer} has a sliding window of {self.sliding_window}: models that mix it with full attention "
                "are run by kvkeep under transformers, not yet under vLLM"
            )
        changed = [name for name in ("softcap", "sinks", "alibi") if getattr(self, name)]
        if changed:
            raise ValueError(f"{self.layer} changes its softmax ({', '.join(changed)}), which kvkeep does not support")
        if not self.decoder or self.shares is not None:
            raise ValueError(f"{self.layer} does not attend to a cache of its own, which kvkeep does not support")

"""What a frozen backbone has to say about a document, computed once and kept on disk.

With the backbone frozen, keys, values and labels of a document never change while a scorer is trained, so one forward
a document serves all epochs. A shard is one safetensors file, written beside its place and renamed; an interrupted
harvest goes on where it was.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.attention_mass import attention_by_age, future_attention
from kvkeep.policies.base import Geometry, Policy
from kvkeep.policies.full import Full
from kvkeep.runtime.replay import hidden_states
from kvkeep.scorers import model_fingerprint
from kvkeep.sparse_attention import live_lse
from kvkeep.training.losses import age_edges, age_ranges

TARGET_SOURCES = ("dense", "sparse")
AGES = (age_edges(2)[1],)  # what a shard's name says besides where it has ages: their width
STORAGE = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Shard:
    """One document's pairs and labels on disk; tensors are read when asked for.

    Attributes:
        name: of the document.
        path: safetensors with ``key.L``, ``value.L`` ``[H, S, D]`` and ``target.L`` float32 ``[H, S]`` per layer L, and
            where ages were asked for ``ages.L`` float16 ``[H, S, ranges]``.
    """

    name: str
    path: Path

    @functools.cached_property
    def length(self) -> int:
        """Tokens of the document."""
        names = self._file.keys()
        return self._file.get_slice(next(name for name in names if name.startswith("target."))).get_shape()[-1]

    def layer(self, index: int, tokens: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values ``[1, H, n, D]`` in float32 and the log target ``[1, H, n]`` of one layer.

        Args:
            index: of the layer.
            tokens: ``[n]``, indices of those wanted; None for all.
        """
        return tuple(self._read(f"{part}.{index}", tokens) for part in ("key", "value", "target"))

    def received(self, index: int, window: int, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Attention by age ``[1, H, n, ranges]`` of some tokens of one layer, and the ages, two ``[n, ranges]``.

        See :func:`kvkeep.attention_mass.attention_by_age` and :func:`kvkeep.training.losses.age_ranges`.
        """
        first, last = age_ranges(self.length, window, age_edges(self.length))
        return self._read(f"ages.{index}", tokens), first[tokens], last[tokens]

    @functools.cached_property
    def _file(self):
        return safe_open(self.path, framework="pt")  # mapped, so that many may be open

    def _read(self, name: str, tokens: Tensor | None) -> Tensor:
        tensor = self._file.get_tensor(name)
        return (tensor if tokens is None else tensor[:, tokens]).float()[None]


def harvest(
    model: PreTrainedModel,
    documents: Sequence[tuple[object, Tensor]],
    window: int,
    folder: str | Path,
    group: str = "max",
    count_normalised: bool = True,
    eps: float = 1e-6,
    target_source: str = "dense",
    under: Policy | None = None,
    storage: str = "float16",
    ages: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Shard]:
    """Shards of documents; those that exist already are left as they are, damaged ones are read again.

    Args:
        model: the backbone.
        documents: pairs of a document (``.name``) and its ids ``[S]``.
        window: of the budget; the future of a token begins where it leaves the window.
        folder: where shards live; created.
        group, count_normalised, eps: of the target, see :func:`kvkeep.attention_mass.future_attention`.
        target_source: whose normaliser the target uses: "dense" = all the past, "sparse" = the tokens that ``under``
            keeps alive (KVpop's student; its probabilities may exceed 1 for tokens it has evicted).
        under: the policy the documents are read under; None = the full cache.
        storage: of keys and values: "float16", "bfloat16" or "float32".
        ages: whether the attention by age is kept too, in the ranges of :func:`kvkeep.training.losses.age_edges`.
        progress: called with (stage, done, total).

    Returns:
        One shard per document, in order.

    Raises:
        ValueError: for an unknown option, or keys and values that do not fit the storage.
    """
    if target_source not in TARGET_SOURCES or storage not in STORAGE:
        raise ValueError(
            f"target_source is one of {', '.join(TARGET_SOURCES)} and storage of {', '.join(STORAGE)}, "
            f"not {target_source!r} and {storage!r}"
        )
    policy = Full() if under is None else under
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = [model_fingerprint(model), window, group, count_normalised, eps, target_source, storage, repr(policy)]
    target = {"group": group, "count_normalised": count_normalised, "eps": eps}
    shards = []
    for done, (document, ids) in enumerate(documents):
        if progress is not None:
            progress("harvest", done, len(documents))
        plain, aged = (folder / f"{digest([*settings, *more], ids)}.safetensors" for more in ((), AGES))
        shard = Shard(document.name, aged if ages or readable(aged) else plain)  # ages do no harm to who needs none
        if not readable(shard.path):
            _write(shard, _read(model, ids, policy, window, target, target_source, STORAGE[storage], ages))
        shards.append(shard)
    if progress is not None:
        progress("harvest", len(documents), len(documents))
    return shards


def readable(path: Path) -> bool:
    """Whether a shard is there and whole, as far as its header and its length tell: cheap, no tensor is read."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


def digest(settings: list, ids: Tensor) -> str:
    """A shard's name: 24 hexadecimal digits over settings and ids."""
    return hashlib.sha256(json.dumps([settings, ids.tolist()]).encode()).hexdigest()[:24]


def _read(
    model, ids: Tensor, policy: Policy, window: int, target: dict, source: str, storage, ages: bool
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}

    def observe(geometry: Geometry, query: Tensor, key: Tensor, value: Tensor, evicted_at: Tensor) -> None:
        lse = live_lse(query, key, evicted_at, geometry.scaling) if source == "sparse" else None
        label = future_attention(query, key, window, scaling=geometry.scaling, lse=lse, **target)
        for name, tensor in (("key", key), ("value", value)):
            stored = tensor[0].to(storage)
            if not bool(torch.isfinite(stored).all()):
                raise ValueError(f"{name}s of layer {geometry.layer} do not fit {storage}: store them as float32")
            tensors[f"{name}.{geometry.layer}"] = stored.contiguous()
        tensors[f"target.{geometry.layer}"] = label[0].float().contiguous()
        if ages:
            group = "max" if target["group"] == "max" else "mean"
            edges = age_edges(key.shape[2])
            mass = attention_by_age(query, key, window, edges, group, scaling=geometry.scaling, lse=lse)
            tensors[f"ages.{geometry.layer}"] = mass[0].half().contiguous()

    hidden_states(model, ids.reshape(1, -1).to(model.device), policy, observe=observe)  # no logits are needed
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _write(shard: Shard, tensors: dict[str, Tensor]) -> None:
    beside = shard.path.with_suffix(".tmp")
    save_file(tensors, beside)
    beside.rename(shard.path)

"""Which of a backbone's weights learn, how they are saved, and how the model is put back.

Both students work in the model object that they are given, so that whatever runs a model runs a student.
:class:`LoraStudent` hangs adapters into its linear layers (peft) and takes them out again; :class:`FullStudent` lets
all weights learn (KVpop, arXiv 2607.05061, trains all of them).
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from kvkeep.scorers import Scorer

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
NO_PEFT = "tuning with LoRA adapters needs peft, which the extra `train` brings: pip install 'kvkeep[train]'"


def require_peft() -> Any:
    """The module peft.

    Raises:
        ValueError: where it is not installed, naming the extra that brings it.
    """
    try:
        import peft  # here: an extra, and slow to import
    except ImportError as error:
        raise ValueError(NO_PEFT) from error
    return peft


def require_targets(model: nn.Module, targets: Sequence[str]) -> None:
    """Raise ValueError where a name is that of no linear layer, as peft reads names: the end of a path."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    unknown = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in linear)]
    if unknown:
        there = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
        raise ValueError(
            f"targets {', '.join(unknown)} match no linear layer of {type(model).__name__}, which has {there}"
        )


class FullStudent:
    """All weights learn, in place. After :meth:`release` the model keeps them.

    Attributes:
        model: the model it was made of.
        names: of the weights that learn, in the order of ``parameters``.
        parameters: the weights that learn.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._learned = {parameter: parameter.requires_grad for parameter in model.parameters()}
        model.requires_grad_(True)
        self._collect()

    def _collect(self) -> None:
        learns = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        self.names, self.parameters = list(learns), list(learns.values())

    def save(self, folder: Path, base_model: str, tokenizer: Any = None) -> None:
        """Write the student as a model folder."""
        config = vars(self.model.config)
        before = dict(config)
        with _no_bars():
            self.model.save_pretrained(folder)
        config.clear()  # transformers writes dtype and architecture into it
        config.update(before)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def weights(self) -> Mapping[str, Tensor]:
        """The weights that loading what :meth:`save` wrote gives; names may differ."""
        return dict(self.model.named_parameters())

    def release(self) -> None:
        """Flags as they were before; no gradients left."""
        for parameter, learned in self._learned.items():
            parameter.requires_grad_(learned).grad = None


class LoraStudent(FullStudent):
    """Adapters of low rank learn: ``W + alpha / rank * B A``, B zero at first. After :meth:`release` they are gone.

    Args:
        model: the backbone; its own weights are never written to.
        rank, alpha: of the adapters; alpha None = rank.
        targets: names of the linear layers that get one, as in ``q_proj``.
        seed: of A.

    Raises:
        ValueError: without peft, or for a target that is the name of no linear layer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rank: int = 16,
        alpha: float | None = None,
        targets: Sequence[str] = TARGETS,
        seed: int = 0,
    ):
        peft = require_peft()
        require_targets(model, targets)
        self.model = model
        self._learned = {parameter: parameter.requires_grad for parameter in model.parameters()}
        config = peft.LoraConfig(
            r=rank, lora_alpha=rank if alpha is None else alpha, target_modules=list(targets), task_type="CAUSAL_LM"
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that is going away
            torch.manual_seed(seed)
            self.wrapper = peft.get_peft_model(model, config)  # puts adapters into `model` itself
        self._collect()

    def save(self, folder: Path, base_model: str, tokenizer: Any = None) -> None:
        """Write the adapters as a peft folder that names its base model; the base model's tokenizer serves it."""
        self.wrapper.peft_config["default"].base_model_name_or_path = base_model
        self.wrapper.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # peft's is a form that nobody has filled in

    @torch.no_grad()
    def weights(self) -> Mapping[str, Tensor]:
        merged = {}
        for name, weight in self.model.named_parameters():
            owner, _, _ = name.partition(".base_layer.weight")
            if owner != name:
                weight = weight + self.model.get_submodule(owner).get_delta_weight("default")
            if ".lora_" not in name:
                merged[name] = weight
        return merged

    def release(self) -> None:
        self.wrapper.unload()
        super().release()


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Inside, transformers draws no progress bars: this package has its own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def checkpointed_layers(model: PreTrainedModel, enabled: bool = True) -> Iterator[None]:
    """Inside, decoder layers keep only their input and are computed again in backward.

    Only the layers' own flags are set, not ``model.train()``, which would switch on dropout.

    Raises:
        ValueError: for a model whose layers cannot be checkpointed.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)] if enabled else []
    if enabled and not layers:
        raise ValueError(f"{type(model).__name__} has no layers that transformers can checkpoint")
    flags = {
        "training": True,
        "gradient_checkpointing": True,
        "_gradient_checkpointing_func": partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
    }
    before = [{name: vars(layer)[name] for name in flags if name in vars(layer)} for layer in layers]
    for layer in layers:
        vars(layer).update(flags)
    try:
        yield
    finally:
        for layer, had in zip(layers, before, strict=True):
            for name in flags:
                vars(layer).pop(name)
            vars(layer).update(had)


def learned_state(student: FullStudent, scorer: nn.Module | None) -> nn.Module:
    """What a run has to save: the weights that learn, and the scorer where it learns too. Shared, not copied."""
    parts = {"backbone": nn.ParameterList(student.parameters)}
    return nn.ModuleDict(parts if scorer is None else parts | {"scorer": scorer})


def save_whole(student: FullStudent, out: Path, base_model: str, tokenizer: Any, record: str) -> None:
    """Write the student and ``tune.json`` beside their places and rename them, the config that a loader looks for last.

    Args:
        student: what is saved.
        out: the folder, which keeps its other files.
        base_model: alias, folder or hub id of the untuned model.
        tokenizer: saved beside a full model; may be None.
        record: JSON, the content of ``tune.json``.
    """
    beside = out / "run" / "saving"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    student.save(beside, base_model, tokenizer)
    (beside / "tune.json").write_text(record + "\n")
    for file in sorted(beside.iterdir(), key=lambda file: (file.name.endswith("config.json"), file.name)):
        os.replace(file, out / file.name)
    beside.rmdir()


def save_scorer(scorer: Scorer, folder: Path, record: Mapping[str, Any], half: bool = False) -> None:
    """Write a scorer for the tuned backbone that it stands beside, and say what it was trained on.

    Args:
        scorer: left as it is.
        folder: where.
        record: what ``tune.json`` records.
        half: store weight matrices in float16, half the size.
    """
    along = ", then along with the tuned one" if record["settings"]["train_scorer"] else ""
    told = {name: record[name] for name in ("base_model", "base_fingerprint", "settings", "seed", "metrics")}
    told |= {"scorer": record["scorer"], "scorer_trained_on": "the untuned backbone" + along}
    league = f"tuned backbone ({record['settings']['backbone']})"
    copy.deepcopy(scorer).save_pretrained(
        folder, half=half, base_fingerprint=record["tuned_fingerprint"], league=league, tuned=told
    )

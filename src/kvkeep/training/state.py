"""What a run needs to go on exactly where it was killed: parameters, optimiser and step, written whole or not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn


def save_state(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, record: dict[str, Any]) -> None:
    """Write one safetensors file beside ``path`` and rename it over.

    Args:
        path: of the file.
        module: its parameters and buffers are saved under ``model.``.
        optimizer: of its parameters, in order; per-parameter tensors are saved under ``optimizer.``.
        record: JSON-friendly, travels in the file's metadata.
    """
    tensors = {f"model.{name}": tensor.detach().contiguous() for name, tensor in module.state_dict().items()}
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            tensors[f"optimizer.{index}.{name}"] = torch.as_tensor(value).detach().contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    save_file(tensors, beside, metadata={"record": json.dumps(record)})
    os.replace(beside, path)


def load_state(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restore what :func:`save_state` wrote; returns its record.

    Raises:
        ValueError: where the file is damaged or belongs to another module.
    """
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as saved:
            record = json.loads(saved.metadata()["record"])
            tensors = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118, the handle is no mapping
    except SafetensorError as error:
        raise ValueError(
            f"{path} is damaged, so that the run cannot go on; delete it to begin again: {error}"
        ) from error
    own = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    try:
        module.load_state_dict(own)
    except RuntimeError as error:
        raise ValueError(f"{path} was saved by another run: {str(error).splitlines()[-1].strip()}") from error
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, part = name.split(".", 2)
            state.setdefault(int(index), {})[part] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return record


class Log:
    """A JSONL file, one line a record; on resumption lines past the saved step are dropped."""

    def __init__(self, path: Path, resume_at: int):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if resume_at and path.exists():
            lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            kept = [line for line in lines if line["step"] < resume_at]
        beside = path.with_name(path.name + ".tmp")
        beside.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(beside, path)

    def write(self, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def require_own(out: Path) -> None:
    """Raise ValueError where ``out`` is a file, or holds files but no run: a model, say, that would be written over."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; it should be a folder")
    if out.is_dir() and not (out / "run" / "run.json").exists():
        foreign = sorted(path.name for path in out.iterdir() if path.is_file())
        if foreign:
            raise ValueError(f"{out} holds {foreign[0]}, which no training run put there: take another folder")


def open_run(out: Path, record: dict[str, Any], resume: bool) -> Path:
    """The folder ``out/run`` of a run, which remembers what it is a run of.

    Args:
        out: where the result will be.
        record: JSON-friendly, everything that decides the result.
        resume: go on with the run that is there, if there is one.

    Raises:
        ValueError: where ``out`` holds a run and ``resume`` is False, or one with another record; where it is a file,
            or holds files that are not of a run (a model, say), which would be written over; or cannot be written to.
    """
    require_own(out)
    run = out / "run"
    described = run / "run.json"
    if described.exists():
        if not resume:
            raise ValueError(f"{out} holds a run already: give --resume to go on with it, or another folder")
        held = json.loads(described.read_text())
        if held != record:
            raise ValueError(f"{out} holds a run with another {_difference(held, record)}; it cannot be resumed")
    beside = described.with_suffix(".tmp")
    try:
        run.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(record, indent=1))
        beside.rename(described)
    except OSError as error:
        raise ValueError(f"{out} cannot be written to: {error.strerror or error}") from error
    return run


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The names of what differs between two records, in words."""
    names = [name for name in dict.fromkeys([*new, *old]) if old.get(name) != new.get(name)]
    return ", ".join(names)


def jsonable(value: Any) -> Any:
    """The value as it reads after a round trip through JSON: tuples as lists, keys as strings."""
    return json.loads(json.dumps(value))

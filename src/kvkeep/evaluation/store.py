"""Work that survives: one small JSON file for every finished (policy, document), named by all that matters to it."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

VOLATILE = ("_name_or_path", "transformers_version", "_attn_implementation", "torch_dtype", "architectures")
UPPER_ROOMS = ("__init__.py", "training", "evaluation", "inspection", "benchmark", "serving", "cli")


def write_atomic(path: str | Path, text: str) -> None:
    """Writes beside `path` and renames, so that a reader sees the old file or the new one, never a half.

    Raises:
        OSError: if the folder does not exist or cannot be written; `path` is then as it was.
    """
    path = Path(path)
    handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(beside, 0o666 & ~_umask())  # mkstemp makes files that only their owner may read
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def require_writable(path: Path | None, flag: str) -> None:
    """Finds out before hours of work whether a result could be written after them.

    Args:
        path: of a file; None is no file.
        flag: what asked for it, for the message.

    Raises:
        ValueError: it is a folder, or in one that is not there or cannot be written to.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder; it should be a file")
    if not folder.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {folder}")
    try:  # asking for permission is not enough: /proc grants it
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{flag} {path}: the folder {folder} cannot be written to") from error


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Makes the folder of an experiment, which remembers in `settings.json` what it is of.

    Raises:
        ValueError: if it is of another one.
        OSError: if it cannot be made.
    """
    described = folder / "settings.json"
    if described.exists() and json.loads(described.read_text(encoding="utf-8")) != settings:
        raise ValueError(f"{folder} holds an experiment with other settings: take another folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(described, json.dumps(settings, indent=1))


def key(**parts: Any) -> str:
    """A file name for the given parts: equal parts, equal name.

    >>> key(policy="tova", slots=128) == key(slots=128, policy="tova")
    True
    """
    text = json.dumps(parts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Store:
    """A folder of finished work. Files that cannot be read count as work not done.

    Args:
        folder: made at the first `put`; None keeps nothing.
    """

    def __init__(self, folder: str | Path | None):
        self.folder = None if folder is None else Path(folder)

    def get(self, name: str) -> dict[str, Any] | None:
        if self.folder is None:
            return None
        try:
            record = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError):
            return None
        return record if isinstance(record, dict) else None

    def put(self, name: str, record: dict[str, Any]) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self.folder / f"{name}.json", json.dumps(record))


def pack_floats(values: torch.Tensor) -> str:
    """A vector as text: little-endian float32, base64."""
    return base64.b64encode(values.detach().to("cpu", torch.float32).numpy().astype("<f4").tobytes()).decode()


def unpack_floats(text: str) -> np.ndarray:
    """`pack_floats` undone, as float64."""
    return np.frombuffer(base64.b64decode(text), dtype="<f4").astype(np.float64)


def fingerprint(model: nn.Module) -> str:
    """A hash of a module's configuration, dtype and every parameter; names and places on the disk do not count."""
    config = getattr(model, "config", None)
    config = config.to_dict() if hasattr(config, "to_dict") else {"config": repr(config)}
    config = {name: value for name, value in config.items() if name not in VOLATILE}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=repr).encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        flat = parameter.detach().reshape(-1).contiguous().cpu()
        digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()[:32]


@functools.cache
def library_digest() -> str:
    """A hash of what decides a loss besides model and policy: this package's lower floors, torch and transformers.

    The version number alone would take results from before an edit for results of today.
    """
    digest = hashlib.sha256(f"{torch.__version__} {metadata.version('transformers')}".encode())
    package = Path(__file__).resolve().parents[1]
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        if place.parts[0] not in UPPER_ROOMS:
            digest.update(str(place).encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

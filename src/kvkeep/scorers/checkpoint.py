"""The one format of trained scorers: a folder with ``scorer.safetensors``, ``config.json`` and a model card.

Whatever is wrong with a folder is a :class:`~kvkeep.scorers.ScorerError` in one sentence; nothing but safetensors and
JSON is ever read.

Saving writes every file beside the old one and renames them, weights first; ``config.json`` holds the weights' sha256.
Killed before the first rename the old scorer is there; killed after it, the new one: loading then finds that the
weights belong to the ``config.json`` that still waits beside, and uses that. Other files in the folder are left alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from safetensors.torch import save as write_tensors
from torch import Tensor

from kvkeep.budget import Budget
from kvkeep.scorers.base import Scorer, ScorerError
from kvkeep.scorers.card import HUB_ID, model_card
from kvkeep.scorers.layout import Layout
from kvkeep.scorers.methods import make_options, method

FORMAT_VERSION = 1
WEIGHTS, CONFIG, CARD = "scorer.safetensors", "config.json", "README.md"
WAITING = ".new"  # suffix of a file that is written but not yet renamed
INPUTS = {"version": 1, "order": ["key after rotary", "value"]}  # what a network is fed with
SHIPPED = Path(__file__).with_name("shipped")  # model/method: see kvkeep.scorers.shipped
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
KNOWN = ("base_model", "base_fingerprint", "data_fingerprint", "metrics")  # metadata with a place of its own


def save(scorer: Scorer, path: str | Path, half: bool, metadata: Mapping[str, Any]) -> Path:
    """Write a scorer into a folder, which is made if need be.

    Args:
        scorer: trained or not.
        path: the folder.
        half: store the weight matrices in float16, half the size. A float16 keeps 11 significant bits, which changes
            scores by about a thousandth of their deviation; biases, statistics and decay stay float32.
        metadata: JSON-friendly, kept in ``scorer.metadata``. Known names: ``base_model`` (hub id),
            ``base_fingerprint`` (see :func:`kvkeep.scorers.model_fingerprint`), ``data_fingerprint``, ``metrics``
            (name -> number, or ``{"value": ..., "interval": [low, high]}``), ``command``, ``license``.

    Returns:
        the folder.

    Raises:
        ScorerError: for weights that are not finite or too large for float16, or metadata that JSON cannot hold.
    """
    folder = Path(path)
    weights = write_tensors(_stored(scorer, half), {"format": "pt"})
    scorer.metadata = dict(scorer.metadata) | dict(metadata)
    record = describe(scorer) | {
        "weights": {"sha256": hashlib.sha256(weights).hexdigest(), "matrices": "float16" if half else "float32"}
    }
    try:
        config = json.dumps(record, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ScorerError(f"the metadata of a scorer must fit into JSON: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    _settle(folder)
    files = {WEIGHTS: weights, CONFIG: config.encode(), CARD: model_card(record).encode()}
    for name, content in files.items():
        with open(folder / (name + WAITING), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    for name in files:
        os.replace(folder / (name + WAITING), folder / name)
    return folder


def _settle(folder: Path) -> None:
    """Finish a save that was killed after its weights got their name."""
    if (folder / WEIGHTS).exists() and _waiting(folder, (folder / WEIGHTS).read_bytes()) is not None:
        os.replace(folder / (CONFIG + WAITING), folder / CONFIG)


def _waiting(folder: Path, weights: bytes) -> dict[str, Any] | None:
    """The config that waits for its name, if it belongs to these weights."""
    try:
        record = json.loads((folder / (CONFIG + WAITING)).read_text(encoding="utf-8"))
        return record if record["weights"]["sha256"] == hashlib.sha256(weights).hexdigest() else None
    except (OSError, ValueError, KeyError, TypeError):  # none waits, or it is half written
        return None


def describe(scorer: Scorer) -> dict[str, Any]:
    """What ``config.json`` says of a scorer, all but its weights."""
    metadata = scorer.metadata
    gammas = torch.cat([layer.log_gamma for layer in scorer.layers.values()])
    return {
        "format": "kvkeep scorer",
        "format_version": FORMAT_VERSION,
        "library_version": sys.modules[__name__.partition(".")[0]].__version__,
        "method": scorer.method,
        "options": scorer.options,
        "inputs": INPUTS,
        "base_model": metadata.get("base_model"),
        "base_fingerprint": metadata.get("base_fingerprint"),
        "data_fingerprint": metadata.get("data_fingerprint"),
        "metrics": metadata.get("metrics", {}),
        "metadata": {name: value for name, value in metadata.items() if name not in KNOWN},
        "layout": scorer.layout.to_json(),
        "budgets": [asdict(budget) for budget in scorer.budgets],
        "state_entries": scorer.state_entries,
        "decay": {
            "step": scorer.decay_step,
            "log_gamma": [float(gammas.min()), float(gammas.max())],
            "factors": {str(rest): factor for rest, factor in scorer.decay_factors.items()},
        },
    }


def _stored(scorer: Scorer, half: bool) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in scorer.state_dict().items():
        tensor = tensor.detach().to("cpu", torch.float32)
        weight = name.rsplit(".", 1)[-1].startswith("w")  # matrices; b... are biases, the rest statistics
        stored = tensor.half() if half and weight else tensor
        if not bool(torch.isfinite(stored).all()):
            what = "too large for float16" if bool(torch.isfinite(tensor).all()) else "NaN or infinite"
            raise ScorerError(f"tensor {name!r} of the scorer is {what}, so it was not saved")
        tensors[name] = stored.contiguous()
    return tensors


def load_scorer(path_or_repo: str | Path) -> Scorer:
    """A trained scorer from a local folder, from the package or from the Hugging Face hub.

    Args:
        path_or_repo: a folder; or where there is none the name of a scorer that comes with the package, like
            ``smollm2-135m/kvpop_mlp``; or a hub id ``owner/name``.

    Returns:
        the scorer on the CPU, in float32 and evaluation mode. Whether it fits a model is checked where it is used,
        or by :meth:`Scorer.require_fits`.

    Raises:
        ScorerError: where nothing is found or fetched, a file is missing, damaged, of another format version or
            method, a tensor is missing, unknown, of another shape or not finite, or there are only pickles.

    Example:
        >>> scorer = kvkeep.load_scorer("scorers/kvpop-128")
        >>> kvkeep.policies.create("kvpop", 128, scorer=scorer)
    """
    folder = Path(path_or_repo)
    if not folder.exists():
        own = {f"{found.parent.name}/{found.name}": found for found in SHIPPED.glob("*/*") if found.is_dir()}
        folder = own.get(str(path_or_repo)) or _fetched(str(path_or_repo))
    weights, record = _read(folder)
    _require_known(folder, record)
    try:
        layout, budgets = Layout.from_json(record["layout"]), [Budget(**budget) for budget in record["budgets"]]
        options, step, entries = record["options"], record["decay"]["step"], record["state_entries"]
        kind, given = method(record["method"]), make_options(record["method"], options)
        scorer = Scorer(kind, layout, given, budgets, entries, step)
        known = {name: record[name] for name in KNOWN if record[name]}
        scorer.metadata = known | record["metadata"]
        scorer.decay_factors = _factors(record["decay"]["factors"], folder)
    except (KeyError, TypeError, AttributeError) as error:
        raise ScorerError(f"{folder / CONFIG} is not complete: {type(error).__name__} {error}") from error
    _fill(scorer, weights, folder)
    if hashlib.sha256(weights).hexdigest() != record["weights"]["sha256"]:
        raise ScorerError(f"{folder / WEIGHTS} is damaged: it is not the file that {CONFIG} was written with")
    return scorer.eval()


def _read(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """The weights' bytes and the config that belongs to them."""
    if not folder.is_dir():
        raise ScorerError(f"{folder} is a file: a scorer is a folder with {WEIGHTS} and {CONFIG}")
    if not (folder / WEIGHTS).exists():
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
        hint = f"; {pickles[0]} may be a pickle, which is never read" if pickles else ""
        raise ScorerError(f"{folder} holds no scorer: there is no {WEIGHTS}{hint}")
    weights = (folder / WEIGHTS).read_bytes()
    waiting = _waiting(folder, weights)
    if waiting is not None:
        return weights, waiting
    try:
        record = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ScorerError(f"{folder} holds no scorer: there is no {CONFIG}") from None
    except ValueError as error:
        raise ScorerError(f"{folder / CONFIG} is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("weights"), dict):
        raise ScorerError(f"{folder / CONFIG} does not describe a scorer")
    return weights, record


def _require_known(folder: Path, record: dict[str, Any]) -> None:
    found = record.get("format_version")
    if found != FORMAT_VERSION:
        raise ScorerError(f"{folder} has format version {found!r}, this version of kvkeep reads {FORMAT_VERSION}")
    if record.get("inputs") != INPUTS:
        raise ScorerError(f"{folder} wants inputs {record.get('inputs')}, this version of kvkeep has {INPUTS}")


def _factors(found: dict[str, Any], folder: Path) -> dict[int, float]:
    """Tokens held -> factor of the decays."""
    for rest, factor in found.items():
        if not rest.isdecimal() or int(rest) < 1 or not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            raise ScorerError(
                f"{folder / CONFIG}: decay factors are numbers from 0 per tokens held, not {rest}: {factor}"
            )
    return {int(rest): float(factor) for rest, factor in found.items()}


def _fill(scorer: Scorer, weights: bytes, folder: Path) -> None:
    try:
        tensors = read_tensors(weights)
    except SafetensorError as error:
        raise ScorerError(f"{folder / WEIGHTS} is not a safetensors file (pickles are never read): {error}") from error
    expected = scorer.state_dict()
    for what, names in (("lacks", set(expected) - set(tensors)), ("has an unknown", set(tensors) - set(expected))):
        if names:
            raise ScorerError(f"{folder / WEIGHTS} {what} tensor {min(names)!r}")
    for name, tensor in sorted(tensors.items()):
        if tensor.shape != expected[name].shape:
            wanted = list(expected[name].shape)
            raise ScorerError(f"tensor {name!r} in {folder} has shape {list(tensor.shape)}, this scorer needs {wanted}")
        if tensor.dtype not in (torch.float16, torch.float32) or not bool(torch.isfinite(tensor).all()):
            raise ScorerError(f"tensor {name!r} in {folder} is not finite, or not float16 or float32: {tensor.dtype}")
    scorer.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})


def _fetched(repo: str) -> Path:
    if not HUB_ID.fullmatch(repo):
        raise ScorerError(f"there is no folder {repo!r}, and a scorer on the hub is called owner/name")
    import huggingface_hub  # here: a local scorer needs no network code

    try:
        return Path(huggingface_hub.snapshot_download(repo, allow_patterns=[WEIGHTS, CONFIG, CARD]))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ScorerError(
            f"there is no folder {repo!r}, and the hub did not give a scorer of that name: {reason}"
        ) from error


def push(scorer: Scorer, repo_id: str, token: str | None = None, private: bool = False) -> str:
    """Upload a scorer to the Hugging Face hub.

    Args:
        scorer: what :meth:`Scorer.save_pretrained` would write, its metadata included.
        repo_id: ``owner/name``, made if need be.
        token: of the hub; None = the one of this machine's login.
        private: whether a repository that is made is private.

    Returns:
        the address of the commit.

    Raises:
        ScorerError: where the hub refuses or cannot be reached.
    """
    import huggingface_hub  # here: a local scorer needs no network code

    hub = huggingface_hub.HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder:
        scorer.save_pretrained(folder)
        try:
            hub.create_repo(repo_id, private=private, exist_ok=True)
            commit = hub.upload_folder(
                repo_id=repo_id, folder_path=folder, commit_message=f"Upload a {scorer.method} scorer"
            )
        except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ScorerError(f"the scorer could not be uploaded to {repo_id!r}: {reason}") from error
    return str(commit)

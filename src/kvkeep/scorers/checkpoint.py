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
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from safetensors.torch import save as write_tensors
from torch import Tensor, nn

from kvkeep.budget import Budget
from kvkeep.scorers.base import Scorer, ScorerError
from kvkeep.scorers.card import HUB_ID, model_card
from kvkeep.scorers.fingerprint import model_fingerprint
from kvkeep.scorers.layout import LayerShape, Layout
from kvkeep.scorers.methods import make_options, method

FORMAT, FORMAT_VERSION = "kvkeep scorer", 1
WEIGHTS, CONFIG, CARD = "scorer.safetensors", "config.json", "README.md"
WAITING = ".new"  # suffix of a file that is written but not yet renamed
INPUTS = {"version": 1, "order": ["key after rotary", "value"]}  # what a network is fed with
SHIPPED = Path(__file__).with_name("shipped")  # model/method: see kvkeep.scorers.shipped
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
KNOWN = ("base_model", "base_fingerprint", "data_fingerprint", "metrics")  # metadata with a place of its own
FIELDS = {  # of config.json, those that are read: name -> type, fields of an object, or [fields of each]
    "method": str,
    "options": dict,
    "base_model": str | None,
    "base_fingerprint": str | None,
    "data_fingerprint": str | None,
    "metrics": dict,
    "metadata": dict,
    "layout": {"layers": int, "bounded": [LayerShape], "rotary": dict},
    "budgets": [Budget],
    "state_entries": int,
    "decay": {"step": int, "factors": dict},
    "weights": {"sha256": str},
}
LARGEST_INTEGER, LARGEST_NUMBER, LARGEST_FACTOR = 2**31 - 1, 1e30, 1e6


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
        ScorerError: for weights that are not finite or too large for float16, metadata that JSON cannot hold, or what
            :func:`load_scorer` would refuse.
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
    _described(json.loads(config), "the scorer was not saved")
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
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # none waits, or it is half written
        return None


def describe(scorer: Scorer) -> dict[str, Any]:
    """What ``config.json`` says of a scorer, all but its weights."""
    metadata = scorer.metadata
    gammas = torch.cat([layer.log_gamma for layer in scorer.layers.values()])
    return {
        "format": FORMAT,
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


def load_scorer(path_or_repo: str | Path, *, model: nn.Module | None = None) -> Scorer:
    """A trained scorer from a local folder, from the package or from the Hugging Face hub.

    Args:
        path_or_repo: a folder; or where there is none the name of a scorer that comes with the package, like
            ``smollm2-135m/kvpop_mlp``; or a hub id ``owner/name``.
        model: that the scorer is meant for, with its ``config``: another one is refused, by layout, rotary embedding
            and, where the scorer has recorded them, weights. None leaves that to where the scorer is used, which
            compares no weights, or to :meth:`Scorer.require_fits`.

    Returns:
        the scorer on the CPU, in float32 and evaluation mode.

    Raises:
        ScorerError: where nothing is found or fetched, a file is missing, damaged, of another format version or
            method, a field of ``config.json`` makes no sense, a tensor is missing, unknown, of another shape or not
            finite, there are only pickles, or the model is another.

    Example:
        >>> scorer = kvkeep.load_scorer("scorers/kvpop-128", model=model)
        >>> kvkeep.policies.create("kvpop", 128, scorer=scorer)
    """
    if model is not None and not (isinstance(model, nn.Module) and hasattr(model, "config")):
        raise ScorerError(f"model must be a module with a config, not a {type(model).__name__}")
    folder = Path(path_or_repo)
    if not os.path.exists(folder):  # as Path.exists, but a name that no file can have is no error
        own = {f"{found.parent.name}/{found.name}": found for found in SHIPPED.glob("*/*") if found.is_dir()}
        folder = own.get(str(path_or_repo)) or _fetched(str(path_or_repo))
    weights, record = _read(folder)
    _require_known(folder, record)
    scorer = _described(record, str(folder / CONFIG))
    _fill(scorer, weights, folder)
    if hashlib.sha256(weights).hexdigest() != record["weights"]["sha256"]:
        raise ScorerError(f"{folder / WEIGHTS} is damaged: it is not the file that {CONFIG} was written with")
    if model is not None:
        scorer.require_fits(model.config, model_fingerprint(model))
    return scorer.eval()


def _read(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """The weights' bytes and the config that belongs to them."""
    if not folder.is_dir():
        raise ScorerError(f"{folder} is a file: a scorer is a folder with {WEIGHTS} and {CONFIG}")
    try:
        return _contents(folder)
    except OSError as error:
        raise ScorerError(f"{error.filename or folder} cannot be read: {error.strerror}") from error


def _contents(folder: Path) -> tuple[bytes, dict[str, Any]]:
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
    except (ValueError, RecursionError) as error:
        raise ScorerError(f"{folder / CONFIG} is not JSON: {error}") from error
    return weights, record


def _require_known(folder: Path, record: Any) -> None:
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ScorerError(f"{folder / CONFIG} does not describe a scorer: its format is not {FORMAT!r}")
    found = record.get("format_version")
    if found != FORMAT_VERSION:
        raise ScorerError(f"{folder} has format version {found!r}, this version of kvkeep reads {FORMAT_VERSION}")
    if record.get("inputs") != INPUTS:
        raise ScorerError(f"{folder} wants inputs {record.get('inputs')!r}, this version of kvkeep has {INPUTS}")


def _described(record: dict[str, Any], where: str) -> Scorer:
    """The scorer that ``config.json`` describes, without weights: its tensors have a shape and no memory.

    Raises:
        ScorerError: beginning with ``where``, for a field that is missing or makes no sense.
    """
    try:
        _require_fields(record, FIELDS)
        kind, layout = method(record["method"]), Layout.from_json(record["layout"])
        _require_fields(record["options"], kind.Options, "options.")
        options = make_options(record["method"], record["options"])
        budgets, charged = [Budget(**budget) for budget in record["budgets"]], record["state_entries"]
        with torch.device("meta"):
            scorer = Scorer(kind, layout, options, budgets, None, record["decay"]["step"])
        if charged < scorer.state_entries:
            raise ScorerError(f"state_entries is {charged}, the memory of the scorer costs {scorer.state_entries}")
        scorer.state_entries = charged
        scorer.decay_factors = _factors(record["decay"]["factors"])
    except ValueError as error:
        raise ScorerError(f"{where}: {error}") from error
    except TypeError as error:  # of the right types, but None where this method computes with it
        empty = ", ".join(name for name, value in record["options"].items() if value is None)
        raise ScorerError(f"{where}: options of a {record['method']} scorer cannot have {empty} null") from error
    except RuntimeError as error:
        raise ScorerError(f"{where}: no tensor is as large as layout and options say") from error
    scorer.metadata = record["metadata"] | {name: record[name] for name in KNOWN if record[name]}
    return scorer


def _require_fields(found: Any, wanted: Any, where: str = "") -> None:
    """Raise ValueError where JSON is not made of these fields; see ``FIELDS``. A dataclass has no others either.

    Those of a dataclass that are marked ``later`` came after checkpoints without them, and have a default for these.
    """
    if not isinstance(found, dict):
        raise ValueError(f"{where.removesuffix('.')} must be an object, not {_brief(found)}")
    types = get_type_hints(wanted) if is_dataclass(wanted) else wanted
    later = {each.name for each in fields(wanted) if each.metadata.get("later")} if is_dataclass(wanted) else ()
    unknown = set(found) - set(types) if is_dataclass(wanted) else ()
    if unknown:
        raise ValueError(f"{where.removesuffix('.')} has an unknown {_brief(min(unknown))}")
    for name, kind in types.items():
        field = where + name
        if name not in found and name in later:
            continue
        if name not in found:
            raise ValueError(f"{field} is missing")
        if isinstance(kind, list):
            if not isinstance(found[name], list) or not found[name]:
                raise ValueError(f"{field} must be a list that is not empty, not {_brief(found[name])}")
            for index, each in enumerate(found[name]):
                _require_fields(each, kind[0], f"{field}[{index}].")
        elif isinstance(kind, dict) or is_dataclass(kind):
            _require_fields(found[name], kind, f"{field}.")
        elif not _is(found[name], kind):
            raise ValueError(f"{field} cannot be {_brief(found[name])}")


def _is(value: Any, kind: Any) -> bool:
    """Whether a value from JSON has a type; numbers must not be absurdly large, and a bool is none."""
    parts = get_args(kind)
    if get_origin(kind) is tuple:
        kinds = parts[:1] * len(value) if isinstance(value, list) and parts[-1] is ... else parts
        return isinstance(value, list) and len(value) == len(kinds) and all(map(_is, value, kinds))
    if parts:
        return any(_is(value, part) for part in parts)
    if kind is int:
        return type(value) is int and abs(value) <= LARGEST_INTEGER
    if kind is float:
        return type(value) in (int, float) and abs(value) <= LARGEST_NUMBER
    return isinstance(value, kind)


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _factors(found: dict[str, Any]) -> dict[int, float]:
    """Tokens held -> factor of the decays."""
    for rest, factor in found.items():
        known = rest.isdecimal() and len(rest) < 10 and int(rest) >= 1
        if not known or not _is(factor, float) or not 0 <= factor <= LARGEST_FACTOR:
            raise ScorerError(f"decay factors are numbers from 0 per tokens held, not {rest!r}: {_brief(factor)}")
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
    scorer.load_state_dict({name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}, assign=True)


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

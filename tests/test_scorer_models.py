"""Learned policies by name, user mistakes, and which models a scorer fits."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    Cohere2Config,
    Gemma2Config,
    Gemma3Config,
    Gemma4TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    SmolLM3Config,
)

import kvkeep
from kvkeep import Budget, policies, scorers
from kvkeep.policies.base import Geometry, Step
from kvkeep.runtime.geometry import bounded_layers, text_config
from test_scorers import SMOL, SPEC, pairs
from tiny import FAMILIES, make_cache, random_ids, tiny_model

# --- Policies --------------------------------------------------------------------------------------------------------


def test_the_names_and_options_of_a_learned_policy():
    assert policies.names()[-5:] == ["kvpop_mlp", "kvpop", "foresightkv", "golden", "future_mass"]
    for name in ("kvpop_mlp", "kvpop"):
        assert policies.describe(name).learned
        scorer = scorers.new(name, SMOL, 128)
        policy = policies.create(name, 128, scorer=scorer)
        assert json.loads(json.dumps(policy.options())) == {"scorer": scorer.fingerprint()}
        assert scorer.fingerprint() in repr(policy)
        assert policy.scorer is scorer
        explicit = Budget(3, 5, 7)
        assert policies.create(name, explicit, scorer=scorer).budget is explicit
    assert policies.create("kvpop", 128, scorer=scorers.new("kvpop", SMOL, 64)).budget == Budget(4, 32, 87)


def test_a_layer_on_another_device_gets_a_copy_there():
    policy = policies.create("kvpop", 128, scorer=scorers.new("kvpop", SMOL, 128))
    meta, geometry = torch.device("meta"), Geometry(2, 3, 3, 64, 0.125)
    memory = policy.new_memory(geometry, 1, meta, torch.float32)
    pair = (torch.zeros(1, 3, 1, 64, device=meta),) * 2
    priority = policy.priority(Step(geometry, pair, pair, torch.zeros(1, 1, dtype=torch.int64, device=meta), memory))
    assert priority.device == meta
    assert policy.scorer.layer(2).w1.device.type == "cpu"


MISTAKES = [
    (lambda: policies.create("kvpop", 128), "policy 'kvpop' is learned and needs a scorer"),
    (lambda: policies.create("kvpop_mlp", 128, scorer=torch.nn.Linear(1, 1)), "needs a kvkeep scorer, not a Linear"),
    (lambda: policies.create("kvpop", 128, scorer=scorers.new("kvpop_mlp", SMOL, 128)), "not one for 'kvpop_mlp'"),
    (lambda: policies.create("h2o", 128, scorer=scorers.new("kvpop_mlp", SMOL, 128)), "is a rule and takes no scorer"),
    (lambda: policies.create("kvpop", 128, scorer=scorers.new("kvpop", SMOL, 128), seed=1), "keyword argument 'seed'"),
    (lambda: policies.create("kvpop", scorer=scorers.new("kvpop", SMOL, 128)), "policy 'kvpop' needs a budget"),
    (lambda: policies.budget("streaming", 128, state_entries=3), "not state_entries"),
    (lambda: scorers.new("kvpopp", SMOL, 128), "no scorer is called 'kvpopp'; this version has kvpop_mlp, kvpop"),
    (lambda: scorers.new("kvpop_mlp", SMOL, 128, features=3), "unexpected keyword argument 'features'"),
    (lambda: scorers.new("kvpop_mlp", SMOL, 128, hidden=0), "hidden must be at least 1, not 0"),
    (lambda: scorers.new("kvpop", SMOL, 128, features=0), "features must be at least 1, not 0"),
    (lambda: scorers.new("kvpop", SMOL, 128, normaliser="max"), "normaliser must be 'ratio' or 'xlstm', not 'max'"),
    (lambda: scorers.new("kvpop", SMOL, 128, decay_step=0), "decay_step must be at least 1 token, not 0"),
    (lambda: scorers.new("kvpop", SMOL, 36), "36 slots must be above sinks 4 + window 32 = 36"),
    (lambda: scorers.new("kvpop", SMOL, []), "needs a budget"),
    (lambda: scorers.new("kvpop", SMOL, 12.5), "not 12.5"),
    (lambda: scorers.new("kvpop", SMOL, 128, state_entries=92), "92 tokens leaves nothing of the 92 top-k places"),
    (lambda: scorers.new("kvpop", SimpleNamespace(num_hidden_layers=2), 128), "without attention layers"),
    (lambda: scorers.new("kvpop", MistralConfig(sliding_window=8), 128), "MistralConfig has no full-attention layer"),
    (
        lambda: scorers.new("kvpop", tiny_model("gemma3").config, 128).layer(1),
        "nothing for layer 1, only for layers 0, 2",
    ),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_mistakes_are_one_sentence(mistake, message):
    with pytest.raises(ValueError) as caught:
        mistake()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# --- Models ----------------------------------------------------------------------------------------------------------

CONFIGS = {
    "llama": SMOL,
    "gqa by default": LlamaConfig(num_hidden_layers=2, num_key_value_heads=None),
    "qwen2 sliding": Qwen2Config(num_hidden_layers=6, use_sliding_window=True, max_window_layers=3),
    "gemma2": Gemma2Config(num_hidden_layers=5),
    "gemma3 with vision": Gemma3Config(text_config={"num_hidden_layers": 7}),
    "gemma4": Gemma4TextConfig(num_hidden_layers=12, num_kv_shared_layers=4),
    "cohere2": Cohere2Config(num_hidden_layers=8),
    "smollm3": SmolLM3Config(num_hidden_layers=6),
    "gpt2": GPT2Config(n_layer=3),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_layout_names_the_layers_that_the_runtime_bounds(name):
    config = CONFIGS[name]
    layout = scorers.Layout.of(config)
    ours = [index for index, bounded in enumerate(bounded_layers(text_config(config))) if bounded]
    assert [shape.index for shape in layout.bounded] == ours
    assert layout == scorers.Layout.from_json(json.loads(json.dumps(layout.to_json())))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layout_has_the_heads_that_the_cache_meets(family):
    model = tiny_model(family, group=4, kv_heads=1)
    cache = make_cache(model, policies.create("streaming", Budget(2, 4, 6)))
    with torch.no_grad():
        model(random_ids(5), past_key_values=cache)
    for shape in scorers.Layout.of(model.config).bounded:
        geometry = cache.layers[shape.index].residency.geometry
        assert (geometry.kv_heads, geometry.group, geometry.head_dim) == (1, 4, 8)
        assert (shape.kv_heads, shape.query_heads, shape.head_dim) == (1, 4, 8)


def test_a_config_is_read_by_its_attributes_alone():
    config = SimpleNamespace(
        num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, hidden_size=48, rope_theta=10000.0
    )
    scorer = scorers.new("kvpop", config, SPEC)
    scorer.require_fits(tiny_model(group=3, kv_heads=2).config)
    assert scorer.geometry == scorers.Layout.of(tiny_model(group=3, kv_heads=2).config).bounded


def fitted(**changes):
    return LlamaConfig(**(SMOL.to_dict() | changes))


MISFITS = [
    (fitted(num_hidden_layers=24), "made for 30 layers, the model has 24"),
    (fitted(num_key_value_heads=9), "made for 3 KV heads in layer 0, the model has 9"),
    (fitted(num_attention_heads=12), "made for 9 query heads in layer 0, the model has 12"),
    (fitted(head_dim=32), "made for heads of size 64 in layer 0, the model has 32"),
    (fitted(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), "rope_theta 10000.0, the model has 500000.0"),
    (
        fitted(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
        "made for rotary factor None, the model has 2.0",
    ),
    (fitted(layer_types=["full_attention", "sliding_attention"] * 15), "full attention in layers [0, 1, 2"),
]


@pytest.mark.parametrize(("config", "message"), MISFITS, ids=[message for _, message in MISFITS])
def test_a_scorer_refuses_another_model(config, message):
    scorer = scorers.new("kvpop_mlp", SMOL, 128)
    scorer.require_fits(SMOL)
    with pytest.raises(ValueError) as caught:
        scorer.require_fits(config)
    assert "this kvpop_mlp scorer does not fit the model: " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["kvpop_mlp", "kvpop"])
def test_cache_and_replay_refuse_another_model(name):
    model = tiny_model()
    policy = policies.create(name, SPEC, scorer=scorers.new(name, tiny_model(group=4).config, SPEC))
    with pytest.raises(ValueError, match="made for 8 query heads in layer 0, the model has 6"):
        kvkeep.EvictingCache(model.config, policy)
    with pytest.raises(ValueError, match="made for 8 query heads in layer 0, the model has 6"):
        kvkeep.replay(model, random_ids(30), policy)


def test_the_memory_is_never_smaller_than_one_feature():
    scorer = scorers.new("kvpop", tiny_model().config, Budget(0, 1, 3))
    assert scorer.options["features"] == 1
    assert torch.isfinite(scorer(0, *pairs(12), 1)).all()

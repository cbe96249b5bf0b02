"""Registry, budgets and options of the policies; random draws; expected attention against transformers' rotation."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    StableLmConfig,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.stablelm.modeling_stablelm import StableLmRotaryEmbedding

from kvkeep import Budget, policies
from kvkeep.policies.base import Geometry, Held, Observation, Rotary, Step
from kvkeep.runtime.geometry import HALF_ROTATION, rotary
from tiny import random_ids

RULES = ["full", "random", "streaming", "tova", "h2o", "h2o_decayed", "snapkv", "rkv", "expected_attention"]
RULES += ["keydiff", "golden", "future_mass"]


# --- Registry and budgets --------------------------------------------------------------------------------------------

SPLITS = {  # (sinks, window, topk, interval) of 128, 256 and 2048 slots
    "random streaming future_mass": [(4, 32, 92, 0), (4, 32, 220, 0), (4, 256, 1788, 0)],
    "tova": [(0, 0, 127, 1), (0, 0, 255, 1), (0, 0, 2047, 1)],
    "h2o h2o_decayed golden keydiff": [(0, 32, 64, 32), (0, 64, 128, 64), (0, 512, 1024, 512)],
    "snapkv rkv": [(0, 8, 88, 32), (0, 8, 184, 64), (0, 8, 1528, 512)],
    "expected_attention": [(4, 32, 60, 32), (4, 64, 124, 64), (4, 512, 1020, 512)],
}


def test_names_are_registered_in_the_order_of_the_documentation():
    assert [name for name in policies.names() if name in RULES] == RULES
    for name in policies.names():
        assert policies.describe(name).name == name
        assert policies.describe(name).kind in ("full", "entry", "attention")
    assert [name for name in RULES if policies.describe(name).oracle] == ["golden", "future_mass"]


@pytest.mark.parametrize(("names", "splits"), SPLITS.items())
def test_default_splits(names, splits):
    for name in names.split():
        for slots, split in zip((128, 256, 2048), splits, strict=True):
            assert policies.budget(name, slots) == Budget(*split)
            assert policies.create(name, slots).budget == Budget(*split)
            assert Budget(*split).slots == slots
        assert policies.budget(name, slots, sinks=None, window=None, interval=None) == Budget(*split)
    assert policies.budget("full", 128) == Budget(4, 32, 92)
    assert policies.create("full").budget is None


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("streaming", {"window": 100}, (4, 100, 24, 0)),
        ("random", {"sinks": 0, "window": 1}, (0, 1, 127, 0)),
        ("tova", {"sinks": 4, "window": 2, "interval": 8}, (4, 2, 114, 8)),
        ("h2o", {"interval": 8}, (0, 8, 112, 8)),  # window L
        ("h2o_decayed", {"interval": 1, "window": 16, "sinks": 4}, (4, 16, 107, 1)),
        ("golden", {"window": 0}, (0, 0, 96, 32)),
        ("snapkv", {"interval": 64}, (0, 8, 56, 64)),
        ("rkv", {"window": 32}, (0, 32, 64, 32)),
        ("expected_attention", {"sinks": 0, "interval": 16}, (0, 16, 96, 16)),
    ],
)
def test_overrides_replace_parts_and_topk_takes_the_rest(name, overrides, expected):
    assert policies.budget(name, 128, **overrides) == Budget(*expected)


def test_an_explicit_budget_is_obeyed_as_given():
    for name in RULES[1:]:
        budget = Budget(7, 11, 13, interval=0 if policies.describe(name).kind == "entry" else 17)
        assert policies.create(name, budget).budget is budget


@pytest.mark.parametrize("name", ["streaming", "h2o"])
def test_slots_may_be_any_integer_as_in_a_budget(name):
    assert policies.budget(name, np.int64(128)) == policies.budget(name, 128)


BUDGET = Budget(0, 4, 8, interval=4)
LONG = {"rope_theta": 1e4, "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
MISTAKES = [
    (lambda: policies.create("h20", 128), "unknown policy 'h20'; did you mean 'h2o'?"),
    (lambda: policies.budget("streamingllm", 128), "did you mean 'streaming'?"),
    (lambda: policies.describe("xyzzy"), "unknown policy 'xyzzy'; known policies: full, random"),
    (lambda: policies.create("h2o"), "policy 'h2o' needs a budget"),
    (lambda: policies.create("h2o", 128, scorer=torch.nn.Linear(1, 1)), "policy 'h2o' is a rule and takes no scorer"),
    (lambda: policies.create("streaming", 128, seed=1), "unexpected keyword argument 'seed'"),
    (lambda: policies.create("full", seed=1), "unexpected keyword argument 'seed'"),
    (lambda: policies.create("random", BUDGET), "interval must be 0, not 4"),
    (lambda: policies.create("h2o", Budget(4, 32, 92)), "interval must be at least 1"),
    (lambda: policies.budget("streaming", 128, interval=3), "interval must be 0, not 3"),
    (lambda: policies.budget("streaming", 128, topk=3), "sinks, window and interval to override, not topk"),
    (lambda: policies.budget("streaming", 36), "a budget of 36 slots must be above sinks 4 + window 32 = 36"),
    (lambda: policies.budget("random", 128, window=124), "128 slots must be above sinks 4 + window 124 = 128"),
    (lambda: policies.budget("h2o", 9, window=7), "9 slots must be above sinks 0 + window 7 + interval 2 = 9"),
    (lambda: policies.budget("streaming", 128, sinks=-1), "sinks must be at least 0, got -1"),
    (lambda: policies.budget("streaming", 128, window=0), "window must be at least 1, got 0"),
    (lambda: policies.budget("h2o", 128, interval=0), "interval must be at least 1"),
    (lambda: policies.budget("h2o", 2), "2 slots must be above sinks 0 + window 1 + interval 1 = 2"),
    (lambda: policies.create("h2o", "128"), "slots must be an integer, not '128'"),
    (lambda: policies.budget("streaming", 128.0), "slots must be an integer, not 128.0"),
    (lambda: policies.budget("streaming", 128, window=8.5), "window must be an integer, not 8.5"),
    (lambda: policies.create("future_mass", 128, group="avg"), "not 'avg'"),
    (lambda: policies.create("future_mass", 128, log_gamma=3.0), "at most 0 and step at least 1, not 3.0 and 64"),
    (lambda: policies.create("rkv", 128, threshold=-1), "a cosine in [0, 1], not -1"),
    (lambda: policies.create("expected_attention", 128, horizon=1.5), "at least 1, not 1.5"),
    (lambda: policies.create("h2o_decayed", 128, decay=0), "decay must be in (0, 1], not 0"),
    (lambda: policies.create("h2o_decayed", 128, decay=1.5), "decay must be in (0, 1], not 1.5"),
    (lambda: policies.create("snapkv", 128, observation=0), "observation must be >= 1 and kernel odd"),
    (lambda: policies.create("snapkv", 128, kernel=4), "not 8 and 4"),
    (lambda: policies.create("snapkv", 128, head_reduce="max"), "not 'max' and 'held'"),
    (lambda: policies.create("snapkv", 128, normalise="all"), "not 'mean_prob' and 'all'"),
    (lambda: policies.create("snapkv", BUDGET, observation=16), "below the budget's 16 slots, not 16"),
    (lambda: policies.create("rkv", 128, mix=1.5), "mix must be in [0, 1], not 1.5"),
    (lambda: policies.create("rkv", 128, kernel=0), "not 8 and 0"),
    (lambda: policies.create("expected_attention", 128, horizon=0), "at least 1, not 0"),
    (lambda: policies.create("golden", 128, labels="dense"), "labels must be 'full' or 'own', not 'dense'"),
    (lambda: policies.create("golden", 128, lookahead=0), "lookahead must be at least 1 block, not 0"),
    (lambda: policies.create("golden", 128, head_reduce="sum"), "not 'sum' and 'mean'"),
    (lambda: policies.create("golden", 128, partial="drop"), "not 'mean' and 'drop'"),
    (lambda: rotary(LlamaConfig(rope_parameters=LONG), 0, 16), "'longrope' depends on the length"),
]


@pytest.mark.parametrize(("call", "sentence"), MISTAKES, ids=[sentence for _, sentence in MISTAKES])
def test_mistakes_are_one_sentence_that_names_the_numbers(call, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        call()
    assert "\n" not in str(error.value)
    assert ". " not in str(error.value)


def test_options_are_reported():
    policy = policies.create("rkv", 128, mix=0.4)
    assert policy.options() == {
        "mix": 0.4, "threshold": 0.5, "observation": 8, "kernel": 7, "head_reduce": "mean_prob", "normalise": "held"
    }  # fmt: skip
    assert "mix=0.4" in repr(policy)


# --- Random ----------------------------------------------------------------------------------------------------------


def draws(seed=0, layer=0, heads=2, positions=None):
    positions = torch.arange(4096)[None] if positions is None else positions
    pair = torch.zeros(positions.shape[0], heads, positions.shape[1], 2)
    step = Step(Geometry(layer, heads, 1, 2, 1.0), (pair, pair), (pair, pair), positions, {})
    return policies.create("random", 128, seed=seed).priority(step)


def test_random_is_repeatable_and_differs_by_head_layer_and_seed():
    assert torch.equal(draws(), draws())
    streams = torch.cat([draws(seed, layer)[0] for seed in (0, 1, -1, 12345) for layer in (0, 1, 29)])
    correlation = torch.corrcoef(streams)
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < 6 / 4096**0.5
    assert len(streams.unique()) > 0.99 * streams.numel()


def test_random_is_roughly_uniform():
    sample = draws(heads=16).flatten()
    counts = torch.histc(sample, 64, 0, 1)
    assert float((counts - 1024).abs().max()) < 6 * 32
    assert 0 <= float(sample.min()) < float(sample.max()) < 1
    neighbours = torch.corrcoef(torch.stack([sample[:-1], sample[1:]]))[0, 1]
    assert float(neighbours.abs()) < 6 / 2**8


def test_random_depends_on_nothing_but_the_position():
    positions = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0], [7, 7, 3, 9]])
    together = draws(positions=positions)
    assert torch.equal(together[1], together[0].flip(-1))
    assert torch.equal(together[2, :, 2], together[0, :, 3])
    for row in range(3):
        assert torch.equal(draws(positions=positions[[row]]), together[[row]])


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), 2**64 + 5])
def test_random_takes_any_integer_as_seed(seed):
    assert 0 <= float(draws(seed).min()) < float(draws(seed).max()) < 1


# --- Expected attention ----------------------------------------------------------------------------------------------

SIZE = 16
YARN = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
PER_TYPE = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
GEMMA = Gemma3TextConfig(
    head_dim=SIZE, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], rope_parameters=PER_TYPE
)
ROPES = {
    "default": (LlamaConfig(head_dim=SIZE), 0),
    "linear": (LlamaConfig(head_dim=SIZE, rope_parameters=LINEAR), 0),
    "yarn": (LlamaConfig(head_dim=SIZE, rope_parameters=YARN), 0),
    "gemma3-sliding": (GEMMA, 0),
    "gemma3-full": (GEMMA, 1),
    "partial": (StableLmConfig(hidden_size=2 * SIZE, num_attention_heads=2, rope_parameters=PARTIAL), 0),
}
EMBEDDING = {"llama": LlamaRotaryEmbedding, "gemma3_text": Gemma3RotaryEmbedding, "stablelm": StableLmRotaryEmbedding}


def rotate(config, layer, states, positions):
    """What transformers does to the states ``[1, 1, n, D]`` of a layer at positions ``[n]``."""
    layer_type = [config.layer_types[layer]] if config.model_type == "gemma3_text" else []
    cos, sin = EMBEDDING[config.model_type](config)(states, positions[None], *layer_type)
    size = cos.shape[-1]  # the others pass
    turned, _ = apply_rotary_pos_emb(states[..., :size], states[..., :size], cos, sin)
    return torch.cat([turned, states[..., size:]], -1)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("config", "layer"), ROPES.values(), ids=ROPES)
def test_unrotate_undoes_the_rotation_of_transformers(config, layer):
    """Transformers takes angles in float32, so 200 positions agree to about 1e-5."""
    states, positions = normal(1, 1, 200, SIZE), torch.arange(200)
    turned = rotate(config, layer, states, positions)
    assert (turned - states).abs().max() > 1
    undone = rotary(config, layer, SIZE).unrotate(turned, positions)
    torch.testing.assert_close(undone, states, rtol=0, atol=2e-4)
    assert rotary(config, layer, SIZE).unrotate(turned[0, 0, 7], torch.tensor(7)).shape == (SIZE,)


@pytest.mark.parametrize(("config", "layer"), ROPES.values(), ids=ROPES)
def test_mean_rotation_is_the_average_of_rotated_vectors(config, layer):
    geometry = Geometry(0, 1, 1, SIZE, 1.0, rotary(config, layer, SIZE))
    policy = policies.create("expected_attention", 128, horizon=40)
    vectors = normal(3, SIZE)
    for start in (0, 90):
        positions = torch.arange(start, start + 40)
        brute = [rotate(config, layer, v.expand(1, 1, 40, SIZE), positions)[0, 0].mean(0) for v in vectors]
        got = policy.mean_rotation(geometry, start, vectors)(vectors)
        torch.testing.assert_close(got, torch.stack(brute), rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", sorted(HALF_ROTATION))
def test_every_layer_of_the_models_named_is_unrotated(model_type, monkeypatch):
    """What the model itself rotated on the way to its attention; some rotate a part of a head, some no head at all."""
    small = {"hidden_size": 2 * SIZE, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": SIZE}
    small |= {"num_hidden_layers": 6, "intermediate_size": 8, "vocab_size": 61, "initializer_range": 0.3}
    small |= {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    small |= {"shared_expert_intermediate_size": 8, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(model_type, **small)
    model, rotated, calls = AutoModelForCausalLM.from_config(config).eval(), {}, []
    module = sys.modules[type(model).__module__]
    apply = module.apply_rotary_pos_emb

    def record(query, *arguments, **more):
        calls.append(query)
        return apply(query, *arguments, **more)

    def capture(layer, query, key, value, mask, **more):
        rotated[layer.layer_idx] = query, calls.pop() if calls else query[..., :0]
        return torch.zeros_like(query).transpose(1, 2), None

    monkeypatch.setattr(module, "apply_rotary_pos_emb", record)
    AttentionInterface.register("capture", capture)
    model.set_attn_implementation("capture")
    with torch.no_grad():
        model(random_ids(12), use_cache=False)
    assert len(rotated) == 6
    for layer, (after, before) in rotated.items():
        embedding = rotary(config, layer, SIZE)
        undone = after if embedding is None else embedding.unrotate(after, torch.arange(12))
        expected = torch.cat([before, after[..., before.shape[-1] :]], -1)
        assert (undone - expected).abs().max() < 1e-4, f"layer {layer}"


@pytest.mark.parametrize("model_type", ["cohere", "cohere2", "glm", "glm4", "helium", "ernie4_5"])
def test_models_that_pair_other_dimensions_are_refused(model_type):
    with pytest.raises(ValueError, match=f"rotary embedding of '{model_type}' models is not known"):
        rotary(AutoConfig.for_model(model_type), 0, SIZE)


def test_absent_rotation_leaves_everything_in_place():
    config = LlamaConfig()
    config.rope_parameters = None
    assert rotary(config, 0, SIZE) is None
    states = normal(3, SIZE)
    turn = policies.create("expected_attention", 128).mean_rotation(Geometry(0, 1, 1, SIZE, 1.0), 5, states)
    assert torch.equal(turn(states), states)


def matrix(embedding, position):
    """The rotation at one position, written out ``[D, D]``."""
    turn, half = torch.eye(SIZE, dtype=torch.float64), embedding.frequencies.numel()
    for i, frequency in enumerate(embedding.frequencies.double().tolist()):
        cos, sin = embedding.factor * np.cos(position * frequency), embedding.factor * np.sin(position * frequency)
        turn[i, i], turn[i, i + half], turn[i + half, i], turn[i + half, i + half] = cos, -sin, sin, cos
    return turn


@pytest.mark.parametrize("use_covariance", [True, False])
@pytest.mark.parametrize("embedding", [None, Rotary(torch.tensor([1.0, 0.3, 0.05]), 1.2)], ids=["none", "partial"])
def test_expected_attention_is_its_formula(embedding, use_covariance):
    """Observed in pieces, held in any order, against matrices and moments written out."""
    heads, group, seen, count, horizon, epsilon, scaling = 2, 3, 30, 11, 7, 0.05, 0.3
    policy = policies.create("expected_attention", 128, horizon=horizon, epsilon=epsilon, use_covariance=use_covariance)
    geometry = Geometry(0, heads, group, SIZE, scaling, embedding)
    query = normal(1, heads, group, seen, SIZE)
    keys, values = normal(2, 1, heads, count, SIZE, seed=1)
    memory = policy.new_memory(geometry, 1, torch.device("cpu"), torch.float64)
    for piece in (slice(0, 13), slice(13, 14), slice(14, seen)):
        rows = torch.arange(seen)[None, piece]
        policy.observe(Observation(geometry, query[:, :, :, piece], rows, None, {}, memory, None, lambda: None))
    positions = torch.randperm(seen, generator=torch.Generator().manual_seed(3))[:count].expand(1, heads, -1)
    everyone = torch.ones(positions.shape, dtype=torch.bool)
    got = policy.keep_scores(Held(geometry, seen, 0, keys, values, positions, {}, memory, None, everyone, 1))

    turn = [torch.eye(SIZE).double() if embedding is None else matrix(embedding, p) for p in range(seen + horizon)]
    coming = torch.stack(turn[seen:]).mean(0)
    for head in range(heads):
        attention = torch.zeros(count, dtype=torch.float64)
        for member in range(group):
            plain = torch.stack([torch.linalg.solve(turn[q], query[0, head, member, q]) for q in range(seen)])
            mean = coming @ plain.mean(0)
            spread = coming @ torch.cov(plain.T, correction=0) @ coming.T
            z = [scaling * (mean @ k) + use_covariance * scaling**2 / 2 * (k @ spread @ k) for k in keys[0, head]]
            attention += torch.stack(z).softmax(0) / group
        torch.testing.assert_close(got[0, head], (attention + epsilon) * values[0, head].square().sum(-1).sqrt())


def test_protect_is_the_window_by_another_name():
    assert policies.create("snapkv", 128, protect=32).budget == Budget(0, 32, 64, 32)
    assert policies.create("h2o", Budget(0, 32, 64, 32), protect=8).budget == Budget(0, 8, 88, 32)
    with pytest.raises(ValueError, match="topk must be at least 1"):
        policies.create("h2o", 128, protect=200)

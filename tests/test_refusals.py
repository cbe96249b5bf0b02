"""What the cache and the replay refuse, each in one sentence that names the value."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version
from transformers import BertConfig, LlamaConfig, MambaConfig, MistralConfig, T5Config

import all_policies
import kvkeep
from all_policies import BLOCKS, WITH_QUERIES, WITHOUT_QUERIES, make
from test_cache import generate
from test_online_offline import decode
from tiny import HANDED, make_cache, random_ids, tiny_model

STREAMING, RANDOM, H2O = WITHOUT_QUERIES[0], WITHOUT_QUERIES[2], WITH_QUERIES[2]

REFUSALS = [
    (lambda: kvkeep.EvictingCache(LlamaConfig(), make(all_policies.ORACLES[0])), "oracle"),
    (lambda: kvkeep.EvictingCache(LlamaConfig(), make(STREAMING), prefill="lazy"), "prefill must be"),
    (
        lambda: kvkeep.EvictingCache(LlamaConfig(attn_implementation="sdpa"), make(H2O)),
        "attn_implementation" if HANDED else "needs the queries",
    ),
    (lambda: kvkeep.EvictingCache(MistralConfig(sliding_window=8), make(STREAMING)), "no full-attention layer"),
    (lambda: kvkeep.EvictingCache(MambaConfig(), make(STREAMING)), "KV cache"),
    (lambda: kvkeep.EvictingCache(T5Config(), make(STREAMING)), "encoder-decoder"),
    (lambda: kvkeep.replay(tiny_model(), random_ids(1), make(STREAMING)), "length >= 2"),
    (lambda: kvkeep.replay(tiny_model(), random_ids(9), make(H2O), gradients=True), "no gradients"),
    (
        lambda: kvkeep.replay(
            tiny_model(), random_ids(4), make(STREAMING), attention_mask=torch.tensor([[1, 1, 0, 0]])
        ),
        "row 0 of the attention mask",
    ),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSALS, ids=[sentence for _, sentence in REFUSALS])
def test_refusals_are_one_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        call()
    assert "\n" not in str(error.value)


def test_long_sparse_prompt_needs_the_attention_function():
    model = tiny_model(attention="sdpa")
    cache = kvkeep.EvictingCache(model.config, make(STREAMING))
    with pytest.raises(ValueError, match="a prompt of 30 tokens is longer than the budget of 16"):
        model(random_ids(30), past_key_values=cache)


def test_rewinding_is_refused():
    model = tiny_model()
    _, _, cache = decode(model, random_ids(30), make(STREAMING), [10])
    with pytest.raises(ValueError, match="cannot be rewound"):
        cache.crop(-3)
    with pytest.raises(ValueError):
        generate(model, random_ids(30), make(STREAMING), prompt_lookup_num_tokens=3)


def test_non_finite_keys_name_layer_and_step():
    model = tiny_model()
    for case in (RANDOM, H2O)[: 1 + HANDED]:
        cache = make_cache(model, make(case))
        for token in random_ids(20).split(1, 1):
            model(token, past_key_values=cache)
        broken = tiny_model()
        broken.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.inf
        with pytest.raises(ValueError, match="layer 1: values not finite at position 20"):
            broken(random_ids(1), past_key_values=cache)


def test_attention_policies_need_their_version_of_transformers(monkeypatch):
    monkeypatch.setattr("kvkeep.runtime.cache.transformers_version", lambda: Version("5.23.0"))
    with pytest.raises(ValueError, match=r"policy 'h2o' needs the queries: transformers >= 5.24.0, this is 5.23.0"):
        kvkeep.EvictingCache(tiny_model().config, make(H2O))


def test_a_cache_that_is_not_told_the_padding_asks_for_it(monkeypatch):
    monkeypatch.setattr("kvkeep.runtime.cache.transformers_version", lambda: Version("5.23.0"))
    layer = kvkeep.EvictingCache(tiny_model().config, make(STREAMING)).layers[0]
    with pytest.raises(ValueError, match=r"does not tell the cache which tokens of a batch are padding"):
        layer.update(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8))


def test_a_model_that_keeps_its_keywords_is_refused():
    layer = kvkeep.EvictingCache(tiny_model().config, make(STREAMING)).layers[0]
    if HANDED:
        with pytest.raises(ValueError, match="does not hand its attention's keywords to the cache"):
            layer.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))


def test_switching_attention_away_is_noticed():
    """A config that says "kvkeep" for a model that runs something else."""
    cache = make_cache(tiny_model(), make(STREAMING))
    other = tiny_model(attention="sdpa")
    other(random_ids(5), past_key_values=cache)
    if HANDED:
        with pytest.raises(ValueError, match="did not call kvkeep's attention"):
            other(random_ids(1), past_key_values=cache)


def test_bert_has_no_cache_to_bound():
    with pytest.raises(ValueError):
        kvkeep.EvictingCache(BertConfig(is_decoder=False), make(("h2o", BLOCKS, {})))


WRONG_TYPES = [
    (lambda model: kvkeep.EvictingCache(model.config, "h2o"), "not a LlamaConfig and a str"),
    (lambda model: kvkeep.EvictingCache(model, make(STREAMING)), "not a LlamaForCausalLM and a Streaming"),
    (lambda model: kvkeep.replay(model, random_ids(9), "h2o"), "a Tensor and a str"),
    (lambda model: kvkeep.replay(None, random_ids(9), make(STREAMING)), "not a NoneType"),
    (lambda model: kvkeep.replay(model, random_ids(9).numpy(), make(STREAMING)), "a ndarray"),
]


@pytest.mark.parametrize(("call", "sentence"), WRONG_TYPES, ids=[sentence for _, sentence in WRONG_TYPES])
def test_wrong_types_are_named(call, sentence):
    with pytest.raises(TypeError, match=sentence):
        call(tiny_model())


def test_cache_of_another_shape_is_refused_in_a_sentence():
    model, policy = tiny_model(), make(STREAMING)
    cache = make_cache(model, policy)
    model(random_ids(5), past_key_values=cache)
    with pytest.raises(ValueError, match="this cache holds 1 rows of 2 KV heads of size 8, the new tokens have 2, 2"):
        model(random_ids(1, batch=2), past_key_values=cache)
    with pytest.raises(ValueError, match="the cache was made for 2 layers; the model has a layer 2"):
        tiny_model("gemma3")(random_ids(5), past_key_values=make_cache(model, policy))
    with pytest.raises(ValueError, match=r"attention_mask must be \[1, 9\] like the ids, not \[1, 5\]"):
        kvkeep.replay(model, random_ids(9), policy, attention_mask=torch.ones(1, 5))


@pytest.mark.parametrize("slots", [10**14, 10**30])
def test_a_budget_that_does_not_fit_into_memory_is_refused_in_a_sentence(slots):
    model = tiny_model()
    cache = make_cache(model, kvkeep.policies.create("streaming", slots))
    with pytest.raises(ValueError, match=f"no memory for {slots} slots of 1 rows and 2 KV heads"):
        model(random_ids(5), past_key_values=cache)

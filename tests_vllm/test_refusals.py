"""What vLLM is told that cannot work is refused in a sentence, before any model is loaded."""

from __future__ import annotations

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

import kvkeep
from kvkeep.serving.pages import State
from kvkeep.serving.vllm.cpu import packed_place
from kvkeep.serving.vllm.served import Refused, served
from kvkeep.serving.vllm.spec import budget_spec

STREAMING = {"policy": "streaming", "budget": 64}


def configuration(folder, settings=STREAMING, **options):
    common = {"max_model_len": 512, "enable_prefix_caching": False, "enforce_eager": True}
    extra = {} if settings is None else {"additional_config": {"kvkeep": settings}}
    return EngineArgs(model=folder, **common | extra | options).create_engine_config()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"enable_prefix_caching": True}, "--no-enable-prefix-caching"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
            "speculative decoding .ngram.",
        ),
        ({"max_model_len": 65}, "64 tokens is never exceeded by sequences of at most 65"),
        ({"settings": {"policy": "streaming"}}, "need budget"),
        ({"settings": {"policy": "streaming", "budget": 30}}, "must be above sinks 4 . window 32"),
        ({"settings": {"policy": "golden", "budget": 64}}, "oracle"),
        ({"settings": {"policy": "kvpop", "budget": 64, "scorer": "nowhere-at-all"}}, "nowhere-at-all"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(options, complaint, model_folder):
    config = configuration(model_folder, **options)
    with pytest.raises(Refused, match=complaint) as refused:
        served(config)
    assert str(refused.value).startswith("kvkeep refuses: ")
    assert "\n" not in str(refused.value)


def test_vllm_without_our_settings_is_left_alone(model_folder):
    assert served(configuration(model_folder, None)) is None
    assert served(configuration(model_folder)).policy.name == "streaming"


def test_a_scorer_is_in_float32_whatever_the_model_is_built_in(model_folder):
    """vLLM builds models under a default dtype of its own; rounded to it a scorer would decide otherwise."""
    config = configuration(model_folder, {"policy": "kvpop_mlp", "budget": 64})
    torch.set_default_dtype(torch.bfloat16)
    try:
        scorer = served(config).policy.scorer
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert {tensor.dtype for tensor in scorer.state_dict().values()} == {torch.float32}
    assert scorer.fingerprint() == kvkeep.load_scorer("smollm2-135m/kvpop_mlp").fingerprint()


def test_a_block_holds_the_budget_rounded_up_and_what_belongs_to_it():
    spec = FullAttentionSpec(block_size=16, num_kv_heads=3, head_size=64, dtype=torch.float32)
    state = State({"positions": ((3, 50), torch.int32)})
    bounded = budget_spec(spec, 50, 32, state)
    assert (bounded.block_size, bounded.budget, bounded.prefix_cacheable) == (64, 50, False)
    assert bounded.page_size_bytes == bounded.max_memory_usage_bytes(None) == 3 * 64 * 128 * 4 + 640
    window = SlidingWindowSpec(block_size=16, num_kv_heads=3, head_size=64, dtype=torch.float32, sliding_window=9)
    with pytest.raises(ValueError, match="SlidingWindowSpec"):
        budget_spec(window, 50, 32, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("isa", "slots", "head_dim"), [("vec", 64, 64), ("vec", 288, 128), ("vec16", 48, 80)])
def test_every_number_of_a_pair_is_found(dtype, isa, slots, head_dim):
    place = packed_place(isa, dtype, slots, head_dim)
    assert torch.equal(place.flatten().sort().values, torch.arange(2 * slots * head_dim))
    assert bool((place[:, :head_dim] < slots * head_dim).all())

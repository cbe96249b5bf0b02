"""The plugin writes what the library writes, token by token, and its blocks hold what the library holds."""

from __future__ import annotations

import pytest
import torch
from engines import PROMPTS, engine, forget_positions, greedy, held_by
from vllm import SamplingParams

import kvkeep
from kvkeep.scorers.shipped import shipped
from kvkeep.serving.settings import Settings

NEW_TOKENS = 96
BUDGET = 64
SERVED = [
    "streaming",
    "random",
    "kvpop_mlp",
    "kvpop",
    "keydiff",
    "foresightkv",
    "h2o_decayed",
    "snapkv",
    "rkv",
    "expected_attention",
    "tova",
    "h2o",
]


def policy_of(name, model, budget=BUDGET):
    settings = Settings(name, budget)
    return settings.make(settings.scorer_for(model.config))


def agreement(model, ids, prompt, policy):
    """How many of the tokens after the prompt the library would have written too, given those before them."""
    result = kvkeep.replay(model, torch.tensor([ids]), policy, return_logits=True)
    chosen = result.logits[0, prompt - 1 : -1].argmax(-1)
    return int((chosen == torch.tensor(ids[prompt:])).sum()), result


def library_holds(model, ids, policy):
    """Positions held ``[layers, H, n]`` once all but the newest token have attended: it was never fed back."""
    lifetimes = kvkeep.replay(model, torch.tensor([ids[:-1]]), policy).evicted_at
    length = len(ids) - 1
    return torch.stack(
        [torch.stack([(head == length).nonzero().flatten() for head in layer[0]]) for layer in lifetimes]
    )


@pytest.mark.parametrize("name", SERVED)
def test_tokens_and_caches_are_the_librarys(name, model_folder, library):
    """Three prompts, batched: shorter than the budget, much longer, and in between; the long one in chunks too."""
    policy = policy_of(name, library)
    with engine(model_folder, name, BUDGET) as llm:
        greedy(llm, PROMPTS[:1], 2)  # lays the layers out
        forget_positions()
        written = greedy(llm, PROMPTS, NEW_TOKENS)
        held = [held_by(len(ids) - 1) for ids in written]
    prompts = [len(ids) - NEW_TOKENS for ids in written]
    assert min(prompts) < BUDGET < max(prompts)
    agreed = [agreement(library, ids, prompt, policy)[0] for ids, prompt in zip(written, prompts, strict=True)]
    assert agreed == [NEW_TOKENS] * 3
    for ids, got in zip(written, held, strict=True):
        assert torch.equal(got, library_holds(library, ids, policy))


def test_the_wrong_policy_is_noticed(model_folder, library):
    """The control: were the plugin to evict by another rule, both comparisons above would fail."""
    with engine(model_folder, "kvpop_mlp", BUDGET) as llm:
        greedy(llm, PROMPTS[:1], 2)
        forget_positions()
        written = greedy(llm, PROMPTS, NEW_TOKENS)
        held = [held_by(len(ids) - 1) for ids in written]
    wrong = policy_of("streaming", library)
    agreed = [agreement(library, ids, len(ids) - NEW_TOKENS, wrong)[0] for ids in written]
    assert sum(agreed) < 3 * NEW_TOKENS
    assert not any(torch.equal(got, library_holds(library, ids, wrong)) for ids, got in zip(written, held, strict=True))


@pytest.mark.parametrize("name", ["kvpop", "foresightkv", "keydiff"])
def test_chunks_of_a_prompt_change_nothing(name, model_folder, library):
    """A step takes in at most 48 tokens, so prompts come in pieces, beside requests that already write."""
    policy = policy_of(name, library)
    with engine(model_folder, name, BUDGET, max_num_batched_tokens=48, max_num_seqs=4) as llm:
        greedy(llm, PROMPTS[:1], 2)
        forget_positions()
        written = greedy(llm, PROMPTS, NEW_TOKENS)
        held = [held_by(len(ids) - 1) for ids in written]
    for ids, got in zip(written, held, strict=True):
        assert agreement(library, ids, len(ids) - NEW_TOKENS, policy)[0] == NEW_TOKENS
        assert torch.equal(got, library_holds(library, ids, policy))


@pytest.mark.parametrize("name", ["kvpop", "foresightkv", "keydiff"])
def test_a_preempted_request_is_recomputed_to_the_same_cache(name, model_folder, library):
    """All running requests lose their blocks half way and begin again, with what they have written as a prompt."""
    policy = policy_of(name, library)
    with engine(model_folder, name, BUDGET) as llm:
        greedy(llm, PROMPTS[:1], 2)
        forget_positions()
        parameters = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        for index, prompt in enumerate(PROMPTS):
            llm.llm_engine.add_request(str(index), prompt, parameters)
        finished, steps = {}, 0
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                if output.finished:
                    finished[output.request_id] = list(output.prompt_token_ids) + list(output.outputs[0].token_ids)
            steps += 1
            if steps == NEW_TOKENS // 2:
                forget_positions()
                assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        written = [finished[str(index)] for index in range(3)]
        held = [held_by(len(ids) - 1) for ids in written]
    for ids, got in zip(written, held, strict=True):
        assert agreement(library, ids, len(ids) - NEW_TOKENS, policy)[0] == NEW_TOKENS
        assert torch.equal(got, library_holds(library, ids, policy))


def test_a_scorer_is_shipped_for_the_learned_ones(library):
    assert all(shipped(name, library.config) for name in ("kvpop_mlp", "kvpop", "foresightkv"))

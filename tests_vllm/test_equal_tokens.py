"""The plugin writes what the library writes, token by token, and its blocks hold what the library holds."""

from __future__ import annotations

import functools

import pytest
import torch
from engines import run

import kvkeep
from kvkeep.serving.settings import Settings

NEW_TOKENS = 96
BUDGET = 64
IN_PIECES = {"max_num_batched_tokens": 48, "max_num_seqs": 4}  # prompts come beside requests that already write
PREEMPTED = (60, 30)  # tokens, and the step at which all requests lose their blocks
TOGETHER = (  # every policy that generates, by the process that runs it, and how its engine takes prompts in
    {"streaming": {}, "kvpop_mlp": {}, "kvpop": IN_PIECES, "random": IN_PIECES},
    {"keydiff": IN_PIECES, "foresightkv": IN_PIECES, "h2o_decayed": {}},
    {"tova": {}, "h2o": IN_PIECES, "snapkv": {}, "rkv": IN_PIECES, "expected_attention": {}},
)
EVERY = [*TOGETHER[0], *TOGETHER[1], *(pytest.param(name, marks=pytest.mark.long) for name in TOGETHER[2])]


def policy_of(name, model):
    settings = Settings(name, BUDGET)
    return settings.make(settings.scorer_for(model.config))


@pytest.fixture(scope="session")
def written(model_folder, tmp_path_factory):
    """What an engine under a policy writes and holds, undisturbed and preempted; run once."""

    @functools.cache
    def process(index):
        common = {"model": model_folder, "runs": [(NEW_TOKENS, 0), PREEMPTED]}
        jobs = [
            common | {"settings": Settings(name, BUDGET).to_json(), "engine": options}
            for name, options in TOGETHER[index].items()
        ]
        return dict(zip(TOGETHER[index], run(jobs, tmp_path_factory.mktemp("engines")), strict=True))

    return lambda name: process(next(i for i, names in enumerate(TOGETHER) if name in names))[name]


def disagreements(model, ids, count, policy):
    """Which of the last ``count`` tokens the library would not have written, given those before them."""
    logits = kvkeep.replay(model, torch.tensor([ids]), policy, return_logits=True).logits
    chosen = logits[0, -count - 1 : -1].argmax(-1)
    return (chosen != torch.tensor(ids[-count:])).nonzero().flatten().tolist()


def library_holds(model, ids, policy):
    """Positions held ``[layers, H, n]`` once all but the newest token have attended: it was never fed back."""
    lifetimes = kvkeep.replay(model, torch.tensor([ids[:-1]]), policy).evicted_at
    length = len(ids) - 1
    return torch.stack(
        [torch.stack([(head == length).nonzero().flatten() for head in layer[0]]) for layer in lifetimes]
    )


@pytest.mark.parametrize("name", EVERY)
def test_tokens_are_the_librarys(name, written, library):
    """Three prompts, batched: shorter than the budget, much longer, and in between."""
    ids = written(name)[0]["ids"]
    assert min(map(len, ids)) < BUDGET + NEW_TOKENS < max(map(len, ids)) - BUDGET
    policy = policy_of(name, library)
    assert [disagreements(library, one, NEW_TOKENS, policy) for one in ids] == [[], [], []]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("turn", [0, 1], ids=["undisturbed", "preempted"])
def test_blocks_hold_what_the_library_holds(name, turn, written, library):
    """Also where every request lost its block half way and began again, with what it had written as a prompt."""
    policy = policy_of(name, library)
    for ids, held in zip(*(written(name)[turn][key] for key in ("ids", "held")), strict=True):
        assert torch.equal(held, library_holds(library, ids, policy))


@pytest.mark.parametrize("name", EVERY)
def test_preemption_changes_no_token(name, written):
    undisturbed, preempted = written(name)
    for long, short in zip(undisturbed["ids"], preempted["ids"], strict=True):
        assert short == long[: len(short)]
        assert len(long) - len(short) == NEW_TOKENS - PREEMPTED[0]


def test_the_wrong_policy_is_noticed(written, library):
    """The control: were the plugin to evict by another rule, both comparisons would fail."""
    result, wrong = written("kvpop_mlp")[0], policy_of("streaming", library)
    assert sum(len(disagreements(library, ids, NEW_TOKENS, wrong)) for ids in result["ids"]) > 0
    for ids, held in zip(result["ids"], result["held"], strict=True):
        assert not torch.equal(held, library_holds(library, ids, wrong))

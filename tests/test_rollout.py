"""What ForesightKV's rollouts record of every draw, and the texts that a model writes under eviction."""

from __future__ import annotations

import itertools

import pytest
import torch

import kvkeep
from kvkeep.policies.foresightkv import ForesightKV
from kvkeep.scorers.features import FeatureSpec
from kvkeep.training import losses, rollout
from kvkeep.training.reinforce import evict_logits
from kvkeep.training.rollout import FullCache, Recorder, consequential, seed_of, write_text
from test_reinforce import BUDGET, SINKS, group_of, reinforce, scorer_for
from tiny import HANDED, random_ids, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


@pytest.fixture(scope="module")
def exact():
    return tiny_model()


# ---- what is recorded


class Told(Recorder):
    """Keeps scores and draws as they were made, over slots."""

    def draw(self, scores, held):
        drawn = super().draw(scores, held)
        told = (scores.clone(), held.candidates.clone(), drawn)
        self.__dict__.setdefault("_told", {}).setdefault(held.geometry.layer, []).append(told)
        return drawn


@pytest.mark.parametrize("listed", ["pool", "candidates"])
@pytest.mark.parametrize("features", [FeatureSpec.best(), FeatureSpec(windows=(2, "L"), keys="pre")])
def test_recorded_decisions_have_the_probability_with_which_the_policy_drew_them(exact, features, listed):
    scorer, length = scorer_for(exact, SINKS, features=features), 45
    policy = Told(SINKS, scorer, [5, 6, 7], length, listed=listed)
    kvkeep.replay(exact, random_ids(length).expand(3, -1), policy)
    found = policy.decisions()
    assert list(found) == [0, 1]
    for layer, decisions in found.items():
        logits = evict_logits(scorer, layer, decisions.features)  # [G, M, H, C]
        count = 2 * SINKS.interval if listed == "pool" else SINKS.rest + SINKS.interval - SINKS.sinks - SINKS.window
        assert logits.shape == (3, consequential(SINKS, length), 2, count)
        for eviction, (scores, candidates, drawn) in enumerate(policy._told[layer][: logits.shape[1]]):
            order = decisions.order[:, eviction]
            its = losses.plackett_luce(-scores, drawn.order, drawn.pool)
            torch.testing.assert_close(losses.plackett_luce(logits[:, eviction, :, : 2 * 3], order), its)
            if listed == "candidates":
                its = losses.independent_log_prob(-scores.masked_fill(~candidates, torch.inf), drawn.order)
                torch.testing.assert_close(losses.independent_log_prob(logits[:, eviction], order), its)


def test_the_lowest_keep_scores_are_the_pool_and_come_first(exact):
    group, scorer = group_of(exact)
    logits = evict_logits(scorer, 1, group.decisions[1].features)
    assert (logits.diff(dim=-1) <= 0).all()
    assert logits.shape[-1] == 2 * BUDGET.interval


@pytest.mark.parametrize("budget", [BUDGET, SINKS])
def test_an_eviction_that_no_loss_can_tell_of_is_not_recorded(exact, budget):
    """Spec 11, row 8: the released code credits one more, whose reward is that of the others."""
    for length in range(budget.slots + 1, budget.slots + 2 * budget.interval + 3):
        told = consequential(budget, length)
        group, scorer = group_of(exact, length=length, budget=budget)
        assert {its.order.shape[1] for its in group.decisions.values()} == ({told} if told else set())
        gone = kvkeep.replay(exact, random_ids(length), ForesightKV(budget, scorer)).evicted_at[0]
        assert len(gone[gone < length - 1].unique()) == told


def test_draws_repeat_with_their_seeds_and_differ_between_members(exact):
    first, scorer = group_of(exact)
    again, _ = group_of(exact, scorer)
    for layer in (0, 1):
        assert torch.equal(first.decisions[layer].order, again.decisions[layer].order)
        assert torch.equal(first.decisions[layer].features, again.decisions[layer].features)
    for one, other in itertools.combinations(first.decisions[0].order, 2):
        assert not torch.equal(one, other)
    assert len(set(first.token_loss[:, -1].tolist())) == 3


@pytest.mark.parametrize("rows", [1, 2])
def test_a_group_is_its_members_alone(exact, rows):
    whole, scorer = group_of(exact)
    parts, _ = group_of(exact, scorer, rows=rows)
    torch.testing.assert_close(parts.token_loss, whole.token_loss)
    for layer in (0, 1):
        assert torch.equal(parts.decisions[layer].order, whole.decisions[layer].order)
        torch.testing.assert_close(parts.decisions[layer].features, whole.decisions[layer].features)


def test_chosen_evictions_are_those_of_the_whole(exact):
    whole, scorer = group_of(exact)
    some, _ = group_of(exact, scorer, chosen=[1, 4])
    for layer in (0, 1):
        assert torch.equal(some.decisions[layer].order, whole.decisions[layer].order[:, [1, 4]])
        assert torch.equal(some.decisions[layer].features, whole.decisions[layer].features[:, [1, 4]])
    assert group_of(exact, scorer, chosen=())[0].decisions == {}


def test_what_is_recorded_is_float32(model):
    group, _ = group_of(model)
    assert group.token_loss.dtype == group.decisions[0].features.dtype == torch.float32
    half, _ = group_of(tiny_model(dtype=torch.bfloat16))
    assert half.token_loss.dtype == half.decisions[0].features.dtype == torch.float32


def test_the_full_cache_is_measured_once_a_text(exact, monkeypatch):
    full, ids = FullCache(exact), random_ids(30)[0]
    first = full(ids)
    run = kvkeep.replay(exact, ids[None], kvkeep.policies.create("full"))
    assert torch.equal(first.token_loss, run.token_loss[0])
    assert torch.equal(first.entropy, run.entropy[0])
    full(random_ids(30, seed=1)[0], remember=False)
    monkeypatch.setattr(rollout, "replay", None)
    assert full(ids.clone()) is first
    with pytest.raises(TypeError):
        full(random_ids(30, seed=1)[0])


# ---- texts that the model writes


class Going(ForesightKV):
    """Keeps which tokens go, by layer and query."""

    def draw(self, scores, held):
        drawn = super().draw(scores, held)
        its = self.__dict__.setdefault("_went", {})
        its[held.geometry.layer, held.query_index] = held.positions[:1].gather(-1, drawn.order[:1]).tolist()
        return drawn


def test_the_policy_sees_the_states_that_it_led_to(exact):
    """A written text, replayed with the seed it was written under, loses the same tokens at the same queries."""
    scorer, prompt = scorer_for(exact), random_ids(BUDGET.slots)[0]
    policy = Going(BUDGET, scorer, "sample", 2, [11])
    if not HANDED:
        with pytest.raises(ValueError, match="needs the queries"):
            write_text(exact, prompt, 50, policy, 1.0, seed=5)
        return
    ids = write_text(exact, prompt, 50, policy, 1.0, seed=5)
    assert ids.shape == (50,)
    assert torch.equal(ids[: len(prompt)], prompt)
    group = Going(BUDGET, scorer, "sample", 2, [11, 12])
    kvkeep.replay(exact, ids.expand(2, -1), group)
    queries = range(BUDGET.slots, 50, BUDGET.interval)  # the last of them is the last token's, which is never fed back
    assert set(group._went) == {(layer, query) for layer in (0, 1) for query in queries}
    assert policy._went == {at: went for at, went in group._went.items() if at[1] < 49}
    assert torch.equal(ids, write_text(exact, prompt, 50, policy, 1.0, seed=5))
    assert not torch.equal(ids, write_text(exact, prompt, 50, policy, 1.0, seed=6))
    other = ForesightKV(BUDGET, scorer, "sample", 2, [12])
    assert not torch.equal(ids, write_text(exact, prompt, 50, other, 1.0, seed=5)), "evictions change what is written"


@pytest.mark.skipif(not HANDED, reason="writing needs the queries, see the test above")
def test_written_tokens_are_drawn_from_the_evicted_model_and_never_end_the_text(exact, monkeypatch):
    scorer, prompt = scorer_for(exact), random_ids(BUDGET.slots)[0]
    policy = ForesightKV(BUDGET, scorer, "sample", 2, [11])
    cold = write_text(exact, prompt, 40, policy, 1e-4, seed=0)
    logits = kvkeep.replay(exact, cold[None], policy, return_logits=True).logits[0]
    assert torch.equal(logits[BUDGET.slots - 1 : -1].argmax(-1), cold[BUDGET.slots :])
    banned = int(cold[BUDGET.slots])
    monkeypatch.setattr(exact.generation_config, "eos_token_id", [banned])
    assert banned not in write_text(exact, prompt, 40, policy, 1e-4, seed=0)[BUDGET.slots :]


@pytest.mark.skipif(not HANDED, reason="writing needs the queries, see the test above")
def test_a_group_shares_the_text_that_its_first_member_led_to(exact, tmp_path, monkeypatch):
    fit = reinforce(exact, tmp_path, rollout="generate")
    (task,) = fit.train[:1]
    seen = []
    monkeypatch.setattr(
        type(fit.rollouts), "group", lambda self, scorer, ids, *rest: seen.append((ids, rest)) or (0, 0)
    )
    with pytest.raises(AttributeError):
        next(fit.groups([(4, task)], {"groups": 0, "tokens": 0}))
    ((ids, (budget, own, chosen, remember)),) = seen
    assert own == [seed_of(0, 0, 4, member) for member in range(3)]
    assert (budget, chosen, remember) == (BUDGET, None, False)
    policy = ForesightKV(BUDGET, fit.scorer, "sample", 2, own[:1])
    assert torch.equal(ids, write_text(exact, task.ids[: BUDGET.slots], 40, policy, 1.0, seed_of(0, 0, 4, "text")))

"""The caches that `kvkeep benchmark` measures, the reference that decides nothing, and their bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import kvkeep
from benchmarked import BUDGET, CONTEXT, INTERVALS, NAMES, equipped, feed, states_for
from kvkeep.benchmark import memory
from kvkeep.benchmark.caches import (
    FULL,
    bytes_of,
    cache_bytes,
    contenders,
    filled,
    filled_policy,
    phase,
    reachable_bytes,
    writes_only,
)
from tiny import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


# --- Caches ----------------------------------------------------------------------------------------------------------


def test_the_caches_that_keep_everything_are_the_same_cache(model):
    states = states_for(model, batch=2)
    logits = []
    for name in FULL:
        cache, seen = filled(model, *equipped(model, name), BUDGET, CONTEXT, states, spare=4)
        assert seen == CONTEXT
        logits.append(feed(model, cache, seen, count=4, batch=2))
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=0, atol=1e-5)
    assert logits[0].std() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_filled_caches_hold_what_the_policy_would_and_go_on(model, name):
    (contender,) = equipped(model, name)
    policy = contender.policy(BUDGET)
    held, seen = phase(policy.budget, CONTEXT)
    assert abs(seen - CONTEXT) <= policy.budget.interval
    cache = filled_policy(model.config, policy, held, seen, states_for(model))
    before = cache.evicted
    feed(model, cache, seen)
    positions = cache.evicting_layers[0].positions[0]
    assert bool((positions.amax(-1) == seen).all())
    if policy.budget.interval > 1:
        assert int((positions >= 0).sum(-1).min()) == held + 1
        assert cache.evicted == before


@pytest.mark.parametrize("name", INTERVALS)
def test_the_next_token_of_an_evicting_phase_evicts_an_interval(model, name):
    (contender,) = equipped(model, name)
    policy = contender.policy(BUDGET)
    held, seen = phase(policy.budget, CONTEXT, evicting=True)
    assert held == policy.budget.slots
    cache = filled_policy(model.config, policy, held, seen, states_for(model))
    before = cache.evicted
    feed(model, cache, seen)
    assert cache.evicted - before == policy.budget.interval


@pytest.mark.parametrize("budget", [kvkeep.Budget(2, 4, 10), kvkeep.Budget(0, 2, 9, 5), kvkeep.Budget(0, 0, 7, 1)])
def test_the_reference_shows_as_many_slots_as_a_policy_and_never_chooses(model, budget):
    states = states_for(model)
    held, seen = phase(budget, CONTEXT)
    cache = writes_only(model.config, budget, held, seen, states)
    layer = cache.layers[0]
    generator = torch.Generator().manual_seed(1)
    shape = (1, states.kv_heads, 1, states.head_dim)
    widths, places = [], []
    for _ in range(3 * budget.slots):
        keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
        shown, shown_values = layer.update(keys, values)
        hit = (shown == keys).all(-1)[0]  # [heads, slots]
        assert bool((hit.sum(-1) == 1).all())
        assert torch.equal(hit, (shown_values == values).all(-1)[0])
        assert bool((hit == hit[0]).all())
        widths.append(shown.shape[2])
        places.append(int(hit[0].float().argmax()) + budget.slots - shown.shape[2])
    assert cache.layers[0].get_seq_length() == seen + 3 * budget.slots
    if not budget.interval:
        assert set(widths) == {budget.rest}
        assert all(b == (a + 1) % budget.rest for a, b in pairwise(places))
    else:
        rising = [budget.rest + 1 + (held - budget.rest + step) % budget.interval for step in range(len(widths))]
        assert widths == rising
        assert places == [budget.slots - width for width in widths]
    assert {name for name, part in vars(layer).items() if isinstance(part, torch.Tensor)} <= {"keys", "values"}


@pytest.mark.parametrize("name", [*INTERVALS, "kvpop_mlp"])
def test_policy_and_reference_attend_over_as_many_slots_at_every_step(model, name):
    (contender,) = equipped(model, name)
    policy = contender.policy(BUDGET)
    states = states_for(model)
    held, seen = phase(policy.budget, CONTEXT)
    cache = filled_policy(model.config, policy, held, seen, states)
    reference = writes_only(model.config, policy.budget, held, seen, states)
    for step in range(policy.budget.interval + 3):
        feed(model, cache, seen + step)
        feed(model, reference, seen + step)
        shown = int((cache.evicting_layers[0].positions[0, 0] >= 0).sum())
        assert shown == reference.layers[0].keys.shape[2]


def test_contenders_are_named_once_and_decode():
    assert [one.title for one in contenders(["full", "snapkv:observation=4", "static"])] == [
        *("full", "static", "snapkv:observation=4")
    ]
    for names, words in (
        (["golden"], "is an oracle"),
        (["full", "full"], "'full' is named twice"),
        (["streaming", "streaming"], "'streaming' is named twice"),
        ([], "no policy is named"),
        (["h3o"], "did you mean 'h2o'"),
    ):
        with pytest.raises(ValueError, match=words):
            contenders(names)


# --- Bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_the_formula_and_the_stated_side_state(model, name):
    (contender,) = equipped(model, name)
    policy = contender.policy(BUDGET)
    states = states_for(model, batch=2)
    cache = filled_policy(model.config, policy, *phase(policy.budget, CONTEXT), states)
    pairs, side = cache_bytes(cache)
    assert pairs == policy.budget.slots * 2 * 8 * 4 * 2 * 2 * 2 == bytes_of(states, policy.budget.slots, 2)
    held = sum(reachable_bytes(layer.residency) for layer in cache.evicting_layers)
    assert 0 < side <= held - pairs <= side + memory.COUNTERS * 4


def test_memory_counts_every_policy_and_finds_no_growth(model):
    rows = memory.memory(model, equipped(model, "full", *NAMES), BUDGET, tokens=70)
    assert [row["policy"] for row in rows] == NAMES
    assert {row["grown_bytes"] for row in rows} == {0}
    for row in rows:
        slots = next(one for one in equipped(model, row["policy"])).policy(BUDGET).budget.slots
        assert row["kv_bytes"] - row["side_bytes"] == slots * 2 * 8 * 4 * 2 * 2


def test_a_cache_that_grows_or_hides_something_is_found(model, monkeypatch):
    (contender,) = equipped(model, "streaming")
    kind = type(contender.policy(BUDGET))
    monkeypatch.setattr(kind, "new_memory", lambda *_: {"log": torch.zeros(1, 1)})

    def hoard(self, step):
        step.memory["log"] = torch.cat([step.memory["log"], torch.zeros(1, 1)], 1)
        return step.leaving[0].new_zeros(step.leaving[0].shape[:3])

    monkeypatch.setattr(kind, "priority", hoard)
    monkeypatch.setattr(kind, "loop", lambda *_: None)
    (row,) = memory.memory(model, [contender], BUDGET, tokens=10)
    assert row["grown_bytes"] == 2 * 10 * 4
    cache = filled_policy(model.config, contender.policy(BUDGET), BUDGET, CONTEXT, states_for(model))
    formula = bytes_of(states_for(model), BUDGET, 2)
    hidden = sum(reachable_bytes(layer.residency) for layer in cache.evicting_layers) + 10_000
    with pytest.raises(RuntimeError, match="bytes are held, and the cache tells of"):
        memory._require_account("streaming", cache, formula, hidden, rows=2)
    with pytest.raises(RuntimeError, match="by the formula"):
        memory._require_account("streaming", cache, formula + 8, hidden - 10_000, rows=2)


def test_reachable_bytes_count_a_storage_once_and_no_policy():
    tensor = torch.zeros(10)

    class Holder:
        pass

    holder = Holder()
    holder.parts = {"whole": tensor, "views": [tensor[2:], (tensor.view(2, 5),)]}
    holder.other = Holder()
    holder.other.back, holder.other.own = holder, torch.zeros(3, dtype=torch.int64)
    holder.network = torch.nn.Linear(9, 9)
    assert reachable_bytes(holder) == 40 + 24


def test_capacity_is_the_largest_batch_that_fits(model):
    rows = memory.capacity(model, equipped(model, "full", "streaming"), BUDGET, CONTEXT, 200_000)
    one_row = {"full": CONTEXT * 256, "streaming": BUDGET * 256}  # a token: 2 layers, 2 heads of 8, a pair, 4 bytes
    for row in rows:
        assert (
            row["kv_bytes"] <= 200_000 < row["kv_bytes"] / row["batch"] * (row["batch"] + 1) + 12 * 256 * row["batch"]
        )
        assert row["kv_bytes"] - row["side_bytes"] >= row["batch"] * one_row[row["policy"]]
    assert rows[0]["ratio"] == 1
    assert rows[1]["batch"] > rows[0]["batch"]
    assert rows[1]["ratio"] == pytest.approx(rows[1]["tokens_per_second"] / rows[0]["tokens_per_second"], abs=1e-3)
    with pytest.raises(ValueError, match=r"needs 0\.0 MB for one row at 90 tokens, more than the 0\.0 MB"):
        memory.capacity(model, equipped(model, "full"), BUDGET, CONTEXT, 1000)

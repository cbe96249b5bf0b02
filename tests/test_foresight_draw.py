"""ForesightKV's draw: the spec's exact frequencies, and that it depends on nothing but its seed."""

from __future__ import annotations

import pytest
import torch

import kvkeep
from all_policies import random_scorer
from kvkeep.policies.base import Geometry, Held
from kvkeep.policies.foresightkv import ForesightKV, gumbel
from tiny import random_ids, tiny_model


def drawing(scores, count, seed=0, pool=2, query=9):
    """Draw from keep scores ``[B, H, N]`` of tokens 0 .. N - 1."""
    batch, heads, number = scores.shape
    policy = object.__new__(ForesightKV)
    policy.pool = pool
    positions = torch.arange(number, dtype=torch.int32).expand(batch, heads, number)
    held = Held(
        geometry=Geometry(0, heads, 1, 1, 1.0),
        query_index=query,
        evictions=0,
        keys=None,
        values=None,
        positions=positions,
        statistics={},
        memory={"seed": torch.arange(batch) + seed},
        queries=None,
        candidates=torch.ones(batch, heads, number, dtype=torch.bool),
        count=count,
    )
    return policy.draw(scores, held)


def test_p2_pool_and_frequencies():
    """Spec 9, P2: eviction logits ln(4, 3, 2, 1)."""
    keep = -torch.tensor([4.0, 3, 2, 1]).log().expand(200_000, 1, 4)
    drawn = drawing(keep, 1)
    assert set(drawn.pool.flatten().tolist()) == {0, 1}
    share = (drawn.order == 0).double().mean()
    assert share == pytest.approx(4 / 7, abs=0.004)
    sets = drawing(keep, 2, pool=None).order[:, 0].sort(-1).values
    assert (sets == torch.tensor([0, 2])).all(-1).double().mean() == pytest.approx(7 / 30, abs=0.003)


def test_p2_what_is_merely_unlikely_goes_before_what_is_impossible():
    keep = torch.tensor([0.0, 200, 300, 1]).expand(1000, 1, 4)
    assert set(drawing(keep, 3, pool=None).order.flatten().tolist()) == {0, 1, 3}


def test_p2_the_same_seed_draws_the_same_whatever_the_batch():
    keep = torch.randn(6, 2, 40, generator=torch.Generator().manual_seed(1))
    whole = drawing(keep, 5, seed=11)
    for row in range(6):
        alone = drawing(keep[row : row + 1], 5, seed=11 + row)
        assert torch.equal(alone.order[0], whole.order[row])
    assert not torch.equal(drawing(keep, 5, seed=12).order, whole.order)


def test_noise_is_gumbel():
    noise = gumbel(torch.tensor([5]), 3, torch.arange(100_000)[None, None], 7)
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)
    assert noise.var() == pytest.approx(torch.pi**2 / 6, abs=0.04)


def test_sampling_keeps_all_but_what_was_drawn():
    model, ids = tiny_model(), random_ids(48)
    budget = kvkeep.Budget(sinks=0, window=5, topk=8, interval=4)
    scorer = random_scorer("foresightkv", model.config, budget)
    lifetimes = {}
    for seed in (0, 1):
        for evict in ("topk", "sample"):
            policy = kvkeep.policies.create("foresightkv", budget, scorer=scorer, evict=evict, seed=seed)
            lifetimes[evict, seed] = kvkeep.replay(model, ids, policy).evicted_at[0]
    assert torch.equal(lifetimes["topk", 0], lifetimes["topk", 1])
    assert not torch.equal(lifetimes["sample", 0], lifetimes["sample", 1])
    assert torch.equal(*(lifetimes["sample", 0].sort(-1).values, lifetimes["topk", 0].sort(-1).values))


def test_a_seed_for_every_row():
    model, ids = tiny_model(), random_ids(48).expand(2, -1)
    budget = kvkeep.Budget(sinks=0, window=5, topk=8, interval=4)
    scorer = random_scorer("foresightkv", model.config, budget)

    def gone(ids, seed):
        policy = kvkeep.policies.create("foresightkv", budget, scorer=scorer, evict="sample", seed=seed)
        return kvkeep.replay(model, ids, policy).evicted_at[1]

    both = gone(ids, (3, 4))
    assert torch.equal(both[:1], gone(ids[:1], 3))
    assert torch.equal(both[1:], gone(ids[1:], 4))
    with pytest.raises(ValueError, match="a seed for every row of the batch: 3 for 2 rows"):
        gone(ids, (1, 2, 3))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"pool": 1.5}, "the pool is 1 or more times what goes, or None for all candidates, not 1.5"),
        ({"pool": "all"}, "not 'all'"),
        ({"pool": 0}, "not 0"),
        ({"pool": 3}, "a pool of 3 is drawn from by evict='sample' alone"),
        ({"seed": "x"}, "a seed is an integer, not 'x'"),
        ({"seed": 1.5}, "a seed is an integer, not 1.5"),
        ({"seed": [1, True]}, "a seed is an integer, not True"),
    ],
)
def test_options_of_another_type_are_refused_before_anything_runs(options, sentence):
    scorer = random_scorer("foresightkv", tiny_model().config, [24])
    with pytest.raises(ValueError, match=sentence):
        kvkeep.policies.create("foresightkv", 24, scorer=scorer, **options)
    if "pool" not in options:
        with pytest.raises(ValueError, match="a seed is an integer"):
            kvkeep.policies.create("random", 64, **options)

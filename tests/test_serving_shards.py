"""Heads spread over devices decide what they decide together: tensor parallelism without exchange."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kvkeep
from all_policies import ENTRY, SINKS, random_scorer
from kvkeep import Budget
from kvkeep.policies.base import Geometry
from kvkeep.runtime.cache import RESIDENCIES
from kvkeep.scorers import LayerShape, Layout
from kvkeep.serving.shards import Shard
from tiny import tiny_model

HEADS, GROUP, SIZE, LENGTH, LAYER = 4, 2, 8, 60, 1


def sequence(seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, HEADS * GROUP, LENGTH, SIZE, dtype=torch.float64, generator=generator) * 2
    keys, values = torch.randn(2, 1, HEADS, LENGTH, SIZE, dtype=torch.float64, generator=generator)
    return query, keys, values


def lifetimes(policy, geometry, query, keys, values):
    residency = RESIDENCIES[policy.kind](policy, geometry, keys, values)
    residency.record_lifetimes(LENGTH)
    residency.ingest(query, keys, values)
    return residency.lifetimes


CASES = [
    ("random", ENTRY, {"seed": 5}, {}),
    ("kvpop_mlp", ENTRY, {}, {"log_gamma": -0.3, "decay_step": 4}),
    ("kvpop", ENTRY, {}, {"features": 4, "log_gamma": -0.2, "decay_step": 8}),
    ("foresightkv", SINKS, {"evict": "sample", "seed": 7}, {}),
    ("h2o_decayed", SINKS, {}, {}),
    ("keydiff", SINKS, {}, {}),
]


def policies_for(name, budget, options, made, shard, config):
    """The policy of the whole model and that of one device."""
    if not made and name != "foresightkv":
        return [kvkeep.policies.create(name, budget, **options)] * 2
    scorer = random_scorer(name, config, budget, **made)
    return [kvkeep.policies.create(name, budget, scorer=one, **options) for one in (scorer, shard.scorer(scorer))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
@pytest.mark.parametrize("size", [2, 4])
def test_every_device_decides_as_the_whole_does(case, size):
    config = tiny_model(kv_heads=HEADS, group=GROUP).config
    query, keys, values = sequence()
    whole_shape = next(shape for shape in Layout.of(config).bounded if shape.index == LAYER)
    together = None
    for rank in range(size):
        shard = Shard(rank, size)
        whole, part = policies_for(*case, shard, config)
        if together is None:
            together = lifetimes(whole, Geometry(LAYER, HEADS, GROUP, SIZE, 0.4), query, keys, values)
            assert (together < LENGTH).any()
        shape, first = shard.shape(whole_shape), shard.first_head(whole_shape)
        kv, q = slice(first, first + shape.kv_heads), slice(rank * shape.query_heads, (rank + 1) * shape.query_heads)
        geometry = Geometry(LAYER, shape.kv_heads, GROUP, SIZE, 0.4, first_head=first)
        alone = lifetimes(part, geometry, query[:, q], keys[:, kv], values[:, kv])
        assert torch.equal(alone, together[:, kv])


def test_heads_that_draw_or_score_by_another_index_differ():
    """The control: without the offset of the first head the second device would decide as the first."""
    query, keys, values = sequence()
    policy = kvkeep.policies.create("random", ENTRY, seed=5)
    half = keys[:, :2], values[:, :2]
    ends = [
        lifetimes(policy, Geometry(LAYER, 2, GROUP, SIZE, 0.4, first_head=first), query[:, :4], *half)
        for first in (0, 2)
    ]
    assert not torch.equal(*ends)


@pytest.mark.parametrize("name", ["kvpop_mlp", "kvpop"])
def test_more_devices_than_kv_heads_hold_copies_of_one(name):
    config = tiny_model(kv_heads=2, group=4).config
    scorer = random_scorer(name, config, ENTRY)
    shape = Layout.of(config).bounded[0]
    firsts = [Shard(rank, 8).first_head(shape) for rank in range(8)]
    assert firsts == [0, 0, 0, 0, 1, 1, 1, 1]
    assert Shard(5, 8).shape(shape) == replace(shape, kv_heads=1, query_heads=1)
    for rank in (3, 4):
        part = Shard(rank, 8).scorer(scorer)
        for index in part.layers:
            for (_, whole), (_, own) in zip(
                scorer.layers[index].state_dict().items(), part.layers[index].state_dict().items(), strict=True
            ):
                assert torch.equal(own, whole[rank // 4 : rank // 4 + 1])


def test_one_device_gets_the_scorer_itself_and_the_whole_is_left_alone():
    scorer = random_scorer("kvpop_mlp", tiny_model().config, ENTRY)
    before = scorer.fingerprint()
    assert Shard().scorer(scorer) is scorer
    part = Shard(1, 2).scorer(scorer)
    assert part.fingerprint() != before
    assert scorer.fingerprint() == before
    assert part.decay_factor(17) == scorer.decay_factor(17)


def test_what_cannot_be_split_is_refused():
    layout = Layout(1, (LayerShape(0, 2, 6, 8),), {})
    with pytest.raises(ValueError, match="6 query and 2 KV heads of layer 0 do not divide over 4 devices"):
        Shard(0, 4).shape(layout.bounded[0])
    watching = kvkeep.policies.create("h2o", 40)
    with pytest.raises(ValueError, match="policy 'h2o' reads the attention of all query heads"):
        Shard(0, 6).require_serves(watching, layout)
    with pytest.raises(ValueError, match="policy 'tova' makes one choice for all heads"):
        Shard(0, 2).require_serves(kvkeep.policies.create("tova", 40), layout)
    Shard(0, 2).require_serves(kvkeep.policies.create("tova", Budget(0, 0, 39, 1), per_head=True), layout)
    Shard(0, 6).require_serves(kvkeep.policies.create("keydiff", 40), layout)
    Shard(0, 1).require_serves(kvkeep.policies.create("tova", 40), layout)

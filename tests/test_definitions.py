"""The policies by the numbers and properties of their definitions: worked examples, schedule, the oracle's bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import Budget, policies
from kvkeep.lifetimes import visible
from kvkeep.policies.base import Geometry, Held
from kvkeep.policies.rkv import key_similarity
from kvkeep.policies.snapkv import max_pool, observation_scores
from kvkeep.runtime.interval import IntervalResidency
from kvkeep.sparse_attention import live_attention
from test_attention_mass import dense_blocks, dense_logits, heads_from_weights, random_heads


def watch(policy, query, key, value=None, scaling=1.0):
    """One layer that has seen the whole sequence in one piece, with its lifetimes."""
    geometry = Geometry(0, key.shape[1], query.shape[1] // key.shape[1], key.shape[-1], scaling)
    value = torch.ones_like(key) if value is None else value
    residency = IntervalResidency(policy, geometry, key, value)
    if policy.oracle:
        residency.memory = policy.foresee(geometry, query, key)
    residency.record_lifetimes(key.shape[2])
    residency.output = residency.ingest(query, key, value)
    return residency


def by_position(residency, name):
    """Positions held and one statistic, oldest first, as numbers of the only row and head."""
    slots = residency.slots
    positions, order = slots.view(slots.positions)[0, 0].sort()
    return positions.tolist(), slots.view(slots.extras[name])[0, 0, order]


def close(got, expected, tolerance=1e-12):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), rtol=0, atol=tolerance)


def held_tokens(keys, queries, positions=None):
    """What a policy is shown when it must choose; keys ``[B, H, N, D]``, queries ``[B, H, G, r, D]``."""
    batch, heads, count, size = keys.shape
    positions = torch.arange(count).expand(batch, heads, -1) if positions is None else positions
    geometry = Geometry(0, heads, queries.shape[2], size, scaling=1.0)
    everyone = torch.ones(positions.shape, dtype=torch.bool)
    return Held(geometry, count, 0, keys, torch.ones_like(keys), positions.int(), {}, {}, queries, everyone, 1)


# --- TOVA ------------------------------------------------------------------------------------------------------------


def test_kvpop_12_14_tova_drops_what_the_newest_query_attends_to_least():
    first = [[1, 0], [0, 1], [1, 1], [1, -1], [0, 2], [0, 0]]
    second = [[0, 1], [1, 0], [0, 0], [2, 0], [1, 1], [0, 0]]
    key = [[1, 0], [0, 1], [1, 1], [-1, 0], [0, 1], [0, 0]]
    query, key = torch.tensor([[first, second]]).double() * 2**0.5, torch.tensor([[key]]).double()
    policy = policies.create("tova", Budget(sinks=0, window=0, topk=3, interval=1))

    after_three = watch(policy, query[:, :, :4], key[:, :, :4], scaling=2**-0.5)
    positions, newest = by_position(after_three, "newest")
    assert positions == [0, 1, 2, 3]
    close(newest, [0.537312, 0.072717, 0.344422, 0.045549], 1e-6)

    after_four = watch(policy, query[:, :, :5], key[:, :, :5], scaling=2**-0.5)
    positions, newest = by_position(after_four, "newest")
    assert positions == [0, 1, 2, 4]  # 3 was the newest itself
    close(newest, [0.109021, 0.246911, 0.397156, 0.246911], 1e-6)

    assert watch(policy, query, key, scaling=2**-0.5).lifetimes.tolist() == [[[5, 6, 6, 4, 6, 6]]]


# --- H2O -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "received"), [("h2o", [2.25, 1.0, 0.5, 0.25]), ("h2o_decayed", [2.10, 0.95, 0.5, 0.25])]
)
def test_foresight_f1_cumulative_and_decayed_attention(name, received):
    query, key = heads_from_weights("1 / 1 1 / 2 1 1 / 1 1 1 1")
    policy = policies.create(name, Budget(sinks=0, window=1, topk=1, interval=2))
    layer = watch(policy, query[:, :, :2], key[:, :, :2])
    close(by_position(layer, "received")[1], [1.5, 0.5])  # cum0; the decay comes with the next interval
    layer = watch(policy, query, key)
    positions, statistic = by_position(layer, "received")
    assert positions == [0, 1, 2, 3]
    close(statistic, received)

    slots = layer.slots
    slots.drop((slots.view(slots.positions) == 1).nonzero()[:, 2].view(1, 1, 1))
    positions, statistic = by_position(layer, "received")
    assert positions == [0, 2, 3]
    close(statistic, received[:1] + received[2:])


def test_foresight_f1_heads_of_a_group_are_averaged():
    query, key = heads_from_weights("1 / 1 1 / 2 1 1 / 1 1 1 1", "1 / 3 1 / 1 1 2 / 1 5 1 1")
    policy = policies.create("h2o", Budget(sinks=0, window=1, topk=1, interval=2))
    second = [1 + 0.75 + 0.25 + 0.125, 0.25 + 0.25 + 0.625, 0.5 + 0.125, 0.125]
    mean = [(a + b) / 2 for a, b in zip([2.25, 1.0, 0.5, 0.25], second, strict=True)]
    close(by_position(watch(policy, query, key), "received")[1], mean)


def test_decay_of_h2o_is_per_interval_or_per_token():
    assert policies.create("h2o_decayed", 128).decay == 0.9
    assert policies.create("h2o_decayed", Budget(0, 4, 8, interval=1)).decay == 0.97
    assert policies.create("h2o_decayed", 128, decay=1).decay == 1


# --- SnapKV and R-KV -------------------------------------------------------------------------------------------------

LOGITS = torch.tensor(
    [[[0, 1, 2, 0, 0, 0], [2, 0, 0, 1, 0, 0]], [[1, 0, 0, 0, 0, 0], [0, 3, 0, 0, 0, 0]]], dtype=torch.float64
)  # [G, r, older keys]
MAX_LOGIT = [0.197187, 0.388440, 0.248516, 0.072541, 0.046658, 0.046658]
MEAN_PROB = [0.246678, 0.298454, 0.191021, 0.108249, 0.077799, 0.077799]
POOLED = [0.388440, 0.388440, 0.388440, 0.248516, 0.072541, 0.046658]
ALIKE = torch.tensor([[1, 0], [1, 0], [0, 1], [0.6, 0.8], [0, 1]], dtype=torch.float64)
SIMILARITY = [0.216492, 0.216492, 0.225327, 0.184483, 0.157206]


@pytest.mark.parametrize(("head_reduce", "expected"), [("max_logit", MAX_LOGIT), ("mean_prob", MEAN_PROB)])
def test_foresight_b1_votes_of_the_observation_window(head_reduce, expected):
    close(observation_scores(LOGITS[None, None], head_reduce)[0, 0], expected, 1e-6)


def test_foresight_b1_max_pool_of_three():
    close(max_pool(torch.tensor([[MAX_LOGIT]]), 3)[0, 0], POOLED, 1e-6)
    close(max_pool(torch.tensor([[MAX_LOGIT]]), 1)[0, 0], MAX_LOGIT, 1e-6)


@pytest.mark.parametrize(("kernel", "expected"), [(1, MAX_LOGIT), (3, POOLED)])
def test_foresight_b1_snapkv_through_keys_and_queries_in_any_order(kernel, expected):
    """Two observing queries over eight keys, the last two of which they do not vote on."""
    policy = policies.create(
        "snapkv",
        Budget(0, 2, 4, interval=2),
        observation=2,
        kernel=kernel,
        head_reduce="max_logit",
        normalise="older",
    )
    queries = torch.cat([LOGITS, torch.full((2, 2, 2), 9.0)], -1)[None, None]
    order = torch.tensor([3, 7, 0, 5, 1, 6, 2, 4])
    held = held_tokens(torch.eye(8).double()[None, None, order], queries, positions=order[None, None])
    scores = policy.keep_scores(held)[0, 0]
    close(scores[order.argsort()][:6], expected, 1e-6)


def test_snapkv_over_all_held_is_causal_within_the_observation():
    policy = policies.create("snapkv", Budget(0, 2, 4, interval=2), observation=2, kernel=1)
    queries = torch.zeros(1, 1, 1, 2, 8, dtype=torch.float64)
    scores = policy.keep_scores(held_tokens(torch.eye(8).double()[None, None], queries))
    close(scores[0, 0], [(1 / 7 + 1 / 8) / 2] * 7 + [1 / 16])


def test_foresight_b1_similarity_spares_the_newest_that_resembles():
    cosine = ALIKE @ ALIKE.T
    cosine.fill_diagonal_(0)
    for row, last_similar in enumerate((3, 3, 4, 4, 3)):
        assert [column for column in range(5) if cosine[row, column] > 0.5][-1] == last_similar
        cosine[row, last_similar] = 0
    got = key_similarity(ALIKE[None, None], 0.5)[0, 0]
    close(got, cosine.mean(0).tolist())
    close(got, [0.32, 0.32, 0.36, 0.16, 0.0])
    close(got.softmax(-1), SIMILARITY, 1e-6)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_similarity_in_row_blocks_is_the_same(rows, monkeypatch):
    keys = torch.randn(2, 3, 9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = key_similarity(keys, 0.2)
    monkeypatch.setattr("kvkeep.policies.rkv.ROWS", rows)
    close(key_similarity(keys, 0.2), whole.tolist())


def test_foresight_b1_a_key_without_another_like_it_loses_nothing():
    close(key_similarity(torch.eye(3)[None, None], 0.5), torch.zeros(1, 1, 3).tolist())
    opposed = torch.tensor([[[[1.0, 0], [-1, 0]]]])
    close(key_similarity(opposed, 0.5)[0, 0], [-0.5, -0.5])


def test_foresight_b1_two_items_are_not_item_0_twice():
    other = torch.tensor([[0.0, 1], [1, 0], [1, 0], [0, 1], [0.6, 0.8]], dtype=torch.float64)
    keys = torch.stack([ALIKE, other])[:, None]
    policy = policies.create("rkv", Budget(0, 1, 2, interval=2), observation=1, kernel=1, mix=0.3)
    queries = torch.tensor([[1.0, 0.5], [-0.5, 2.0]], dtype=torch.float64).view(2, 1, 1, 1, 2)
    both = policy.keep_scores(held_tokens(keys, queries))
    for item in range(2):
        alone = held_tokens(keys[[item]], queries[[item]])
        close(both[item], policy.keep_scores(alone)[0].tolist())
    attention = (keys[0, 0] @ queries[0, 0, 0, 0]).softmax(-1)
    close(both[0, 0], (0.3 * attention - 0.7 * torch.tensor(SIMILARITY)).tolist(), 1e-6)
    assert (both[0] - both[1]).abs().max() > 0.01


# --- KeyDiff ---------------------------------------------------------------------------------------------------------


def test_keydiff_is_worst_for_the_key_that_points_where_all_do():
    """Directions (1, 0), (0, 1), (0.6, 0.8): cosines with (1.6, 1.8) / 3 are 1.6, 1.8 and 2.4 over its length."""
    keys = torch.tensor([[[[2.0, 0.0], [0.0, 5.0], [3.0, 4.0]]]], dtype=torch.float64)
    scores = policies.create("keydiff", 128).keep_scores(held_tokens(keys, keys[:, :, None]))
    close(scores[0, 0], [-number / 5.8**0.5 for number in (1.6, 1.8, 2.4)])


# --- Golden eviction -------------------------------------------------------------------------------------------------

G1 = "1 / 1 1 / 2 1 1 / 1 2 1 4 / 1 3 2 1 3 / 5 1 2 4 3 5"
G3 = (
    "1 / 1 1 / 2 1 1 / 1 1 1 1 / 4 1 1 1 1 / 4 1 1 1 1 2 / 2 4 1 1 4 2 2 / 2 2 1 5 1 1 2 2 / 1 1 6 1 1 1 1 2 2",
    "1 / 1 1 / 1 1 2 / 2 1 1 1 / 1 1 1 1 1 / 1 1 1 1 2 4 / 8 2 1 1 1 1 2 / 4 1 1 4 2 2 1 1 / 1 1 4 1 1 1 1 3 3",
)


def golden(budget, *weights, **options):
    """Which tokens go, by the query at whose start they do."""
    policy = policies.create("golden", budget, **options)
    query, key = heads_from_weights(*weights)
    layer = watch(policy, query, key)
    gone = {}
    for token, at in enumerate(layer.lifetimes[0, 0].tolist()):
        if at < key.shape[2]:
            gone.setdefault(at, set()).add(token)
    return gone, layer


def test_foresight_g1_the_running_maximum_matters():
    gone, layer = golden(Budget(0, 1, 2, interval=1), G1)
    assert gone == {4: {2}, 5: {1}}
    alpha = layer.memory["alpha"][0, 0]
    close(alpha[:3, 0], [0.25, 0.30, 0.20])
    close(alpha[[0, 1, 3], 1], [0.25, 0.05, 0.20])
    assert layer.slots.positions[0, 0].sort().values.tolist() == [0, 3, 4, 5]  # what query 5 sees


def test_foresight_g1_an_oracle_of_the_next_block_errs():
    gone, _ = golden(Budget(0, 1, 2, interval=1), G1, lookahead=1)
    assert gone[4] == {0}
    for lookahead in (2, 3):
        assert golden(Budget(0, 1, 2, interval=1), G1, lookahead=lookahead)[0] == {4: {2}, 5: {1}}


def test_foresight_g2_an_interval_as_long_as_the_rest_is_refused():
    with pytest.raises(ValueError, match=r"topk must be at least 1, got 0"):
        Budget(sinks=0, window=2, topk=0, interval=2)
    with pytest.raises(ValueError, match=r"budget of 4 slots must be above sinks 0 \+ window 2 \+ interval 2 = 4"):
        policies.budget("golden", 4, interval=2)


@pytest.mark.parametrize(("partial", "gone"), [("mean", {6: {1, 3}, 8: {0, 4}}), ("zero_pad", {6: {1, 2}, 8: {0, 3}})])
def test_foresight_g3_partial_block_group_mean_and_ties(partial, gone):
    """At query 8 three tokens tie and the two oldest go."""
    sets, layer = golden(Budget(0, 2, 2, interval=2), *G3, partial=partial)
    assert sets == gone
    alpha = layer.memory["alpha"][0, 0]
    share = {"mean": 1, "zero_pad": 2}[partial]
    close(alpha[:4, 0], [0.25, 0.140625, 0.3125 / share, 0.171875])
    close(alpha[[0, 2, 3, 4, 5], 1], [1 / 16 / share, 5 / 16 / share] + [1 / 16 / share] * 3)


def test_golden_may_take_the_maximum_of_the_group():
    """A token that only one head will want goes by the mean and stays by the maximum."""
    weights = "1 / 1 1 / 1 1 1 / 1 1 1 1 / 1 9 6 1 3", "1 / 1 1 / 1 1 1 / 1 1 1 1 / 11 1 6 1 1"
    budget = Budget(0, 1, 2, interval=1)
    assert golden(budget, *weights)[0] == {4: {1}}  # .250 against .300 and .300
    assert golden(budget, *weights, head_reduce="max")[0] == {4: {2}}  # .45 .55 .30


# --- Schedule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "rest", "interval", "evictions"),
    [
        (6, 2, 2, 1), (1024, 1024, 256, 0), (1280, 1024, 256, 0), (1281, 1024, 256, 1), (1536, 1024, 256, 1),
        (1537, 1024, 256, 2), (4096, 1024, 256, 11), (4100, 1024, 256, 12), (32768, 1024, 256, 123),
        (12001, 2048, 512, 19),
    ],
)  # fmt: skip
def test_foresight_s1_schedule_as_lifetimes(length, rest, interval, evictions):
    window = min(interval, rest - 1)
    policy = policies.create("h2o", Budget(0, window, rest - window, interval=interval))
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, length, 2, generator=generator)
    layer = watch(policy, query, key)
    gone = layer.lifetimes[0, 0]

    times, counts = gone[gone < length].unique(return_counts=True)
    assert times.tolist() == [rest + interval * (t + 1) for t in range(evictions)]
    assert counts.tolist() == [interval] * evictions
    query_at = torch.arange(length)
    sees = query_at + 1 - torch.searchsorted(gone.sort().values, query_at.int(), right=True)
    chunk = (query_at - rest) % interval + 1  # kept plus the chunk; the first that misses anything is rest + interval
    assert torch.equal(sees, torch.where(query_at < rest + interval, query_at + 1, rest + chunk))
    assert bool(((gone > query_at + window) | (gone == length)).all())  # the chunk itself is whole
    assert layer.slots.capacity == rest + interval
    assert max(layer.slots.held) <= rest + interval


# --- The oracle's properties -----------------------------------------------------------------------------------------


@st.composite
def oracle_cases(draw):
    budget = Budget(draw(st.integers(0, 2)), draw(st.integers(0, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 5)))
    length = draw(st.integers(budget.rest, budget.slots + 4 * budget.interval + 2))
    query, key = random_heads(
        batch=1, group=draw(st.integers(1, 3)), length=length, dim=4, seed=draw(st.integers(0, 99))
    )
    return budget, query * draw(st.sampled_from([1.0, 3.0])), key


@settings(max_examples=60)
@given(case=oracle_cases())
def test_golden_bounds_the_attention_that_is_lost(case):
    """Alpha never rises, what goes is the least of what may go, and no later block wanted more of it than its alpha."""
    budget, query, key = case
    length, policy = key.shape[2], policies.create("golden", budget)
    layer = watch(policy, query, key, scaling=0.5)
    blocks = dense_blocks(query, key, budget.slots, budget.interval, scaling=0.5)
    alpha = layer.memory["alpha"]
    assert alpha.shape == blocks.shape
    assert blocks.shape[-1] == budget.evictions(length)
    assert bool((alpha.diff(dim=-1) <= 0).all())
    for head in range(2):
        gone = layer.lifetimes[0, head]
        for step, at in enumerate(budget.eviction_queries(length)):
            evicted = gone == at
            assert int(evicted.sum()) == budget.interval
            bound = alpha[0, head, evicted, step].sum()
            assert bool((blocks[0, head, evicted, step:].sum(0) <= bound + 1e-12).all())
            token = torch.arange(length)
            stays = (gone > at) & (token >= budget.sinks) & (token < at - budget.window)
            if bool(stays.any()):
                assert alpha[0, head, evicted, step].max() <= alpha[0, head, stays, step].min() + 1e-15


@settings(max_examples=30)
@given(case=oracle_cases(), seed=st.integers(0, 99))
def test_output_changes_by_at_most_twice_the_value_times_the_mass_lost(case, seed):
    """ForesightKV, appendix A; with the oracle's evictions the output stays closest where it promised to."""
    budget, query, key = case
    value = torch.randn(key.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    layer = watch(policies.create("golden", budget), query, key, value, scaling=0.5)
    group = query.shape[1] // key.shape[1]
    probability = dense_logits(query, key, 0.5).softmax(-1)
    lost = (probability * ~visible(layer.lifetimes).repeat_interleave(group, 1)).sum(-1)  # [B, Hq, S]
    full = probability @ value.repeat_interleave(group, 1)
    bound = 2 * value.norm(dim=-1).amax() * lost
    assert bool(((layer.output - full).norm(dim=-1) <= bound + 1e-12).all())
    assert (live_attention(query, key, value, layer.lifetimes, 0.5) - layer.output).abs().max() <= 1e-12


@pytest.mark.parametrize("length", [3, 12, 15, 16])
def test_nothing_goes_while_the_sequence_fits(length):
    query, key = random_heads(length=length, dim=4)
    layer = watch(policies.create("golden", Budget(0, 4, 8, interval=4)), query, key)
    assert bool((layer.lifetimes == length).all())

"""Lifetimes against a set-based oracle that follows the definitions word by word."""

import math
import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.budget import Budget
from kvkeep.lifetimes import (
    chance_recall,
    realised_compression,
    recall,
    running_topk,
    static_priority,
    visible,
)

BACKENDS = ("numba", "torch")
TOY = [9, 9, 0.3, 0.8, 0.1, 0.5, 0.9, 0.2, 0.7, 0.4]  # kvpop 12.5


def topk_set(priority, query, budget):
    """The k best of E(q) = {s, ..., q - w}, ordered by (priority, newest)."""
    eligible = range(budget.sinks, query - budget.window + 1)
    return set(sorted(eligible, key=lambda t: (priority[t], t), reverse=True)[: budget.topk])


def oracle_sees(priority, budget):
    """One row of priorities -> the set of keys that each query sees."""
    return [
        set(range(min(budget.sinks, q + 1)))
        | set(range(max(0, q - budget.window + 1), q + 1))
        | topk_set(priority, q, budget)
        for q in range(len(priority))
    ]


def sees(mask_row):
    """bool [S, S] -> the set of keys that each query sees."""
    return [set(row.nonzero()[:, 0].tolist()) for row in mask_row]


def tied_priorities(shape, levels=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(levels, shape, generator=generator).float()


@st.composite
def cases(draw, largest=48):
    length = draw(st.integers(1, largest))
    budget = Budget(draw(st.integers(0, 5)), draw(st.integers(1, 12)), draw(st.integers(1, 20)))
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    priority = tied_priorities((batch, heads, length), draw(st.integers(1, 12)), draw(st.integers(0, 2**31)))
    padding = torch.tensor([draw(st.integers(0, length)) for _ in range(batch)])
    return priority, budget, padding


# --- the papers' numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("length", "sinks", "window", "topk"),
    [(1, 0, 1, 1), (7, 0, 1, 1), (33, 4, 5, 3), (64, 0, 64, 2), (200, 4, 16, 31), (129, 1, 3, 128), (257, 3, 10, 50)],
)
def test_kvpop_12_4_running_topk_equals_the_oracle(length, sinks, window, topk, backend):
    budget = Budget(sinks, window, topk)
    priority = tied_priorities((1, 2, length), levels=7)
    mask = visible(running_topk(priority, budget, backend=backend))
    for head in range(2):
        assert sees(mask[0, head]) == oracle_sees(priority[0, head].tolist(), budget)
    assert mask.sum(-1).tolist() == [[[min(q + 1, budget.rest) for q in range(length)]] * 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_kvpop_12_5_small_running_example(backend):
    evicted_at = running_topk(torch.tensor([[TOY]]), Budget(2, 2, 2), backend=backend)
    assert evicted_at.dtype == torch.int32
    assert evicted_at[0, 0].tolist() == [10, 10, 7, 10, 6, 8, 10, 9, 10, 10]
    rows = sees(visible(evicted_at)[0, 0])
    assert rows[:6] == [set(range(q + 1)) for q in range(6)]
    assert rows[6:] == [{0, 1, 2, 3, 5, 6}, {0, 1, 3, 5, 6, 7}, {0, 1, 3, 6, 7, 8}, {0, 1, 3, 6, 8, 9}]


@pytest.mark.parametrize("backend", BACKENDS)
def test_kvpop_12_5_priorities_of_sinks_and_last_window_are_ignored(backend):
    priority = torch.tensor([[TOY]])
    changed = priority.clone()
    changed[..., :2], changed[..., 9:] = -5.0, 99.0
    budget = Budget(2, 2, 2)
    assert torch.equal(running_topk(changed, budget, backend=backend), running_topk(priority, budget, backend=backend))


def literal_decay(score, query, step, log_gamma):
    """Scores as KVpop writes them at query q: r_t + floor((q - t) / n) log gamma."""
    return [r + (query - t) // step * log_gamma for t, r in enumerate(score)]


def test_kvpop_12_6_literal_decay_flips_where_the_static_priority_does_not():
    score = [-99.0] * 17
    score[3], score[4] = 0.5, 0.0
    budget = Budget(sinks=0, window=1, topk=1)
    winners = [topk_set(literal_decay(score, q, 4, -1.0), q, budget) for q in (7, 8, 11, 12, 15, 16)]
    assert winners == [{4}, {3}, {4}, {3}, {4}, {3}]
    priority = static_priority(torch.tensor([[score]]), -1.0, step=4)[0, 0]
    assert priority[3:5].tolist() == [0.5, 1.0]
    assert all(topk_set(priority.tolist(), q, Budget(3, 1, 1)) == {4} for q in range(5, 8))


def reentries(sets):
    """How often a token comes back into a growing sequence of top-k sets after it had left."""
    gone, count = set(), 0
    for before, now in pairwise(sets):
        count += len(now & gone)
        gone = (gone | (before - now)) - now
    return count


def test_kvpop_12_6_no_token_re_enters_under_static_priorities():
    score = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    budget, queries = Budget(sinks=2, window=8, topk=20), range(30, 400)
    literal = [topk_set(literal_decay(score.tolist(), q, 16, -0.5), q, budget) for q in queries]
    priority = static_priority(score[None, None], -0.5, step=16)[0, 0].tolist()
    static = [topk_set(priority, q, budget) for q in queries]
    assert reentries(literal) > 20
    assert reentries(static) == 0


def test_kvpop_12_6_step_of_one_makes_literal_and_static_equal():
    score = torch.randn(120, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    budget = Budget(sinks=2, window=4, topk=9)
    priority = static_priority(score[None, None], -0.125, step=1)[0, 0].tolist()
    for q in range(120):
        assert topk_set(literal_decay(score.tolist(), q, 1, -0.125), q, budget) == topk_set(priority, q, budget)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kvpop_12_8_constant_priority_is_streaming_llm(backend):
    length, budget = 70, Budget(3, 6, 11)
    query, key = torch.arange(length)[:, None], torch.arange(length)
    streaming = (key <= query) & ((key < 3) | (key > query - (6 + 11)))
    assert torch.equal(visible(running_topk(torch.zeros(1, 1, length), budget, backend=backend))[0, 0], streaming)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kvpop_12_10_nine_left_pads(backend):
    budget, pads = Budget(2, 4, 7), 9
    alone = tied_priorities((1, 3, 50))
    padded = torch.cat([torch.full((1, 3, pads), 1e9), alone], -1)
    mask = visible(running_topk(padded, budget, torch.tensor([pads]), backend))
    assert torch.equal(mask[..., pads:, pads:], visible(running_topk(alone, budget, backend=backend)))
    assert not mask[..., :pads].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cut", [5, 13, 14, 31, 59])
def test_kvpop_12_10_compaction_continues_exactly(cut, backend):
    """Held tokens in order, then the new ones: the same routine gives the rest of the story."""
    budget, length = Budget(2, 5, 7), 60
    priority = tied_priorities((1, 1, length), levels=9)
    whole = running_topk(priority, budget, backend=backend)[0, 0]
    held = (whole[:cut] >= cut).nonzero()[:, 0]  # after query cut - 1, before query cut decides
    position = torch.cat([held, torch.arange(cut, length)])
    compact = running_topk(priority[..., position], budget, backend=backend)[0, 0]
    removed = length - len(position)
    assert torch.equal(compact.long() + removed, whole[position].long())


def test_kvpop_12_15_resident_tokens_are_constant_once_the_budget_is_full():
    budget = Budget(sinks=4, window=16, topk=44)
    held = visible(running_topk(tied_priorities((2, 2, 300)), budget)).sum(-1)
    assert (held[..., budget.rest :] == 64).all()


def test_kvpop_12_16_recall_toy():
    teacher = torch.tensor([[[0.1, 0.9, 0.8, 0.2, 0.7, 0.3]]])
    student = torch.tensor([[[0.5, 0.6, 0.9, 0.1, 0.2, 0.4]]])
    assert recall(teacher, student, Budget(sinks=0, window=1, topk=3)).item() == pytest.approx(2 / 3)


# --- properties ------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(cases())
def test_backends_equal_the_oracle(case):
    priority, budget, _ = case
    by_heap, by_sort = (running_topk(priority, budget, backend=backend) for backend in BACKENDS)
    assert torch.equal(by_heap, by_sort)
    mask = visible(by_heap)
    for row in range(priority.shape[0]):
        for head in range(priority.shape[1]):
            assert sees(mask[row, head]) == oracle_sees(priority[row, head].tolist(), budget)


@settings(deadline=None, max_examples=30)
@given(
    length=st.integers(1, 3000),
    parts=st.tuples(st.integers(0, 9), st.integers(1, 70), st.integers(1, 600)),
    levels=st.sampled_from([1, 2, 50, 10**6]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    data=st.data(),
)
def test_backends_agree_on_long_rows(length, parts, levels, dtype, data):
    """Where the tree has many levels; ties of all kinds, both zeros and infinities among them."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    priority = torch.randint(levels, (2, 3, length), generator=generator).to(dtype) - levels // 2
    where = torch.rand(priority.shape, generator=generator)
    priority = priority.where(where > 0.02, torch.inf).where(where < 0.98, -torch.inf).where(where < 0.9, -0.0)
    padding = torch.tensor([0, data.draw(st.integers(0, length))])
    by_heap, by_sort = (running_topk(priority, Budget(*parts), padding, backend) for backend in BACKENDS)
    assert torch.equal(by_heap, by_sort)


@settings(deadline=None)
@given(cases(), st.sampled_from(BACKENDS))
def test_padded_rows_equal_rows_alone(case, backend):
    priority, budget, padding = case
    together = running_topk(priority, budget, padding, backend)
    for row, pad in enumerate(padding.tolist()):
        assert (together[row, :, :pad] == 0).all()
        alone = running_topk(priority[row : row + 1, :, pad:], budget, backend=backend)
        assert torch.equal(together[row, :, pad:], alone[0] + pad)


@settings(deadline=None)
@given(cases())
def test_realised_compression_counts_pairs(case):
    priority, budget, padding = case
    evicted_at = running_topk(priority, budget, padding)
    saved = realised_compression(evicted_at, padding)
    for row, pad in enumerate(padding.tolist()):
        own = priority.shape[-1] - pad
        pairs = visible(evicted_at)[row].sum((-1, -2))
        for head in range(priority.shape[1]):
            expected = 1 - pairs[head].item() / (own * (own + 1) / 2) if own else 1.0
            assert saved[row, head].item() == pytest.approx(expected, abs=1e-6)


# --- numbers of all kinds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_rows_agree_with_a_reference_of_their_own(backend):
    """Ranks far above one machine word of nodes: 3000 tokens, death times from their definition."""
    budget, length = Budget(4, 32, 100), 3000
    priority = tied_priorities((1, 1, length), levels=500)
    evicted_at = running_topk(priority, budget, backend=backend)[0, 0]
    row = priority[0, 0]
    for t in range(budget.sinks, length, 97):
        better = (row > row[t]) | ((row == row[t]) & (torch.arange(length) > t))
        better[: budget.sinks] = False
        rivals = better.nonzero()[:, 0]
        death = budget.window + max(t, rivals[budget.topk - 1].item()) if len(rivals) >= budget.topk else length
        assert evicted_at[t] == min(death, length)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64_is_compared_in_float64_and_bfloat16_in_float32(backend):
    budget = Budget(sinks=0, window=1, topk=1)
    close = torch.tensor([[[1 + 1e-12, 1.0, 0.0]]], dtype=torch.float64)
    assert running_topk(close, budget, backend=backend).tolist() == [[[3, 2, 3]]]
    assert running_topk(close.float(), budget, backend=backend).tolist() == [[[2, 3, 3]]]  # a tie: the newest wins
    half = tied_priorities((1, 2, 40)).bfloat16()
    assert torch.equal(running_topk(half, budget, backend=backend), running_topk(half.float(), budget, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinite_and_negatively_zero_priorities(backend):
    budget = Budget(sinks=0, window=1, topk=2)
    priority = torch.tensor([[[math.inf, 0.0, -math.inf, -0.0, 0.0, -math.inf, 5.0, 0.0]]])
    assert running_topk(priority, budget, backend=backend)[0, 0].tolist() == [8, 4, 3, 5, 7, 6, 8, 8]


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_places_than_memory_could_hold(backend):
    priority = tied_priorities((1, 1, 20))
    assert (running_topk(priority, Budget(0, 1, 10**14), backend=backend) == 20).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_priorities_with_gradient(backend):
    priority = tied_priorities((2, 30, 3)).transpose(1, 2).requires_grad_()
    budget = Budget(1, 2, 5)
    expected = running_topk(priority.detach().contiguous(), budget, backend=backend)
    assert torch.equal(running_topk(priority, budget, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 0, 5), (1, 1, 0), (1, 1, 1)])
def test_empty_and_tiny_tensors(shape, backend):
    evicted_at = running_topk(torch.zeros(shape), Budget(0, 1, 1), torch.zeros(shape[0]).long(), backend)
    assert evicted_at.shape == shape
    assert (evicted_at == shape[-1]).all()


# --- decay -----------------------------------------------------------------------------------------------------------


def test_static_priority_for_all_shapes_of_gamma():
    score = torch.randn(2, 3, 10, generator=torch.Generator().manual_seed(4))
    steps = torch.arange(10) // 4
    assert torch.equal(static_priority(score, -0.5, 4), score + 0.5 * steps)
    per_head = torch.tensor([-1.0, -0.25, 0.0])
    assert torch.equal(static_priority(score, per_head, 4), score - steps * per_head[:, None])
    per_row = torch.stack([per_head, 2 * per_head])
    assert torch.equal(static_priority(score, per_row, 4), score - steps * per_row[..., None])


def test_static_priority_counts_from_each_rows_own_start():
    score = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(5))
    padded = static_priority(score, -0.5, 4, padding=torch.tensor([0, 5]))
    assert torch.equal(padded[:1], static_priority(score[:1], -0.5, 4))
    assert torch.equal(padded[1:, :, 5:], static_priority(score[1:, :, 5:], -0.5, 4))


def test_static_priority_at_given_positions_is_the_same_number():
    score = torch.randn(1, 2, 12, generator=torch.Generator().manual_seed(6))
    whole = static_priority(score, torch.tensor([-0.3, -0.7]), 5)
    chosen = torch.tensor([2, 7, 11])
    assert torch.equal(
        static_priority(score[..., chosen], torch.tensor([-0.3, -0.7]), 5, positions=chosen), whole[..., chosen]
    )


def test_static_priority_gradient_and_width():
    log_gamma = torch.tensor(-0.5, requires_grad=True)
    priority = static_priority(torch.zeros(1, 1, 10, dtype=torch.bfloat16), log_gamma, 4)
    assert priority.dtype == torch.float32
    (priority[0, 0, 9] - priority[0, 0, 4]).backward()
    assert log_gamma.grad.item() == -(9 // 4 - 4 // 4)


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_raises_and_names_its_place_unless_it_is_a_pad(backend):
    priority = torch.zeros(2, 3, 8)
    priority[1, 2, 4] = math.nan
    with pytest.raises(ValueError, match="1 priorities are NaN, the first in row 1, head 2, token 4"):
        running_topk(priority, Budget(0, 1, 2), backend=backend)
    running_topk(priority, Budget(0, 1, 2), torch.tensor([0, 5]), backend)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: running_topk(torch.zeros(3, 8), Budget()), "got shape (3, 8)"),
        (lambda: running_topk(torch.zeros(1, 1, 8), Budget(interval=2)), "interval=2"),
        (lambda: running_topk(torch.zeros(1, 1, 8), Budget(), backend="cuda"), "'cuda'"),
        (lambda: running_topk(torch.zeros(1, 1, 8, device="meta"), Budget(), backend="numba"), "meta"),
        (lambda: running_topk(torch.zeros(2, 1, 8), Budget(), torch.tensor([1])), "2 rows"),
        (lambda: running_topk(torch.zeros(1, 1, 8), Budget(), torch.tensor([1.0])), "float32"),
        (lambda: running_topk(torch.zeros(1, 1, 8), Budget(), torch.tensor([9])), "length 8, got [9]"),
        (lambda: running_topk(torch.zeros(1, 1, 8), Budget(), torch.tensor([-1])), "length 8, got [-1]"),
        (lambda: recall(torch.zeros(1, 1, 8), torch.zeros(1, 2, 8), Budget(0, 1, 1)), "(1, 1, 8) and (1, 2, 8)"),
        (lambda: recall(torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), Budget(1, 1, 2)), "4 held at most, got 4"),
        (lambda: chance_recall(4, Budget(1, 1, 2)), "4 held at most, got 4"),
        (lambda: static_priority(torch.zeros(1, 2, 4), -0.1, 0), "got 0"),
        (lambda: static_priority(torch.zeros(1, 2, 4), torch.zeros(3), 1), "[2] or [1, 2]"),
        (
            lambda: static_priority(
                torch.zeros(1, 2, 4), -0.1, 1, padding=torch.tensor([1]), positions=torch.arange(4)
            ),
            "not both",
        ),
    ],
)
def test_mistakes_name_the_numbers(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()

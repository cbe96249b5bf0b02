"""Recall of a teacher's top-k: against sets, with an interval, by chance, by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.budget import Budget
from kvkeep.lifetimes import chance_recall, lifetime_recall, recall, running_topk
from reference import interval_lifetimes
from test_lifetimes import cases, tied_priorities, topk_set


@settings(deadline=None)
@given(cases(), st.integers(0, 2**31))
def test_recall_equals_the_set_definition(case, seed):
    teacher, budget, padding = case
    student = tied_priorities(teacher.shape, 5, seed)
    length = teacher.shape[-1]
    if length - int(padding.max()) <= budget.rest:
        with pytest.raises(ValueError, match=f"more tokens than the {budget.rest}"):
            recall(teacher, student, budget, padding)
        return
    result = recall(teacher, student, budget, padding)
    for row, pad in enumerate(padding.tolist()):
        for head in range(teacher.shape[1]):
            t, s = teacher[row, head, pad:].tolist(), student[row, head, pad:].tolist()
            shares = [
                len(topk_set(t, q, budget) & topk_set(s, q, budget)) / budget.topk
                for q in range(budget.rest, length - pad)
            ]
            assert result[row, head].item() == pytest.approx(sum(shares) / len(shares), rel=1e-6)


@settings(deadline=None)
@given(cases(), st.integers(1, 7), st.integers(0, 2**31))
def test_recall_with_an_interval_counts_its_evictions(case, interval, seed):
    """The student drops what it ranks lowest every `interval` queries; the teacher chooses from the same tokens."""
    teacher, entry, padding = case
    budget, length, heads = Budget(entry.sinks, entry.window - 1, entry.topk, interval), *teacher.shape[:0:-1]
    assert budget.as_entry == entry
    student = torch.rand(teacher.shape, generator=torch.Generator().manual_seed(seed))
    lifetimes, expected = torch.zeros(teacher.shape, dtype=torch.int32), []
    for row, pad in enumerate(padding.tolist()):

        def scores(head, _, held, alone=student[row, :, pad:]):
            return alone[head, held]

        lifetimes[row, :, pad:] = interval_lifetimes(scores, budget, length - pad, heads)[0] + pad
        for head in range(heads):
            shares = []
            for q in budget.eviction_queries(length - pad):
                out_of_window = range(entry.sinks, q - budget.window)
                held = {t for t in out_of_window if lifetimes[row, head, pad + t] > pad + q}
                assert len(held) == budget.topk
                shares.append(len(topk_set(teacher[row, head, pad:].tolist(), q, entry) & held) / budget.topk)
            expected.append(sum(shares) / len(shares) if shares else None)
    teacher_lifetimes = running_topk(teacher, entry, padding)
    if None in expected:
        with pytest.raises(ValueError, match=f"more tokens than the {budget.slots}"):
            lifetime_recall(teacher_lifetimes, lifetimes, budget, padding)
        return
    found = lifetime_recall(teacher_lifetimes, lifetimes, budget, padding)
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-6)


def test_recall_of_itself_is_one_and_of_noise_is_chance():
    budget, length = Budget(4, 16, 30), 400
    generator = torch.Generator().manual_seed(3)
    teacher, student = torch.randn(2, 4, 50, length, generator=generator)
    assert (recall(teacher, teacher, budget) == 1).all()
    expected = sum(30 / (q - 16 - 4 + 1) for q in range(50, length)) / (length - 50)
    assert chance_recall(length, budget) == pytest.approx(expected)
    assert recall(teacher, student, budget).mean().item() == pytest.approx(expected, abs=0.01)


def test_chance_with_an_interval_is_the_share_that_stays():
    budget = Budget(sinks=1, window=3, topk=4, interval=2)
    queries = [10, 12, 14]  # 1 sink and the newest 3 stay; 4 of the other 6, 8 and 10 are held
    assert list(budget.eviction_queries(15)) == queries
    assert chance_recall(15, budget) == pytest.approx((4 / 6 + 4 / 8 + 4 / 10) / 3)


def test_lifetime_recall_of_streaming_against_an_oracle_by_hand():
    """The teacher holds {0, 1} at queries 3 and 4; the students {1, 2} then {2, 3}, and {0, 2} then {0, 3}."""
    budget = Budget(sinks=0, window=1, topk=2)
    teacher = running_topk(torch.tensor([[[9.0, 8.0, 0.0, 0.0, 0.0]]]), budget)
    student = running_topk(torch.zeros(1, 1, 5), budget)
    assert lifetime_recall(teacher, student, budget).item() == pytest.approx((1 / 2 + 0) / 2)
    student = running_topk(torch.tensor([[[9.0, 0.0, 0.0, 0.0, 0.0]]]), budget)
    assert lifetime_recall(teacher, student, budget).item() == pytest.approx((1 / 2 + 1 / 2) / 2)

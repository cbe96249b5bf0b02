"""Budgets: the arithmetic of both papers, and every mistake named with its numbers."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.budget import Budget


def test_default_is_an_entry_budget_of_128():
    budget = Budget()
    assert dataclasses.astuple(budget) == (4, 32, 92, 0)
    assert (budget.rest, budget.slots) == (128, 128)


def test_interval_adds_to_the_slots_not_to_the_rest():
    budget = Budget(sinks=0, window=32, topk=64, interval=32)
    assert (budget.rest, budget.slots) == (96, 128)


@pytest.mark.parametrize(
    ("total", "state_entries", "topk"), [(4096, 0, 3836), (4096, 64, 3772), (2048, 0, 1788), (2048, 64, 1724)]
)
def test_kvpop_12_15_budget_arithmetic(total, state_entries, topk):
    assert Budget(sinks=4, window=256, topk=topk).rest + state_entries == total


@pytest.mark.parametrize(
    ("length", "rest", "interval", "evictions"),
    [
        (6, 2, 2, 1),
        (1024, 1024, 256, 0),
        (1280, 1024, 256, 0),
        (1281, 1024, 256, 1),
        (1536, 1024, 256, 1),
        (1537, 1024, 256, 2),
        (4096, 1024, 256, 11),
        (4100, 1024, 256, 12),
        (32768, 1024, 256, 123),
        (12001, 2048, 512, 19),
    ],
)
def test_foresight_s1_number_of_evictions(length, rest, interval, evictions):
    budget = Budget(sinks=0, window=interval // 2, topk=rest - interval // 2, interval=interval)
    assert budget.rest == rest
    assert budget.evictions(length) == evictions


@settings(deadline=None)
@given(
    length=st.integers(0, 400), rest=st.integers(1, 60), interval=st.integers(1, 40), entry_window=st.integers(1, 60)
)
def test_eviction_queries_follow_the_schedule(length, rest, interval, entry_window):
    attention = Budget(sinks=0, window=0, topk=rest, interval=interval)
    queries = attention.eviction_queries(length)
    assert list(queries) == [rest + t * interval for t in range(1, length + 1) if rest + t * interval < length]
    assert attention.evictions(length) == max(0, -(-(length - rest) // interval) - 1)
    entry = Budget(sinks=0, window=entry_window, topk=rest)
    assert list(entry.eviction_queries(length)) == list(range(entry.rest, length))


def test_budget_is_frozen_hashable_and_normalised():
    budget = Budget(np.int64(4), np.int32(32), np.int64(92), np.int8(0))
    assert budget == Budget()
    assert hash(budget) == hash(Budget())
    assert all(type(number) is int for number in dataclasses.astuple(budget))
    with pytest.raises(dataclasses.FrozenInstanceError):
        budget.topk = 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sinks": -1}, "sinks must be at least 0, got -1"),
        ({"window": -2}, "window must be at least 0, got -2"),
        ({"topk": 0}, "topk must be at least 1, got 0"),
        ({"interval": -3}, "interval must be at least 0, got -3"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"sinks": 1.5}, "sinks must be an integer, got 1.5"),
        ({"topk": 92.0}, "topk must be an integer, got 92.0"),
        ({"window": "32"}, "window must be an integer, got '32'"),
        ({"interval": None}, "interval must be an integer, got None"),
        ({"sinks": True}, "sinks must be an integer, got True"),
    ],
)
def test_wrong_budgets_name_the_numbers(wrong, message):
    with pytest.raises(ValueError, match=message):
        Budget(**wrong)


def test_an_attention_policy_may_have_no_window():
    assert Budget(sinks=0, window=0, topk=127, interval=1).slots == 128

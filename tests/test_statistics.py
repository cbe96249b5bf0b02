"""Numbers worked out by hand, and properties that hold for any losses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.evaluation import statistics

losses = st.lists(st.floats(0.1, 100), min_size=2, max_size=12)


def test_pooling_is_not_a_mean_of_ratios():
    # A mean of ratios would give (2 + 1) / 2; the document with more loss weighs more.
    assert statistics.pooled_ratio([2.0, 9.0], [1.0, 9.0]) == pytest.approx(1.1)


@given(losses, st.floats(0.5, 2))
def test_a_constant_factor_is_the_ratio_and_has_no_width(full, factor):
    interval = statistics.bootstrap_ratio(np.array(full) * factor, full, draws=200)
    assert interval == pytest.approx((factor, factor, factor))


@given(losses, st.integers(0, 100))
def test_the_interval_is_repeatable_and_inside_the_documents_range(full, seed):
    rng = np.random.default_rng(seed)
    loss = np.array(full) * rng.uniform(0.9, 1.5, len(full))
    first = statistics.bootstrap_ratio(loss, full, draws=200, seed=seed)
    assert first == statistics.bootstrap_ratio(loss, full, draws=200, seed=seed)
    ratios = loss / full
    assert ratios.min() - 1e-12 <= first.low <= first.high <= ratios.max() + 1e-12
    assert ratios.min() - 1e-12 <= first.value <= ratios.max() + 1e-12


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        full = rng.uniform(80, 120, 30)
        interval = statistics.bootstrap_ratio(full * rng.normal(1.1, 0.05, 30), full, draws=400, seed=trial)
        covered += interval.low <= 1.1 <= interval.high
    assert 0.88 <= covered / 200 <= 0.99


def test_one_document_gives_an_interval_without_width():
    assert statistics.bootstrap_ratio([3.0], [2.0]) == (1.5, 1.5, 1.5)


def test_difference_is_paired_by_document():
    # What both lose on the second document cancels; unpaired, the interval would include 0.
    interval = statistics.bootstrap_difference([11.0, 52.0], [10.0, 50.0], [10.0, 20.0])
    assert interval == pytest.approx((3 / 30, 1 / 10, 2 / 20))


@given(losses, st.integers(0, 100))
def test_a_difference_is_that_of_ratios_and_of_nothing_to_itself(full, seed):
    loss, other = (np.array(full) * np.random.default_rng([seed, i]).uniform(0.9, 1.5, len(full)) for i in (0, 1))
    interval = statistics.bootstrap_difference(loss, other, full, draws=100)
    ratios = [statistics.pooled_ratio(each, full) for each in (loss, other)]
    assert interval.value == pytest.approx(ratios[0] - ratios[1])
    turned = statistics.bootstrap_difference(other, loss, full, draws=100)
    assert turned == pytest.approx((-interval.value, -interval.high, -interval.low))
    assert statistics.bootstrap_difference(loss, loss, full, draws=100) == (0, 0, 0)


def test_gap_closed_by_hand():
    interval = statistics.gap_closed([10.0, 20.0], [9.0, 17.0], [8.0, 12.0])
    assert interval.value == pytest.approx(4 / 10)
    # Only three samples of two documents exist: 1/2, 4/10 and 3/8.
    assert (interval.low, interval.high) == (pytest.approx(3 / 8), pytest.approx(1 / 2))


@given(losses, st.integers(0, 100))
def test_the_ends_of_the_gap(rule, seed):
    oracle = np.array(rule) * np.random.default_rng(seed).uniform(0.5, 0.9, len(rule))
    assert statistics.gap_closed(rule, rule, oracle, draws=100) == pytest.approx((0, 0, 0))
    assert statistics.gap_closed(rule, oracle, oracle, draws=100) == pytest.approx((1, 1, 1))


def test_a_gap_that_most_draws_do_not_have_is_not_pinned_down():
    interval = statistics.gap_closed([10.0, 10.0, 10.0], [9.0, 9.0, 9.0], [4.0, 11.0, 12.0])
    assert interval.value == pytest.approx(3 / 3)
    assert (interval.low, interval.high) == (-np.inf, np.inf)


def test_low_entropy_drops_the_highest_fifth_rounded_down():
    # ForesightKV's example: of eight tokens int(0.2 * 8) = 1 is high, of ten it is two.
    entropy = [0.2, 2.9, 0.9, 0.05, 0.6, 0.4, 2.0, 0.15]
    assert np.flatnonzero(~statistics.low_entropy(entropy)).tolist() == [1]
    assert np.flatnonzero(~statistics.low_entropy([0.1, 0.3, *entropy])).tolist() == [3, 8]


@given(st.lists(st.floats(0, 5), max_size=60))
def test_low_tokens_are_never_less_certain_than_high_ones(entropy):
    entropy = np.array(entropy)
    low = statistics.low_entropy(entropy)
    assert (~low).sum() == len(entropy) // 5
    if (~low).any():
        assert entropy[low].max() <= entropy[~low].min()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: statistics.pooled_ratio([1.0], [1.0, 2.0]), r"got shapes \[\[1\], \[2\]\]"),
        (lambda: statistics.pooled_ratio([], []), "no documents"),
        (lambda: statistics.pooled_ratio([np.nan], [1.0]), "not finite"),
        (lambda: statistics.pooled_ratio([1.0], [0.0]), "full-cache loss is 0"),
        (lambda: statistics.bootstrap_difference([1.0], [1.0], [0.0]), "full-cache loss is 0"),
        (lambda: statistics.bootstrap_difference([1.0], [1.0, 2.0], [1.0]), r"got shapes \[\[1\], \[2\], \[1\]\]"),
        (lambda: statistics.gap_closed([1.0], [1.0], [1.0]), "no gap to close"),
        (lambda: statistics.low_entropy([[1.0]]), r"got shape \[1, 1\]"),
        (lambda: statistics.low_entropy([1.0], share=1.2), "between 0 and 1"),
    ],
)
def test_what_cannot_be_computed_says_why(call, message):
    with pytest.raises(ValueError, match=message):
        call()

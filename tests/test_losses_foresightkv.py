"""ForesightKV's losses: the ranking loss against all pairs, the reward and GRPO by hand."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.training.losses import (
    advantages,
    grpo,
    gumbel_top_k,
    pair_counts,
    plackett_luce,
    plackett_luce_kl,
    ranking,
    rewards_to_go,
    spike_reward,
)

BACKENDS = ("numba", "torch")
KEEP, ALPHA = torch.tensor([0.30, 0.305, 0.10, 0.50]).double(), torch.tensor([0.4, 0.2, 0.2, 0.7]).double()  # L1


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def evicted_by(alpha, count):
    """bool [R, N]: the `count` lowest, of equal ones the older."""
    order = alpha.sort(dim=-1, stable=True).indices
    return torch.zeros_like(alpha, dtype=torch.bool).scatter_(-1, order[:, :count], True)


def dense_ranking(keep, alpha, margin=0.01, count=None):
    """All pairs in one matrix: i is the lower one, j the higher."""
    pair = alpha[:, :, None] < alpha[:, None]
    if count is not None:
        evicted = evicted_by(alpha, count)
        pair = pair & evicted[:, :, None] & ~evicted[:, None]
    hinge = torch.relu(margin - (keep[:, None] - keep[:, :, None])) * pair
    number = pair.sum((1, 2))
    rows = hinge.sum((1, 2)) / number.clamp(min=1)
    return rows.sum() / (number > 0).sum().clamp(min=1)


def value_and_gradient(loss, keep):
    keep = keep.detach().clone().requires_grad_()
    value = loss(keep)
    value.backward()
    return value.item(), keep.grad


@st.composite
def rows(draw):
    """Scores and margin in quarters: differences are exact, ties and pairs exactly at the margin are common."""
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 24)))
    generator = seeded(draw(st.integers(0, 2**31)))
    levels = st.integers(1, 10)
    keep = torch.randint(draw(levels), shape, generator=generator).double() / 4
    alpha = torch.randint(draw(levels), shape, generator=generator).double()
    return keep, alpha, draw(st.sampled_from([0.0, 0.25, 0.5, 10.0]))


# --- ranking ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_foresightkv_l1_one_of_five_pairs_is_violated(backend):
    value, gradient = value_and_gradient(lambda keep: ranking(keep, ALPHA, backend=backend), KEEP)
    assert value == pytest.approx(0.003)
    assert gradient.tolist() == pytest.approx([-0.2, 0.2, 0, 0])
    lower, higher, total = pair_counts.count_all(KEEP[None], 0.01, ALPHA[None], backend)
    assert total.tolist() == [5]
    assert value * total.item() == pytest.approx(0.015)
    assert (lower.tolist(), higher.tolist()) == ([[0, 1, 0, 0]], [[1, 0, 0, 0]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_foresightkv_l1_equal_alphas_form_no_pair(backend):
    for pairs in ({"backend": backend}, {"pairs": "cross", "count": 2}, {"pairs": 7}):
        value, gradient = value_and_gradient(lambda keep, p=pairs: ranking(keep, torch.ones(4), **p), KEEP)
        assert value == 0
        assert (gradient == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_foresightkv_l1_a_pair_exactly_at_the_margin_contributes_nothing(backend):
    keep, alpha = torch.tensor([[0.5, 0.75]]), torch.tensor([[1.0, 2.0]])
    for pairs in ({"backend": backend}, {"pairs": "cross", "count": 1}, {"pairs": 3}):
        value, gradient = value_and_gradient(lambda keep, p=pairs: ranking(keep, alpha, 0.25, **p), keep)
        assert value == 0
        assert (gradient == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_foresightkv_l1_fast_equals_dense_on_200_items_with_ties(backend):
    keep = (torch.randn(3, 200, generator=seeded(1), dtype=torch.float64) * 100).round() / 100 + 1000
    alpha = torch.randint(40, (3, 200), generator=seeded(2)).double()
    expected, gradient = value_and_gradient(lambda keep: dense_ranking(keep, alpha, 0.013), keep)
    value, fast = value_and_gradient(lambda keep: ranking(keep, alpha, 0.013, backend=backend), keep)
    assert value == pytest.approx(expected, rel=1e-12)
    assert torch.allclose(fast, gradient, rtol=1e-12, atol=1e-15)
    expected, gradient = value_and_gradient(lambda keep: dense_ranking(keep, alpha, 0.013, 60), keep)
    value, fast = value_and_gradient(lambda keep: ranking(keep, alpha, 0.013, "cross", count=60), keep)
    assert value == pytest.approx(expected, rel=1e-12)
    assert torch.allclose(fast, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=rows())
def test_all_pairs_equal_the_dense_form(case, backend):
    keep, alpha, margin = case
    expected, gradient = value_and_gradient(lambda keep: dense_ranking(keep, alpha, margin), keep)
    value, fast = value_and_gradient(lambda keep: ranking(keep, alpha, margin, backend=backend), keep)
    assert value == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert torch.allclose(fast, gradient, rtol=1e-12, atol=1e-15)


@given(case=rows(), data=st.data())
def test_cross_pairs_equal_the_dense_form(case, data):
    keep, alpha, margin = case
    count = data.draw(st.integers(1, keep.shape[1]))
    expected, gradient = value_and_gradient(lambda keep: dense_ranking(keep, alpha, margin, count), keep)
    value, fast = value_and_gradient(lambda keep: ranking(keep, alpha, margin, "cross", count=count), keep)
    assert value == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert torch.allclose(fast, gradient, rtol=1e-12, atol=1e-15)


def test_a_common_offset_costs_no_digits():
    """Scores around 100 with a spread of 0.02, in float32: differences are exact, sums of scores would not be."""
    keep = 100 + 0.02 * torch.rand(1, 200, generator=seeded(2))
    alpha = torch.rand(1, 200, generator=seeded(3))
    assert ranking(keep, alpha).item() == pytest.approx(dense_ranking(keep.double(), alpha).item(), rel=2e-6)


def test_tiles_smaller_than_a_row(monkeypatch):
    keep, alpha = torch.rand(2, 4, 50, generator=seeded(3), dtype=torch.float64)
    expected = ranking(keep, alpha, backend="torch")
    for tile in (1, 4 * 50 * 7):
        monkeypatch.setattr(pair_counts, "TILE", tile)
        assert ranking(keep, alpha, backend="torch") == expected


@pytest.mark.parametrize("pairs", ["all", "cross", 40])
def test_ranking_gradients_agree_with_finite_differences(pairs):
    keep, alpha = torch.randn(2, 3, 9, generator=seeded(4), dtype=torch.float64)
    count = 4 if pairs == "cross" else None

    def loss(keep):
        return ranking(keep, alpha, 0.3, pairs, count=count, generator=seeded(5))

    assert torch.autograd.gradcheck(loss, (keep.requires_grad_(),))


def test_sampled_pairs_are_seeded_and_uniform():
    keep, alpha = torch.randn(2, 8, 12, generator=seeded(6), dtype=torch.float64)
    alpha = alpha.mul(2).round()
    expected, gradient = value_and_gradient(lambda keep: dense_ranking(keep, alpha, 0.5), keep)
    value, sampled = value_and_gradient(lambda keep: ranking(keep, alpha, 0.5, 200_000, generator=seeded(7)), keep)
    assert value == pytest.approx(expected, abs=0.01)
    assert (sampled - gradient).abs().max() < 0.001
    assert value == ranking(keep, alpha, 0.5, 200_000, generator=seeded(7)).item()
    assert value != ranking(keep, alpha, 0.5, 200_000, generator=seeded(8)).item()


def test_rows_may_have_any_shape_and_half_precision():
    keep, alpha = torch.randn(2, 2, 3, 5, 8, generator=seeded(9))
    flat = ranking(keep.reshape(-1, 8), alpha.reshape(-1, 8))
    assert ranking(keep, alpha) == flat
    half = ranking(keep.bfloat16().requires_grad_(), alpha.bfloat16())
    assert half.dtype == torch.float32
    half.backward()
    assert half.item() == pytest.approx(ranking(keep.bfloat16().float(), alpha.bfloat16().float()).item())


# --- reward ----------------------------------------------------------------------------------------------------------

FULL = torch.tensor([0.1, 0.2, 0.1, 3, 0.5, 0.1, 0.4, 0.2, 2.5, 0.1]).double()
EVICTED = torch.tensor([0.1, 2.2, 0.1, 6, 2.0, 1.7, 0.3, 2.2, 2.4, 0.1]).double()
ENTROPY = torch.tensor([0.1, 0.3, 0.2, 2.9, 0.9, 0.05, 0.6, 0.4, 2.0, 0.15]).double()
FULL, EVICTED, ENTROPY = ((column * 100).round() / 100 for column in (FULL, EVICTED, ENTROPY))  # as written, in float64


def test_foresightkv_r1_reward():
    assert spike_reward(FULL, EVICTED, ENTROPY, 0, reduction="sum").item() == pytest.approx(-10.56)
    assert spike_reward(FULL, EVICTED, ENTROPY, 0).item() == pytest.approx(-1.32)
    assert spike_reward(FULL, EVICTED, ENTROPY, 2, reduction="sum").item() == pytest.approx(-6.56)
    assert spike_reward(FULL, EVICTED, ENTROPY, 2).item() == pytest.approx(-6.56 / 7)


def test_foresightkv_r1_an_empty_tail_has_no_reward():
    assert spike_reward(FULL, EVICTED, ENTROPY, 10) is None
    assert spike_reward(FULL, EVICTED, ENTROPY, 7, variant="high") is None  # int(.2 * 3) = 0 high tokens


def test_foresightkv_r1_improvements_never_count():
    better = torch.where(EVICTED > FULL + 1.5, EVICTED, FULL - 100)
    assert spike_reward(FULL, better, ENTROPY, 0).item() == pytest.approx(-1.32)
    assert spike_reward(FULL, FULL - 2, ENTROPY, 0).item() == 0


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("low_large", -(2.0 + 1.6 + 2.0)),
        ("low", -(0 + 2 + 0 + 1.5 + 1.6 - 0.1 + 2 + 0)),
        ("high", -(3 - 0.1)),
        ("all", -(2 + 3 + 1.5 + 1.6 - 0.1 + 2 - 0.1)),
    ],
)
def test_rewards_of_the_ablation(variant, expected):
    number = {"high": 2, "all": 10}.get(variant, 8)
    total = spike_reward(FULL, EVICTED, ENTROPY, 0, reduction="sum", variant=variant)
    assert total.item() == pytest.approx(expected)
    mean = spike_reward(FULL, EVICTED, ENTROPY, 0, variant=variant)
    assert mean.item() == pytest.approx(expected / number)


def test_rewards_of_a_group_equal_rewards_one_by_one():
    evicted = torch.stack([EVICTED, FULL, EVICTED.flip(0)])
    one_by_one = [spike_reward(FULL, row, ENTROPY, 2).item() for row in evicted]
    assert spike_reward(FULL, evicted, ENTROPY, 2).tolist() == one_by_one
    assert spike_reward(FULL.expand(3, -1), evicted, ENTROPY.expand(3, -1), 2).tolist() == one_by_one


# --- objective -------------------------------------------------------------------------------------------------------


def test_foresightkv_a1_advantages():
    rewards = torch.tensor([-8.0, -2.0, -5.0, -5.0])
    assert advantages(rewards).tolist() == pytest.approx([-1.414214, 1.414214, 0, 0], abs=1e-6)
    assert (advantages(torch.full((3, 7), -0.1)) == 0).all()
    both = advantages(torch.stack([rewards, torch.full((4,), 0.3)]))
    assert both[0].tolist() == advantages(rewards).tolist()
    assert (both[1] == 0).all()


def test_what_is_still_to_come_of_a_reward():
    parts = spike_reward(FULL, EVICTED, ENTROPY, 0, reduction="sum", by_entry=True)  # spikes at 1, 5 and 7
    assert parts.sum().item() == pytest.approx(-10.56)
    found = rewards_to_go(parts, [0, 1, 2, 6, 8])
    assert found.tolist() == pytest.approx([-10.56, -10.56, -6.56, -4, 0])
    group = torch.stack([parts, torch.zeros_like(parts)])
    whole, to_go = group.sum(-1), rewards_to_go(group, [0, 2, 8])
    each = advantages(whole, to_go)
    assert each[:, 0].tolist() == pytest.approx(advantages(whole).tolist())
    assert each[:, 1].tolist() == pytest.approx([-6.56 / 10.56, 6.56 / 10.56])
    assert each[:, 2].tolist() == [0, 0]
    assert (advantages(torch.ones(3), torch.rand(3, 4)) == 0).all()
    nearly = advantages(torch.tensor([-1.0, -1.0000001]), torch.tensor([[-1.0, -0.9, 0], [-1.0000001, -0.1, 0]]))
    assert nearly.abs().max() <= 1, "what rounding leaves of equal rewards may not blow up"
    halves = [FULL.half() * 100, EVICTED.half() * 100, ENTROPY.half()]
    assert spike_reward(*halves, 0, reduction="sum").isfinite()


NEW, OLD = torch.tensor([0.3, 0.1, 0.2]).double().log(), torch.tensor([0.2, 0.2, 0.2]).double().log()
REFERENCE = torch.tensor([0.15, 0.2, 0.2]).double().log()


def test_foresightkv_o1_objective():
    for advantage, expected in ((1.0, -0.891667), (-1.0, 1.108333)):
        loss = grpo(NEW, OLD, REFERENCE, torch.tensor(advantage).double(), clip=0.2, beta=0.05)
        assert loss.item() == pytest.approx(expected, abs=1e-6)
    terms = [grpo(NEW[i], OLD[i], REFERENCE[i], torch.tensor(-1.0).double(), beta=0.0).item() for i in range(3)]
    assert terms == pytest.approx([1.5, 0.8, 1.0])
    k3 = [grpo(NEW[i], OLD[i], REFERENCE[i], torch.tensor(0.0).double(), beta=1.0).item() for i in range(3)]
    assert k3 == pytest.approx([0.193147, 0.306853, 0], abs=1e-6)


def test_foresightkv_o1_on_policy_the_ratio_is_exactly_one():
    advantage = torch.tensor([0.7, -1.3, 0.4]).double()
    new = NEW.clone().requires_grad_()
    loss = grpo(new, new.detach(), REFERENCE, advantage, beta=0.0)
    loss.backward()
    assert loss.item() == -advantage.mean().item()
    assert new.grad.tolist() == pytest.approx((-advantage / 3).tolist())  # REINFORCE: -A d log p
    loss = grpo(NEW, NEW, REFERENCE, advantage, beta=0.05)
    k3 = (0.193147 + 0.306853) / 3
    assert loss.item() == pytest.approx(-advantage.mean().item() + 0.05 * k3, abs=1e-6)


def test_grpo_gradients_agree_with_finite_differences_and_take_an_exact_kl():
    advantage = torch.tensor([0.7, -1.3, 0.4]).double()
    new = NEW.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda new: grpo(new, OLD, REFERENCE, advantage, beta=0.3), (new,))
    exact = grpo(NEW, OLD, None, advantage, beta=0.3, kl=torch.tensor([1.0, 3.0]))
    assert exact.item() == pytest.approx(grpo(NEW, OLD, REFERENCE, advantage, beta=0.0).item() + 0.3 * 2)


def test_a_distant_old_scorer_does_not_overflow():
    new = torch.tensor([0.0, 0.0], requires_grad=True)
    loss = grpo(new, torch.tensor([-500.0, -500.0]), new.detach(), torch.tensor([1.0, -1.0]))
    loss.backward()
    assert loss.isfinite()
    assert new.grad.isfinite().all()


def test_reinforcement_learns_to_evict_what_is_rewarded():
    """All parts together: four candidates, evicting 2 costs a spike, so after some steps 2 stays."""
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    reference, optimiser, generator = logits.detach().clone(), torch.optim.Adam([logits], 0.1), seeded(11)
    for _ in range(60):
        draw = gumbel_top_k(logits.detach().expand(8, 4), 2, pool=4, generator=generator)
        loss = torch.zeros(8, 5)
        loss[:, 3] = 3.0 * (draw.order == 2).any(-1)
        advantage = advantages(spike_reward(torch.zeros(5), loss, torch.zeros(5), 0))
        log_prob = plackett_luce(logits.expand(8, 4), draw.order, draw.pool) / 2
        kl = plackett_luce_kl(logits.expand(8, 4), reference.expand(8, 4), draw.order, draw.pool)
        optimiser.zero_grad()
        grpo(log_prob, log_prob.detach(), None, advantage, kl=kl).backward()
        optimiser.step()
    assert (logits[[0, 1, 3]] - logits[2]).min() > 2


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ranking(torch.zeros(2, 4), torch.zeros(2, 5)), "(2, 4) and (2, 5)"),
        (lambda: ranking(torch.zeros(2, 0), torch.zeros(2, 0)), "N >= 1"),
        (lambda: ranking(torch.zeros(4), torch.full((4,), math.nan)), "4 alphas are NaN"),
        (lambda: ranking(torch.zeros(4), torch.zeros(4), pairs="some"), "'some'"),
        (lambda: ranking(torch.zeros(4), torch.zeros(4), pairs=0), "got 0"),
        (lambda: ranking(torch.zeros(4), torch.zeros(4), pairs=True), "got True"),
        (lambda: ranking(torch.zeros(4), torch.zeros(4), pairs="cross"), "count=None"),
        (lambda: ranking(torch.zeros(4), torch.zeros(4), count=2), "count=2"),
        (lambda: ranking(torch.zeros(4), torch.zeros(4), pairs="cross", count=5), "4 candidates, got 5"),
        (lambda: ranking(torch.zeros(4), torch.zeros(4), backend="cuda"), "'cuda'"),
        (lambda: spike_reward(FULL, EVICTED, ENTROPY[1:], 0), "(10,), (10,), (9,)"),
        (lambda: spike_reward(FULL[None], EVICTED, ENTROPY[None], 0), "(1, 10), (10,), (1, 10)"),
        (lambda: spike_reward(FULL, EVICTED * math.inf, ENTROPY, 0), "not finite"),
        (lambda: spike_reward(FULL, EVICTED, ENTROPY, -1), "got -1"),
        (lambda: spike_reward(FULL, EVICTED, ENTROPY, 0, eta=math.nan), "got nan"),
        (lambda: rewards_to_go(torch.zeros(3, 4), [-1]), "0 .. 3, got [-1]"),
        (lambda: spike_reward(FULL, EVICTED, ENTROPY, 0, variant="mean"), "'mean'"),
        (lambda: spike_reward(FULL, EVICTED, ENTROPY, 0, reduction="mean"), "'mean'"),
        (lambda: advantages(torch.zeros(3, 1)), "(3, 1)"),
        (lambda: advantages(torch.tensor([0.0, math.nan])), "not finite"),
    ],
)
def test_mistakes_name_the_numbers(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()

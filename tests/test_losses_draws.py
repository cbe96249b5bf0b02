"""ForesightKV's sampled evictions: draws against frequencies, their probabilities against enumeration."""

import itertools
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.training.losses import gumbel_top_k, independent_log_prob, plackett_luce, plackett_luce_kl

LOGITS = torch.tensor([4.0, 3.0, 2.0, 1.0]).double().log()  # P1


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def value_and_gradient(loss, logits):
    logits = logits.detach().clone().requires_grad_()
    value = loss(logits)
    value.backward()
    return value.item(), logits.grad


@pytest.mark.parametrize(("offset", "scale"), [(1e4, 3.0), (0.0, 1000.0), (1e4, 1000.0)])
def test_the_kl_of_large_logits_in_float32_is_that_in_float64(offset, scale):
    generator = torch.Generator().manual_seed(1)
    new = offset + scale * torch.randn(200, 8, generator=generator)
    reference = new + torch.randn(200, 8, generator=generator)
    order = torch.rand(200, 8, generator=generator).argsort(-1)
    single, double = (plackett_luce_kl(a, b, order) for a, b in ((new, reference), (new.double(), reference.double())))
    torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=2e-4 * max(1.0, scale / 100))
    assert single[:, -1].abs().max() < 1e-3, "one item left"


def test_foresightkv_p1_ordered_and_independent_log_probabilities():
    assert plackett_luce(LOGITS, torch.tensor([0, 2])).item() == pytest.approx(-2.014903, abs=1e-6)
    assert plackett_luce(LOGITS, torch.tensor([0, 2])).exp().item() == pytest.approx(2 / 15)
    assert plackett_luce(LOGITS, torch.tensor([2, 0])).exp().item() == pytest.approx(1 / 10)
    both = plackett_luce(LOGITS.expand(2, 4), torch.tensor([[0, 2], [2, 0]])).exp()
    assert both.sum().item() == pytest.approx(7 / 30)
    per_draw = plackett_luce(LOGITS, torch.tensor([0, 2]), per_draw=True)
    assert per_draw.exp().tolist() == pytest.approx([4 / 10, 2 / 6])
    independent = independent_log_prob(LOGITS, torch.tensor([0, 2]))
    assert independent.tolist() == pytest.approx([-0.916291, -1.609438], abs=1e-6)
    assert independent.sum().item() == pytest.approx(-2.525729, abs=1e-6)
    assert independent.mean().item() == pytest.approx(-1.262864, abs=1e-6)


def test_foresightkv_p1_gradients():
    order = torch.tensor([0, 2])
    _, gradient = value_and_gradient(lambda logits: plackett_luce(logits, order), LOGITS)
    assert gradient.tolist() == pytest.approx([0.6, -0.8, 0.466667, -0.266667], abs=1e-6)
    _, gradient = value_and_gradient(lambda logits: independent_log_prob(logits, order).sum(), LOGITS)
    assert gradient.tolist() == pytest.approx([0.2, -0.6, 0.6, -0.2])


def test_foresightkv_p1_probabilities_of_all_sets_sum_to_one():
    orders = torch.tensor(list(itertools.permutations(range(4), 2)))
    probability = plackett_luce(LOGITS.expand(12, 4), orders).exp()
    sets = {}
    for order, one in zip(orders.tolist(), probability.tolist(), strict=True):
        sets[frozenset(order)] = sets.get(frozenset(order), 0) + one
    assert len(sets) == 6
    assert sum(sets.values()) == pytest.approx(1)
    assert sets[frozenset({0, 2})] == pytest.approx(7 / 30)


def test_foresightkv_p2_the_pool_limits_what_can_be_drawn():
    pool = torch.tensor([0, 1]).expand(4, 2)
    probability = plackett_luce(LOGITS.expand(4, 4), torch.arange(4)[:, None], pool).exp()
    assert probability.tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    draw = gumbel_top_k(LOGITS.expand(20_000, 4), 1, generator=seeded(1))
    assert draw.pool.unique(dim=0).tolist() == [[0, 1]]  # 2 L of 4
    share = draw.order[:, 0].bincount(minlength=4) / 20_000
    assert share.tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=0.012)


def test_foresightkv_p2_frequencies_without_a_limit():
    order = gumbel_top_k(LOGITS.expand(200_000, 4), 2, pool=4, generator=seeded(2)).order
    hit = (order.sort(-1).values == torch.tensor([0, 2])).all(-1).double().mean().item()
    assert hit == pytest.approx(7 / 30, abs=0.003)
    ordered = (order == torch.tensor([0, 2])).all(-1).double().mean().item()
    assert ordered == pytest.approx(2 / 15, abs=0.003)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_foresightkv_p2_underflow_never_evicts_the_unlikely_before_the_merely_small(dtype):
    logits = torch.tensor([0.0, -200.0, -300.0, -1.0], dtype=dtype).expand(5000, 4)
    order = gumbel_top_k(logits, 3, generator=seeded(3)).order
    assert order.sort(-1).values.unique(dim=0).tolist() == [[0, 1, 3]]
    log_prob = plackett_luce(logits, order)
    assert log_prob.isfinite().all()
    assert log_prob.exp().unique().sum().item() == pytest.approx(1)  # 0, 3, 1 or 3, 0, 1


def test_foresightkv_p2_same_seed_same_set_for_any_batch_split():
    logits = torch.randn(13, 2, 40, generator=seeded(4))
    whole = gumbel_top_k(logits, 10, generator=seeded(5)).order
    for split in ([1] * 13, [4, 9], [7, 3, 3]):
        generator = seeded(5)
        parts = [gumbel_top_k(part, 10, generator=generator).order for part in logits.split(split)]
        assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(gumbel_top_k(logits, 10, generator=seeded(6)).order, whole)


def test_a_generator_per_row_makes_several_steps_independent_of_the_batch():
    steps = torch.randn(3, 4, 2, 20, generator=seeded(7))

    def rollout(rows):
        own = [seeded(100 + row) for row in rows]
        return torch.stack([gumbel_top_k(step[rows], 5, generator=own).order for step in steps], 1)

    assert torch.equal(torch.cat([rollout([0, 1]), rollout([2, 3])]), rollout([0, 1, 2, 3]))


def test_of_equal_logits_the_older_enters_the_pool():
    assert gumbel_top_k(torch.zeros(3, 50), 2, generator=seeded()).pool.tolist() == [[0, 1, 2, 3]] * 3
    assert gumbel_top_k(torch.zeros(50), 40, generator=seeded()).pool.tolist() == list(range(50))


@given(st.integers(1, 6), st.data())
def test_plackett_luce_equals_draw_by_draw(candidates, data):
    size = data.draw(st.integers(1, candidates))
    count = data.draw(st.integers(1, size))
    generator = seeded(data.draw(st.integers(0, 2**31)))
    new, reference = torch.randn(2, candidates, generator=generator, dtype=torch.float64) * 3
    pool = torch.randperm(candidates, generator=generator)[:size]
    order = pool[torch.randperm(size, generator=generator)[:count]]
    left, log_prob, divergence = pool.tolist(), [], []
    for item in order.tolist():
        p, q = new[left].log_softmax(-1), reference[left].log_softmax(-1)
        log_prob.append(p[left.index(item)].item())
        divergence.append((p.exp() * (p - q)).sum().item())
        left.remove(item)
    assert plackett_luce(new, order, pool, per_draw=True).tolist() == pytest.approx(log_prob, abs=1e-12)
    assert plackett_luce(new, order, pool).item() == pytest.approx(sum(log_prob), abs=1e-12)
    assert plackett_luce_kl(new, reference, order, pool).tolist() == pytest.approx(divergence, abs=1e-12)
    inputs = (new.requires_grad_(), reference.requires_grad_())
    assert torch.autograd.gradcheck(lambda new, reference: plackett_luce(new, order, pool) + reference.sum(), inputs)
    assert torch.autograd.gradcheck(lambda new, reference: plackett_luce_kl(new, reference, order, pool), inputs)


def test_kl_of_the_draws_is_unbiased_for_the_kl_of_the_orders():
    new, reference = torch.randn(2, 5, generator=seeded(8), dtype=torch.float64)
    orders = torch.tensor(list(itertools.permutations(range(5), 3)))
    new, reference = new.expand(len(orders), 5), reference.expand(len(orders), 5)
    log_p, log_q = plackett_luce(new, orders), plackett_luce(reference, orders)
    exact = (log_p.exp() * (log_p - log_q)).sum().item()
    estimate = (log_p.exp() * plackett_luce_kl(new, reference, orders).sum(-1)).sum().item()
    assert estimate == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("pool", [None, torch.arange(5)])
def test_an_item_that_neither_can_draw_changes_no_kl(pool):
    new, reference = torch.randn(2, 4, generator=seeded(12), dtype=torch.float64)
    order = torch.tensor([2, 0, 3])
    expected = plackett_luce_kl(new, reference, order)
    new, reference = (torch.cat([logits, torch.tensor([-math.inf])]).requires_grad_() for logits in (new, reference))
    divergence = plackett_luce_kl(new, reference, order, pool)
    divergence.sum().backward()
    assert divergence.tolist() == pytest.approx(expected.tolist())
    assert new.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kl_of_equals_is_zero_with_zero_gradient(dtype):
    logits = (torch.randn(3, 300, generator=seeded(9), dtype=dtype) * 10).requires_grad_()
    order = torch.stack([torch.randperm(300, generator=seeded(10 + row))[:150] for row in range(3)])
    divergence = plackett_luce_kl(logits, logits.detach(), order)
    divergence.sum().backward()
    tolerance = 100 * torch.finfo(dtype).eps
    assert divergence.abs().max() < tolerance
    assert logits.grad.abs().max() < 150 * tolerance


def test_extreme_logits_and_items_outside_the_pool_make_no_nan():
    logits = torch.tensor([3e4, -3e4, -math.inf, 0.0, 1.0], requires_grad=True)
    log_prob = plackett_luce(logits, torch.tensor([0, 3, 1]), torch.tensor([0, 1, 3, 4]))
    divergence = plackett_luce_kl(logits, torch.zeros(5), torch.tensor([0, 3, 1]), torch.tensor([0, 1, 3, 4])).sum()
    (log_prob + divergence).backward()
    assert log_prob.isfinite()
    assert logits.grad.isfinite().all()
    logits.grad = None
    plackett_luce(logits, torch.tensor([0, 3, 4, 1]), torch.arange(5)).backward()  # only the impossible one is left
    assert logits.grad.isfinite().all()
    assert plackett_luce(logits, torch.tensor([0, 2])).item() == -math.inf
    assert plackett_luce(logits, torch.tensor([4]), torch.tensor([0, 1])).item() == -math.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gumbel_top_k(torch.zeros(4), 5), "draw 5 of a pool of 4 among 4"),
        (lambda: gumbel_top_k(torch.zeros(9), 3, pool=2), "draw 3 of a pool of 2 among 9"),
        (lambda: gumbel_top_k(torch.full((4,), math.nan), 1), "4 eviction logits are NaN"),
        (lambda: gumbel_top_k(torch.zeros(3, 4), 1, generator=[seeded()]), "got 1 for 3 rows"),
    ],
)
def test_mistakes_name_the_numbers(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()

"""The likelihood of attention by age: exact values, where it is least, what it ignores, its gradients."""

import math

import pytest
import torch

from kvkeep.lifetimes import static_priority
from kvkeep.training.losses import age_edges, age_ranges, intensity


def loss_by_hand(score, decay, mass, first, last, base, step, dispersion):
    total = 0.0
    for j in range(len(mass)):
        if last[j] <= first[j]:
            continue
        ages = torch.linspace(first[j], last[j], 20_001, dtype=torch.float64)
        expected = float(torch.trapezoid(torch.exp(score - decay * ages / step), ages))
        seen = mass[j] / base
        total += (seen + dispersion) * math.log((expected + dispersion) / (seen + dispersion))
        total -= seen * math.log(expected / seen)
    return total


def test_one_token_by_hand():
    first, last = torch.tensor([[0.0, 32.0, 64.0]]), torch.tensor([[32.0, 64.0, 64.0]])
    mass = torch.tensor([[[[0.5, 0.1, 9.0]]]])  # the last range is beyond the text: whatever it says is ignored
    arguments = (torch.tensor([[[0.3]]]), torch.tensor([0.7]), mass, first, last, torch.tensor([0.01]))
    expected = loss_by_hand(0.3, 0.7, [0.5, 0.1, 9.0], [0, 32, 64], [32, 64, 64], 0.01, 64, 5.0)
    assert float(intensity(*(a.double() for a in arguments))) == pytest.approx(expected, rel=1e-6)


def test_ranges_end_with_the_text():
    assert age_edges(100) == [0, 32, 64, 96, 128]
    assert age_edges(5000)[-4:] == [1024, 2048, 4096, 8192]
    assert len(age_edges(100_000)) < 45, "linear memory: a bounded number of ranges"
    first, last = age_ranges(100, 10, age_edges(100))
    assert first[20].tolist() == [0, 32, 64, 70]
    assert last[20].tolist() == [32, 64, 70, 70]  # token 20 is seen by the queries 30 .. 99 after its window
    assert (last - first).sum(1).tolist() == [max(0, 90 - t) for t in range(100)]


def test_least_where_score_and_decay_are_those_of_the_attention():
    generator = torch.Generator().manual_seed(0)
    first, last = age_ranges(400, 8, age_edges(400))
    score = torch.randn(1, 2, 400, generator=generator, dtype=torch.float64)
    decay, base = torch.tensor([0.2, 1.5], dtype=torch.float64), torch.tensor([0.01, 0.002], dtype=torch.float64)
    rate = (decay / 64)[:, None, None]
    mass = score.exp()[..., None] * base[:, None, None] * ((-rate * first).exp() - (-rate * last).exp()) / rate
    guess, rates = score.clone().requires_grad_(), decay.clone().requires_grad_()
    intensity(guess, rates, mass, first, last, base).backward()
    assert guess.grad.abs().max() < 1e-6
    assert rates.grad.abs().max() < 1e-4
    here = intensity(score, decay, mass, first, last, base)
    assert here == pytest.approx(0, abs=1e-6)
    for other in ((score + 0.1, decay), (score - 0.1, decay), (score, decay * 1.2), (score, decay * 0.8)):
        assert intensity(*other, mass, first, last, base) > here


def test_priority_of_the_intensity_is_the_static_priority():
    """The log intensity of two tokens differs at every query by the difference of their static priorities."""
    score, decay = torch.tensor([[[1.0, 0.2]]]), torch.tensor([0.5])
    positions = torch.tensor([64, 640])
    priority = static_priority(score, -decay, 64, positions=positions[None, None])
    for query in (700, 1500):
        log_intensity = score - decay * (query - positions) / 64
        assert torch.allclose(log_intensity.diff(dim=-1), priority.diff(dim=-1))


def test_gradients_are_exact_and_finite_far_out():
    generator = torch.Generator().manual_seed(1)
    first, last = age_ranges(90, 4, age_edges(90))
    mass = torch.rand(1, 2, 90, first.shape[1], generator=generator, dtype=torch.float64) / 50
    base = torch.tensor([0.01, 0.02], dtype=torch.float64)
    score = torch.randn(1, 2, 90, generator=generator, dtype=torch.float64).requires_grad_()
    decay = torch.tensor([0.3, 0.9], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s, d: intensity(s, d, mass, first, last, base), (score, decay))
    for scale in (100.0, 1e4):
        far = (score.detach() * scale).float().requires_grad_()
        intensity(far, decay.float(), mass, first, last, base).backward()
        assert torch.isfinite(far.grad).all()


def test_shapes_that_clash_are_named():
    first, last = age_ranges(90, 4, age_edges(90))
    with pytest.raises(ValueError, match=r"got \(1, 2, 90, 5\)"):
        intensity(torch.zeros(1, 2, 90), torch.ones(2), torch.zeros(1, 2, 90, 5), first, last, torch.ones(2))


def test_nothing_to_say_is_an_exact_zero():
    score = torch.zeros(1, 2, 0, requires_grad=True)
    loss = intensity(score, torch.ones(2), torch.zeros(1, 2, 0, 3), torch.zeros(0, 3), torch.zeros(0, 3), torch.ones(2))
    loss.backward()
    assert loss == 0

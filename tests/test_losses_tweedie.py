"""The Tweedie deviance: its limits, and that its minimum is the mean whatever the power."""

from __future__ import annotations

import pytest
import torch

from kvkeep.training.losses import tweedie


def test_limits_are_poisson_and_gamma():
    log_mean, amount = torch.tensor([0.3, -1.0, 2.0]).double(), torch.tensor([0.0, 0.5, 9.0]).double()
    mean = log_mean.exp()
    torch.testing.assert_close(tweedie(log_mean, amount, 1.0), (mean - amount * log_mean).mean())
    torch.testing.assert_close(tweedie(log_mean, amount, 2.0), (amount / mean + log_mean).mean())
    for edge, beside in ((1.0, 1.0 + 1e-6), (2.0, 2.0 - 1e-6)):
        gradients = []
        for power in (edge, beside):
            leaf = log_mean.clone().requires_grad_()
            gradients.append(torch.autograd.grad(tweedie(leaf, amount, power), leaf)[0])
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("power", [1.0, 1.3, 1.7, 2.0])
def test_the_minimum_is_at_the_mean(power):
    """One prediction for amounts of which most are next to nothing: the mean, not the geometric mean."""
    amount = torch.tensor([0.001] * 9 + [10.0]).double()
    leaf = amount.mean().log().expand(10).clone().requires_grad_()
    shared = leaf.mean().expand(10)
    (gradient,) = torch.autograd.grad(tweedie(shared, amount, power), leaf)
    assert gradient.abs().max() < 1e-12


def test_extreme_predictions_stay_finite():
    leaf = torch.tensor([-1e6, 1e6], requires_grad=True)
    loss = tweedie(leaf, torch.tensor([5.0, 0.0]), 1.5)
    assert torch.isfinite(loss)
    assert torch.isfinite(torch.autograd.grad(loss, leaf)[0]).all()


@pytest.mark.parametrize(
    ("amount", "power", "sentence"),
    [
        (torch.ones(3), 1.5, "must have one shape"),
        (torch.ones(2), 0.5, r"power must be in \[1, 2\], not 0.5"),
        (torch.tensor([1.0, -1.0]), 1.5, "must not be negative"),
    ],
)
def test_refusals(amount, power, sentence):
    with pytest.raises(ValueError, match=sentence):
        tweedie(torch.zeros(2), amount, power)

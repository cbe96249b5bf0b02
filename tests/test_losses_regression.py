"""The regression on standardised targets: what it reads, its unit, its gradients."""

import math
import re

import pytest
import torch

from kvkeep.budget import Budget
from kvkeep.training.losses import regression, target_statistics

TOY = Budget(2, 2, 2)


def test_regression_of_the_standardised_target_is_zero():
    target = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(9), dtype=torch.float64) * 3 - 8
    mean, std = target_statistics(target, TOY)
    score = (target - mean[:, None]) / std[:, None]
    assert regression(score, target, TOY).item() == 0
    assert regression(score, target, TOY, mean, std).item() == 0
    assert regression(score, target, TOY, mean + std, std, beta=1e-9).item() == pytest.approx(1)  # |error| = 1
    competing = score[..., 2:-2]
    assert competing.mean((0, 2)).abs().max() < 1e-12
    assert competing.std((0, 2), correction=0).tolist() == pytest.approx([1, 1])


def test_regression_reads_only_tokens_that_ever_compete():
    generator = torch.Generator().manual_seed(10)
    score, target = torch.randn(2, 1, 2, 20, generator=generator, dtype=torch.float64)
    expected = regression(score, target, TOY)
    for changed in ((0, 1), (18, 19)):
        for column in (score, target):
            column[..., list(changed)] = math.nan
    loss = regression(score.requires_grad_(), target, TOY)
    loss.backward()
    assert loss.item() == expected.item()
    assert score.grad.ne(0).any(1).squeeze().nonzero()[:, 0].tolist() == list(range(2, 18))


def test_regression_of_padded_rows_and_gradients():
    generator = torch.Generator().manual_seed(11)
    score, target = torch.randn(2, 2, 2, 20, generator=generator, dtype=torch.float64)
    alone = regression(score[:1, :, 5:], target[:1, :, 5:], TOY)
    padded = regression(score[:1], target[:1], TOY, padding=torch.tensor([5]))
    assert padded.item() == pytest.approx(alone.item(), rel=1e-12)
    assert torch.autograd.gradcheck(lambda score: regression(score, target, TOY), (score.requires_grad_(),))


def test_regression_of_constant_and_of_short_rows():
    score = torch.ones(1, 1, 10, requires_grad=True)
    assert regression(score, torch.full((1, 1, 10), -3.0), TOY).item() == pytest.approx(0.5)
    loss = regression(score[..., :4], torch.zeros(1, 1, 4), TOY)
    loss.backward()
    assert loss.item() == 0
    assert (score.grad == 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: regression(torch.zeros(1, 1, 9), torch.zeros(1, 1, 8), TOY), "(1, 1, 9) and (1, 1, 8)"),
        (lambda: regression(torch.zeros(1, 1, 9), torch.zeros(1, 1, 9), TOY, mean=torch.zeros(1)), "or neither"),
    ],
)
def test_mistakes_name_the_numbers(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()

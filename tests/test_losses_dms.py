"""The parts of DMS: the soft mask, the hinge, the relaxed gates."""

import math

import pytest
import torch

from kvkeep.training.losses import dms_bias, dms_closed, dms_hinge, dms_key_bias, dms_relax


def test_kvpop_12_13_dms_soft_mask():
    logits = torch.tensor([0.0, 1.0, -2.0, 0.5])
    assert dms_key_bias(logits).tolist() == pytest.approx([-1.31326169, -0.12692801, -0.97407698, -0.69314718])
    bias = dms_bias(logits, window=1)
    assert bias[2, :3].softmax(-1).tolist() == pytest.approx([0.11853167, 0.44073416, 0.44073416])
    assert bias[3].softmax(-1).tolist() == pytest.approx([0.08538532, 0.27964133, 0.31748667, 0.31748667])


def test_kvpop_12_13_dms_hinge():
    assert dms_hinge(torch.tensor(0.6), 1 - 1 / 4).item() == pytest.approx(0.15)
    assert dms_hinge(torch.tensor([0.9, 0.6]), 0.75).item() == pytest.approx(0.075)


def test_dms_bias_row_blocks_and_gradient():
    logits = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(12), dtype=torch.float64).requires_grad_()
    whole = dms_bias(logits, 2)
    blocks = [dms_bias(logits, 2, slice(start, start + 4)) for start in (0, 4, 8)]
    assert torch.equal(torch.cat(blocks, -2), whole)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    assert torch.equal(whole != 0, (distance > 2).expand_as(whole))
    assert torch.autograd.gradcheck(lambda logits: dms_bias(logits, 2), (logits,))


def test_dms_gates_are_logistic_and_seeded():
    gates = dms_relax(torch.full((200_000,), 1.0), generator=torch.Generator().manual_seed(13))
    assert (gates > 0).double().mean().item() == pytest.approx(1 / (1 + math.exp(-1)), abs=0.004)
    assert torch.equal(gates, dms_relax(torch.full((200_000,), 1.0), generator=torch.Generator().manual_seed(13)))


def test_dms_closed_counts_hard_and_learns_soft():
    logits = torch.tensor([2.0, -1.0, 0.5, -3.0], requires_grad=True)
    closed = dms_closed(logits)
    closed.backward()
    assert closed.item() == pytest.approx(0.5)
    soft = logits.detach().sigmoid()
    assert logits.grad.tolist() == pytest.approx((soft * (1 - soft) / 4).tolist())


def test_mistakes_name_the_numbers():
    with pytest.raises(ValueError, match="got -1"):
        dms_bias(torch.zeros(4), -1)
    with pytest.raises(ValueError, match=r"got 0\.0"):
        dms_relax(torch.zeros(4), 0.0)

"""Distillation on a teacher's top tokens against the divergence over the whole vocabulary."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.training.losses import TopLogits, distillation, top_logits

TEACHER = torch.tensor([2.0, 1.0, 0.0, -1.0]).double()  # kvpop 12.11
STUDENT = torch.tensor([1.0, 1.5, 0.0, 0.0]).double()


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def full_kl(teacher, student):
    p, q = teacher.log_softmax(-1), student.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def merged(logits, ids, kl):
    """Log-probabilities over the ids alone, or over the ids and one outcome for all others."""
    probability = logits.softmax(-1)
    top = probability.gather(-1, ids)
    if kl == "renorm":
        return (top / top.sum(-1, keepdim=True)).log()
    others = probability.scatter(-1, ids, 0.0).sum(-1, keepdim=True)
    return torch.cat([top, others], -1).log()


# --- the paper's numbers ---------------------------------------------------------------------------------------------


def test_kvpop_12_11_renormalised_and_with_a_bucket_for_the_rest():
    teacher = top_logits(TEACHER, 2)
    assert distillation(STUDENT, teacher, kl="renorm").item() == pytest.approx(0.2574031646, abs=1e-10)
    assert distillation(STUDENT, teacher, kl="tail").item() == pytest.approx(0.2592000124, abs=1e-10)
    assert distillation(STUDENT, teacher).item() == distillation(STUDENT, teacher, kl="tail").item()


@pytest.mark.parametrize("kl", ["tail", "renorm"])
def test_kvpop_12_11_all_tokens_give_the_full_forward_divergence(kl):
    assert distillation(STUDENT, top_logits(TEACHER, 4), kl=kl).item() == pytest.approx(0.2724248699, abs=1e-10)
    assert distillation(TEACHER, top_logits(STUDENT, 4), kl=kl).item() == pytest.approx(0.2777898516, abs=1e-10)


@pytest.mark.parametrize("kl", ["tail", "renorm"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_kvpop_12_11_zero_with_zero_gradient_when_equal(kl, k):
    student = (TEACHER + 5.0).requires_grad_()  # a constant changes no probability
    loss = distillation(student, top_logits(TEACHER, k), kl=kl)
    loss.backward()
    assert abs(loss.item()) < 1e-15
    assert student.grad.abs().max() < 1e-15


# --- the definition --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kl", ["tail", "renorm"])
@given(vocabulary=st.integers(1, 12), data=st.data())
def test_divergence_equals_the_merged_distributions(kl, vocabulary, data):
    k = data.draw(st.integers(1, vocabulary))
    generator = seeded(data.draw(st.integers(0, 2**31)))
    logits = torch.randint(-4, 5, (2, 2, 3, vocabulary), generator=generator).double()  # heavy ties
    teacher, student = logits[0], logits[1].requires_grad_()
    top = top_logits(teacher, k)
    p, q = merged(teacher, top.ids, kl), merged(student, top.ids, kl)
    expected = torch.where(p > -math.inf, p.exp() * (p - q), 0.0).sum(-1)
    loss = distillation(student, top, kl=kl, reduction="none")
    assert torch.allclose(loss, expected, rtol=1e-10, atol=1e-12)
    assert (loss <= full_kl(teacher, student) + 1e-12).all() or kl == "renorm"
    assert torch.autograd.gradcheck(lambda student: distillation(student, top, kl=kl), (student,))


def test_a_sure_teachers_rest_is_not_lost_to_rounding():
    """In float32 one minus the top is 0 here; summing the rest itself keeps its digits."""
    logits = torch.cat([torch.tensor([30.0]), torch.linspace(-3, 3, 50)])
    top = top_logits(logits, 1)
    exact = logits.double().log_softmax(-1)[1:].logsumexp(-1).item()
    assert top.log_rest.item() == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize("kl", ["tail", "renorm"])
@pytest.mark.parametrize("k", [2, 4])
def test_tokens_that_the_teacher_rules_out_make_no_nan(kl, k):
    teacher = torch.cat([TEACHER[:2], torch.full((3,), -math.inf)])
    student = torch.cat([STUDENT, torch.zeros(1)]).requires_grad_()
    loss = distillation(student, top_logits(teacher, k), kl=kl)
    loss.backward()
    p, q = teacher[:2].log_softmax(-1), student.log_softmax(-1)[:2]
    if kl == "renorm":
        q = student[: min(k, 5)].log_softmax(-1)[:2]
    assert loss.item() == pytest.approx((p.exp() * (p - q)).sum().item())
    assert student.grad.isfinite().all()


def test_top_logits_are_the_likeliest_and_their_masses_sum_to_one():
    logits = torch.randn(3, 5, 40, generator=seeded(1), dtype=torch.float64)
    top = top_logits(logits, 8)
    assert torch.allclose(top.log_probs, logits.log_softmax(-1).gather(-1, top.ids), rtol=1e-14)
    assert torch.equal(top.ids, logits.argsort(-1, descending=True)[..., :8])
    assert torch.allclose(top.log_probs.exp().sum(-1) + top.log_rest.exp(), torch.ones(3, 5).double())
    assert (top_logits(logits, 40).log_rest == -math.inf).all()


@pytest.mark.parametrize("kl", ["tail", "renorm"])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunks_change_neither_loss_nor_gradient(kl, chunk):
    generator = seeded(2)
    teacher = torch.randn(2, 7, 30, generator=generator, dtype=torch.float64)
    whole = torch.randn(2, 7, 30, generator=generator, dtype=torch.float64).requires_grad_()
    parts = whole.detach().clone().requires_grad_()
    top = top_logits(teacher, 5, chunk)
    assert all(torch.equal(*pair) for pair in zip(top, top_logits(teacher, 5), strict=True))
    expected, loss = distillation(whole, top, kl=kl), distillation(parts, top, kl=kl, chunk=chunk)
    expected.backward()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
    assert torch.allclose(parts.grad, whole.grad, rtol=1e-12, atol=1e-16)


def test_reductions_and_mask():
    teacher, student = torch.randn(2, 2, 6, 20, generator=seeded(3), dtype=torch.float64)
    top = top_logits(teacher, 4)
    each = distillation(student, top, reduction="none")
    assert each.shape == (2, 6)
    assert distillation(student, top).item() == pytest.approx(each.mean().item())
    assert distillation(student, top, reduction="sum").item() == pytest.approx(each.sum().item())
    mask = torch.rand(2, 6, generator=seeded(4)) > 0.5
    assert distillation(student, top, mask=mask).item() == pytest.approx(each[mask].mean().item())
    assert (distillation(student, top, mask=mask, reduction="none")[~mask] == 0).all()
    nothing = distillation(student.requires_grad_(), top, mask=torch.zeros_like(mask))
    nothing.backward()
    assert nothing.item() == 0
    assert (student.grad == 0).all()


@pytest.mark.parametrize("kl", ["tail", "renorm"])
def test_half_precision_and_stored_integers(kl):
    teacher, student = torch.randn(2, 5, 300, generator=seeded(5)).bfloat16()
    top = top_logits(teacher)
    assert top.ids.shape == (5, 256)
    stored = TopLogits(top.ids.int(), top.log_probs, top.log_rest)
    loss = distillation(student.requires_grad_(), stored, kl=kl)
    loss.backward()
    assert loss.dtype == torch.float32
    assert student.grad.dtype == torch.bfloat16
    exact = distillation(student.double(), top_logits(teacher.double()), kl=kl)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-3)


def test_no_positions_cost_nothing():
    student = torch.zeros(0, 10, requires_grad=True)
    loss = distillation(student, top_logits(torch.zeros(0, 10), 3))
    loss.backward()
    assert loss.item() == 0


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: top_logits(TEACHER, 5), "vocabulary of 4, got 5"),
        (lambda: top_logits(TEACHER, 0), "got 0"),
        (lambda: top_logits(TEACHER, 2, chunk=0), "got 0"),
        (lambda: distillation(STUDENT, top_logits(TEACHER, 2), kl="reverse"), "'reverse'"),
        (lambda: distillation(STUDENT, top_logits(TEACHER, 2), reduction="max"), "'max'"),
        (lambda: distillation(STUDENT[None], top_logits(TEACHER, 2)), "(1,), the teacher () and the mask (1,)"),
        (
            lambda: distillation(STUDENT, top_logits(TEACHER, 2), mask=torch.ones(2, dtype=torch.bool)),
            "positions (), the teacher () and the mask (2,)",
        ),
    ],
)
def test_mistakes_name_the_numbers(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()

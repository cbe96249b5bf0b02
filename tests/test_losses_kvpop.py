"""KVpop's boundary loss against the definition, query by query."""

import math
import re
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.budget import Budget
from kvkeep.lifetimes import running_topk, static_priority
from kvkeep.training.losses import (
    boundary,
    boundary_pairs,
    keep_rate,
    kvpop,
)

BACKENDS = ("numba", "torch")
TOY = Budget(2, 2, 2)
NOTHING = {"margin": None, "balance": None}


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """Everything but the running top-k is the same on all devices, and that has one way for the CPU and one for all."""
    monkeypatch.setattr(kvpop, "running_topk", partial(running_topk, backend=request.param))
    return request.param


def toy(dtype=torch.float64):
    """kvpop 12.7: score and target; what the sinks and the last window have must not matter."""
    target = [7, 8, -3, -1, -2, -1.5, -2.5, -1.2, -3, -3]
    score = [5, 9, -1, -2, -1.5, -1, -3, -2, 0, 0]
    return torch.tensor([[score]], dtype=dtype), torch.tensor([[target]], dtype=dtype)


def toy_loss(boundary_at, **options):
    score, target = toy()
    return boundary(score, target, TOY, -0.25, 2, 0.5, boundary_at, **options).item()


def teacher_decision(priority, query, budget, start=0):
    """The definition: one row, one query -> (y, k-th best of E(q), k-th best of E(q) without the newcomer)."""
    new = query - budget.window

    def ranked(tokens):
        return sorted(tokens, key=lambda t: (priority[t], t), reverse=True)

    topk = ranked(range(start + budget.sinks, new + 1))[: budget.topk]
    return (1 if new in topk else -1), topk[-1], ranked(range(start + budget.sinks, new))[budget.topk - 1]


def brute_loss(score, target, budget, log_gamma, step, tau, incumbent, margin, balance, degenerate, padding):
    """The loss by loops, as the module's first lines tell it; `log_gamma` is a number."""
    student = static_priority(score, log_gamma, step, padding)
    teacher = static_priority(target, log_gamma, step, padding)
    total, count = 0.0, 0
    for head in range(score.shape[1]):
        pairs = []
        for row in range(score.shape[0]):
            pad = int(padding[row])
            for query in range(pad + budget.rest, score.shape[2]):
                y, kth, displaced = teacher_decision(teacher[row, head].tolist(), query, budget, pad)
                new, bnd = query - budget.window, displaced if incumbent else kth
                if new == bnd and degenerate == "drop":
                    continue
                gap = (student[row, head, new] - student[row, head, bnd]).item()
                delta = abs((teacher[row, head, new] - teacher[row, head, bnd]).item())
                weight = 1.0 if margin is None else 1 - math.exp(-delta / margin)
                pairs.append((y, weight * math.log1p(math.exp(-y * gap / tau))))
        rate = min(max(sum(y > 0 for y, _ in pairs) / max(len(pairs), 1), 1e-4), 1 - 1e-4)
        for y, loss in pairs:
            share = rate if y > 0 else 1 - rate
            total += loss * (1.0 if balance is None else min(max(0.5 / share, balance[0]), balance[1]))
        count += len(pairs)
    return total / max(count, 1)


@st.composite
def cases(draw):
    length = draw(st.integers(1, 40))
    budget = Budget(draw(st.integers(0, 4)), draw(st.integers(1, 8)), draw(st.integers(1, 12)))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 2)), length)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    levels = draw(st.integers(1, 8))
    target = torch.randint(levels, shape, generator=generator).double()
    score = torch.randint(levels, shape, generator=generator).double() / 2
    padding = torch.tensor([draw(st.integers(0, length)) for _ in range(shape[0])])
    return score, target, budget, padding


# --- the paper's numbers ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("boundary_at", "rivals"), [("kth", [4, 5, 5, 3]), ("incumbent", [2, 4, 5, 5])])
def test_kvpop_12_7_labels_and_rivals(boundary_at, rivals):
    pairs = boundary_pairs(toy()[1], TOY, -0.25, 2, boundary_at)
    assert pairs.t_new.tolist() == [[[4, 5, 6, 7]]]  # the first query is 6 = s + w + k
    assert pairs.t_bnd.tolist() == [[rivals]]
    assert pairs.y.tolist() == [[[1, 1, -1, 1]]]
    assert pairs.valid.all()


def test_kvpop_12_7_margins():
    margin = boundary_pairs(toy()[1], TOY, -0.25, 2, "incumbent").margin
    assert margin.flatten().tolist() == pytest.approx([1.25, 0.5, 0.75, 0.55])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("boundary_at", "options", "expected"),
    [
        ("kth", NOTHING, 0.43232662),
        ("kth", NOTHING | {"degenerate": "drop"}, 0.17150606),
        ("kth", {"margin": None, "balance": (0.5, 2.0)}, 0.29813455),
        ("kth", {"balance": (0.5, 2.0)}, 0.02138061),
        ("incumbent", NOTHING, 0.75462559),
        ("incumbent", NOTHING | {"degenerate": "drop"}, 0.75462559),
        ("incumbent", {"margin": None, "balance": (0.5, 2.0)}, 0.51300053),
        ("incumbent", {"balance": (0.5, 2.0)}, 0.26418888),
    ],
)
def test_kvpop_12_7_loss(boundary_at, options, expected):
    assert toy_loss(boundary_at, **options) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(
    ("boundary_at", "softplus"),
    [
        ("kth", [0.69314718, 0.69314718, 0.02975042, 0.31326169]),
        ("incumbent", [0.97407698, 0.31326169, 0.02975042, 1.70141328]),
    ],
)
def test_kvpop_12_7_loss_of_each_query(boundary_at, softplus):
    each = [toy_loss(boundary_at, queries=torch.tensor([query]), **NOTHING) for query in (6, 7, 8, 9)]
    assert each == pytest.approx(softplus, abs=1e-8)


def test_kvpop_12_7_keep_rate():
    pairs = boundary_pairs(toy()[1], TOY, -0.25, 2)
    assert keep_rate(pairs.y, pairs.valid).tolist() == [0.75]


def test_kvpop_12_12_a_token_compared_with_itself_has_exactly_zero_gradient():
    score, target = toy()
    log_gamma = torch.tensor([-0.25], dtype=torch.float64, requires_grad=True)
    loss = boundary(score.requires_grad_(), target, TOY, log_gamma, 2, queries=torch.tensor([6, 7]), **NOTHING)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert (score.grad == 0).all()
    assert (log_gamma.grad == 0).all()


@pytest.mark.parametrize("length", [1, 5, 6])
def test_kvpop_12_12_without_a_decision_the_loss_is_zero_and_backward_works(length):
    score, target = (column[..., :length] for column in toy())
    log_gamma = torch.tensor([-0.25], dtype=torch.float64, requires_grad=True)
    loss = boundary(score.requires_grad_(), target, TOY, log_gamma, 2)
    loss.backward()
    assert loss.item() == 0
    assert score.grad is None or (score.grad == 0).all()
    assert (log_gamma.grad == 0).all()


def test_kvpop_12_12_labels_carry_no_gradient_and_do_not_depend_on_who_learns():
    score, target = toy()
    frozen = boundary(score, target, TOY, torch.tensor([-0.25]).double(), 2)
    target.requires_grad_()
    log_gamma = torch.tensor([-0.25], dtype=torch.float64, requires_grad=True)
    learned = boundary(score.requires_grad_(), target, TOY, log_gamma, 2)
    learned.backward()
    assert learned.item() == frozen.item()
    assert target.grad is None
    assert score.grad.abs().sum() > 0


def test_kvpop_12_12_gradient_of_gamma_is_the_difference_of_ages_in_steps():
    score, target = toy()
    log_gamma = torch.tensor(-0.25, dtype=torch.float64, requires_grad=True)
    query, tau = torch.tensor([8]), 0.5  # y = -1, t_new 6, t_bnd 5
    loss = boundary(score, target, TOY, log_gamma, 2, tau, queries=query, **NOTHING)
    loss.backward()
    slope = (1 - math.exp(-loss.item())) / tau  # d softplus(x) / dx = 1 - exp(-softplus(x))
    assert log_gamma.grad.item() == pytest.approx(slope * -(6 // 2 - 5 // 2))


# --- the definition --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_pairs_of_a_long_row(backend):
    priority = torch.randn(2, 3, 400, generator=torch.Generator().manual_seed(1))
    budget = Budget(4, 16, 30)
    for boundary_at in ("kth", "incumbent"):
        pairs = boundary_pairs(priority, budget, 0.0, 1, boundary_at)
        for place, query in enumerate(range(50, 400)):
            y, kth, displaced = teacher_decision(priority[1, 2].tolist(), query, budget)
            assert pairs.t_new[1, 2, place] == query - 16
            assert pairs.y[1, 2, place] == y
            assert pairs.t_bnd[1, 2, place] == (kth if boundary_at == "kth" else displaced)


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases())
def test_pairs_equal_the_definition(case, backend):
    _, target, budget, padding = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvpop, "running_topk", partial(running_topk, backend=backend))
        kth, displaced = (
            boundary_pairs(target, budget, 0.0, 1, at, torch.arange(target.shape[-1]), padding=padding)
            for at in ("kth", "incumbent")
        )
    for row, head, query in kth.valid.logical_not().nonzero().tolist():
        assert query < padding[row] + budget.rest
        assert kth.margin[row, head, query] == 0
    for row, head, query in kth.valid.nonzero().tolist():
        expected = teacher_decision(target[row, head].tolist(), query, budget, int(padding[row]))
        at = (row, head, query)
        assert (kth.y[at], kth.t_bnd[at], displaced.t_bnd[at]) == expected
        assert displaced.y[at] == kth.y[at]
        assert kth.margin[at] == abs(target[row, head, query - budget.window] - target[row, head, expected[1]])


@settings(max_examples=50)
@given(
    case=cases(),
    incumbent=st.booleans(),
    margin=st.sampled_from([None, 0.7]),
    balance=st.sampled_from([None, (0.5, 4.0), (0.0, math.inf)]),
    degenerate=st.sampled_from(["keep", "drop"]),
    log_gamma=st.sampled_from([0.0, -0.5]),
)
def test_loss_equals_the_definition(case, incumbent, margin, balance, degenerate, log_gamma):
    score, target, budget, padding = case
    options = {"margin": margin, "balance": balance, "degenerate": degenerate, "padding": padding}
    expected = brute_loss(score, target, budget, log_gamma, 3, 0.8, incumbent, **options)
    loss = boundary(score, target, budget, log_gamma, 3, 0.8, "incumbent" if incumbent else "kth", **options)
    assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_infinite_targets_make_no_nan():
    target = torch.tensor([[[0.0, -math.inf, -math.inf, math.inf, math.inf, -math.inf, 1.0, 0.0]]])
    for boundary_at in ("kth", "incumbent"):
        pairs = boundary_pairs(target, Budget(0, 1, 2), 0.0, 1, boundary_at)
        assert not pairs.margin.isnan().any()
        for place, query in enumerate(range(3, 8)):
            expected = teacher_decision(target[0, 0].tolist(), query, Budget(0, 1, 2))
            assert (pairs.y[0, 0, place], pairs.t_bnd[0, 0, place]) == expected[:: 1 if boundary_at == "kth" else 2][:2]
        assert boundary(torch.zeros_like(target), target, Budget(0, 1, 2), 0.0, 1, boundary=boundary_at).isfinite()


@pytest.mark.parametrize("boundary_at", ["kth", "incumbent"])
@pytest.mark.parametrize("shape", [(), (2,), (2, 2)])
def test_gradients_agree_with_finite_differences(boundary_at, shape):
    generator = torch.Generator().manual_seed(2)
    score, target = torch.randn(2, 2, 2, 24, generator=generator, dtype=torch.float64)
    log_gamma = (-torch.rand(shape, generator=generator, dtype=torch.float64)).requires_grad_()

    def student_loss(score, log_gamma):
        """Labels fixed: a finite difference would move the teacher's gamma along."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kvpop, "boundary_pairs", lambda *_: pairs)
            return boundary(score, target, Budget(1, 3, 5), log_gamma, 4, 0.7, boundary_at)

    pairs = boundary_pairs(target, Budget(1, 3, 5), log_gamma.detach(), 4, boundary_at)
    assert torch.autograd.gradcheck(student_loss, (score.requires_grad_(), log_gamma))


def test_scores_of_the_last_window_are_never_read():
    """A scorer that waits for evidence has none to give there."""
    score, target = toy()
    expected = boundary(score, target, TOY, -0.25, 2)
    score[..., -2:] = math.nan
    loss = boundary(score.requires_grad_(), target, TOY, -0.25, 2)
    loss.backward()
    assert loss.item() == expected.item()
    assert score.grad.isfinite().all()


def test_half_precision_is_compared_in_float32():
    score, target = (column.bfloat16() for column in toy())
    loss = boundary(score.requires_grad_(), target, TOY, -0.25, 2, 0.5, **NOTHING)
    loss.backward()
    assert loss.dtype == torch.float32
    assert score.grad.dtype == torch.bfloat16


def test_a_padded_row_costs_what_it_costs_alone():
    generator = torch.Generator().manual_seed(3)
    score, target = torch.randn(2, 1, 2, 30, generator=generator, dtype=torch.float64)
    budget, options = Budget(2, 3, 6), {"log_gamma": -0.3, "step": 4, "boundary": "incumbent"}
    alone = boundary(score, target, budget, **options)
    padded = boundary(
        *(torch.nn.functional.pad(column, (7, 0)) for column in (score, target)),
        budget,
        **options,
        padding=torch.tensor([7]),
    )
    assert padded.item() == pytest.approx(alone.item(), rel=1e-12)


# --- weights and samples ---------------------------------------------------------------------------------------------


def test_balancing_without_bounds_gives_each_class_half_of_the_weight():
    """A constant score makes every softplus log 2, so the loss is log 2 times the mean weight, 1."""
    target = torch.randn(3, 2, 60, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    options = {"margin": None, "balance": (0.0, math.inf)}
    loss = boundary(torch.zeros_like(target), target, Budget(2, 4, 8), 0.0, 1, boundary="incumbent", **options)
    assert loss.item() == pytest.approx(math.log(2))


def test_a_given_rate_replaces_the_batchs_own():
    expected = (0.69314718 * 2 + 0.31326169) * (0.5 / 0.6) / 4 + 0.02975042 * (0.5 / 0.4) / 4
    loss = toy_loss("kth", margin=None, balance=(0.0, math.inf), rate=torch.tensor([0.6], dtype=torch.float64))
    assert loss == pytest.approx(expected, abs=1e-8)


def test_a_decay_without_bound_keeps_every_newcomer():
    """The collapse that `keep_rate` is there to show."""
    target = torch.randn(1, 4, 400, generator=torch.Generator().manual_seed(5))
    rates = []
    for log_gamma in (0.0, -0.1, -1.0, -10.0):
        pairs = boundary_pairs(target, Budget(4, 16, 30), log_gamma, 1)
        rates.append(keep_rate(pairs.y, pairs.valid).mean().item())
    assert rates == sorted(rates)
    assert rates[0] < 0.4
    assert rates[-1] == 1


def test_sampled_queries_are_seeded_distinct_and_valid():
    target = torch.randn(2, 2, 200, generator=torch.Generator().manual_seed(6))
    budget = Budget(2, 4, 10)

    def drawn(number, **options):
        generator = torch.Generator().manual_seed(7)
        return boundary_pairs(target, budget, 0.0, 1, queries=number, generator=generator, **options).t_new[0, 0] + 4

    queries = drawn(50)
    assert torch.equal(queries, drawn(50))
    assert len(queries.unique()) == 50
    assert 16 <= queries.min() <= queries.max() <= 199
    assert sorted(drawn(10**6).tolist()) == list(range(16, 200))
    assert drawn(10**6, min_future=30).max() == 170  # queries 170 to 199 are 30
    assert len(drawn(10**6, min_future=200)) == 0


def test_a_sample_of_all_queries_is_the_whole_loss():
    generator = torch.Generator().manual_seed(8)
    score, target = torch.randn(2, 2, 2, 60, generator=generator, dtype=torch.float64)
    whole = boundary(score, target, Budget(2, 4, 8), -0.1, 8)
    sampled = boundary(score, target, Budget(2, 4, 8), -0.1, 8, queries=46, generator=generator)
    assert sampled.item() == pytest.approx(whole.item(), rel=1e-12)


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"boundary": "first"}, "'first'"),
        ({"tau": 0.0}, "0.0"),
        ({"margin": -1.0}, "-1.0"),
        ({"balance": (4.0, 0.5)}, "(4.0, 0.5)"),
        ({"degenerate": "half"}, "'half'"),
        ({"queries": 0}, "got 0"),
        ({"queries": True}, "got True"),
        ({"queries": torch.tensor([10])}, "[0, 10)"),
        ({"queries": torch.tensor([-1])}, "[0, 10)"),
        ({"queries": torch.tensor([6.0])}, "integers"),
        ({"queries": torch.tensor([[6]])}, "one dimension"),
        ({"step": 0}, "got 0"),
        ({"log_gamma": torch.zeros(3)}, "got shape (3,)"),
        ({"budget": Budget(2, 2, 2, 1)}, "interval=1"),
        ({"score": torch.zeros(1, 1, 9)}, "(1, 1, 9) and (1, 1, 10)"),
        ({"score": torch.zeros(1, 1, 0), "target": torch.zeros(1, 1, 0)}, "at least one token"),
        ({"target": torch.full((1, 1, 10), math.nan)}, "10 priorities are NaN"),
    ],
)
def test_mistakes_of_boundary_name_the_numbers(options, message):
    score, target = toy()
    arguments = {"score": score, "target": target, "budget": TOY, "log_gamma": 0.0, "step": 2} | options
    with pytest.raises(ValueError, match=re.escape(message)):
        boundary(**arguments)

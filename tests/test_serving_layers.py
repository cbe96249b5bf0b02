"""Requests in an engine's blocks hold what the library holds, whatever their order, length, block and pieces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import all_policies
import kvkeep
from all_policies import ONLINE, label, make
from kvkeep import Budget, policies
from kvkeep.runtime.residency import NotFinite
from kvkeep.serving.rows import Rows, Schedule, held
from serving_layers import HEADS, SIZE, Request, make_layer, paged_attention

ENTRY = [case for case in ONLINE if not case[1].interval]


def step(layer, requests, schedule=None):
    """One token of every request through the layer and, apart, through the library; compares attention and holdings."""
    rows = Rows.of([one.block for one in requests], [one.seen for one in requests])
    if schedule is not None:
        rows.ahead = schedule.ahead(rows.blocks.tolist(), rows.seen)
    pieces = [one.piece(1) for one in requests]
    query, keys, values = (torch.cat([piece[i][:, :, 0] for piece in pieces]) for i in range(3))
    output = layer.step(rows, query, keys, values)
    for row, request in enumerate(requests):
        expected = request.follow(1)[0, :, 0]
        got = paged_attention(layer, request)[0] if output is None else output[row]
        compare(layer, request, got, expected)


def prefill(layer, request, count, schedule=None):
    if schedule is not None:
        schedule.begin(request.block)
    output = layer.prefill(request.block, request.seen, *request.piece(count))
    compare(layer, request, output[0], request.follow(count)[0])


def compare(layer, request, got, expected):
    assert torch.equal(layer.held_tokens(request.block, request.seen), request.residency_holds())
    assert (got - expected).abs().max() <= 1e-9


@given(
    case=st.sampled_from(ONLINE),
    work=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 23)), min_size=1, max_size=5),
    backend=st.sampled_from(["numba", "torch"]),
    plain=st.booleans(),
    ahead=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_blocks_hold_what_the_residency_holds(case, work, backend, plain, ahead, seed):
    """Three requests take in pieces of prompt in turn, then tokens together; then one block is given to another."""
    policy = make(case)
    layer = make_layer(policy, backend=backend, seed=seed, plain=plain)
    schedule = Schedule(policy.budget) if getattr(policy, "judges_alone", False) and ahead else None
    requests = [Request(policy, 140, seed + i) for i in range(4)]
    for block, request in zip((3, 0, 2), requests[:3], strict=True):
        request.block = block
    for which, count in work:
        prefill(layer, requests[which], count, schedule)
    for _ in range(5):
        step(layer, requests[:3], schedule)
    requests[3].block = requests[1].block
    step(layer, [requests[2], requests[3]], schedule)  # begins with a single token in a used block
    prefill(layer, requests[3], 1 + seed % 19, schedule)
    for _ in range(3):
        step(layer, [requests[3], requests[0]], schedule)


@pytest.mark.parametrize("case", [case for case in ENTRY if kvkeep.policies.describe(case[0]).judges_alone], ids=label)
def test_scoring_ahead_is_rare_and_changes_nothing(case):
    """Requests that come to the batch bring one round of scoring; then there is one every window of steps."""
    policy = make(case)
    layer, schedule = make_layer(policy), Schedule(policy.budget)
    requests = [Request(policy, 120, seed) for seed in range(3)]
    for block, request in enumerate(requests):
        request.block = block
    prefill(layer, requests[0], 30, schedule)
    prefill(layer, requests[1], 3, schedule)
    rounds = []
    for turn in range(50):
        here = requests if turn > 10 else requests[:2]
        rows = Rows.of([one.block for one in here], [one.seen for one in here])
        rows.ahead = schedule.ahead(rows.blocks.tolist(), rows.seen)
        rounds.append(rows.ahead > 0)
        pieces = [one.piece(1) for one in here]
        layer.step(rows, None, *(torch.cat([piece[i][:, :, 0] for piece in pieces]) for i in (1, 2)))
        for request in here:
            request.follow(1)
            assert torch.equal(layer.held_tokens(request.block, request.seen), request.residency_holds())
    assert sum(rounds) <= 3 + 50 / policy.budget.window


@pytest.mark.parametrize("case", ONLINE, ids=label)
def test_token_by_token_over_many_evictions(case):
    policy = make(case)
    layer = make_layer(policy, blocks=2)
    requests = [Request(policy, 90, 1), Request(policy, 90, 2)]
    requests[0].block, requests[1].block = 1, 0
    prefill(layer, requests[1], 7)
    for _ in range(60):
        step(layer, requests)
    assert layer.held_tokens(1, 60).shape[-1] == int(held(policy.budget, torch.tensor(60)))


@pytest.mark.parametrize("case", ONLINE, ids=label)
def test_the_surplus_of_a_block_is_never_written(case):
    """A block rounded up to what an engine needs holds no more than the budget."""
    policy = make(case)
    layer = make_layer(policy, blocks=2)
    extra = layer.pages.index(torch.tensor([1]), layer.pages.every(policy.budget.slots, 3, 1))
    before = layer.pages.flat[extra].clone()
    request = Request(policy, 80, 5)
    request.block = 1
    prefill(layer, request, 50)
    for _ in range(20):
        step(layer, [request])
    assert torch.equal(layer.pages.flat[extra], before)


@given(case=st.sampled_from(ENTRY), rows=st.integers(1, 4), seed=st.integers(0, 10**6), ties=st.booleans())
def test_compiled_and_tensor_steps_choose_the_same_slots(case, rows, seed, ties):
    """Also among equal priorities, of which the newest stays."""
    policy = make(case)
    budget = policy.budget
    layers = [make_layer(policy, seed=seed, backend=backend) for backend in ("numba", "torch")]
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(4, generator=generator)[:rows].tolist()
    for layer in layers:
        layer.pages.state["positions"].copy_(torch.arange(budget.rest).expand(4, HEADS, -1))
        layer.pages.state["priority"].fill_(torch.inf)
    start = [budget.rest + int(torch.randint(0, 9, (1,), generator=generator)) for _ in blocks]
    for layer in layers:
        recent = torch.arange(budget.rest - budget.window, budget.rest)
        for block, seen in zip(blocks, start, strict=True):
            column = (torch.arange(budget.window) + seen) % budget.window
            layer.pages.state["recent"][block, :, column] = recent.int().expand(HEADS, -1)
            layer.pages.state["priority"][block, :, budget.sinks : budget.rest - budget.window] = 0.5
    for turn in range(12):
        given_rows = Rows.of(blocks, [seen + turn for seen in start])
        keys, values = torch.randn(2, rows, HEADS, SIZE, dtype=torch.float64, generator=generator)
        given_rows.ahead = 1 + turn % budget.window
        priority = torch.randn(rows, HEADS, given_rows.ahead, dtype=torch.float64, generator=generator)
        priority = priority.round() if ties else priority
        fetched = [layer.chooser.fetch(given_rows) for layer in layers]
        for one, other in zip(*fetched, strict=True):
            assert torch.equal(one, other)
        for layer in layers:
            layer.chooser.note(given_rows, priority)
        assert all(layer.chooser.settle(given_rows, keys, values) for layer in layers)
        for name, tensor in layers[0].pages.state.items():
            if not name.startswith("memory."):
                assert torch.equal(tensor[blocks], layers[1].pages.state[name][blocks]), name


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_priority_that_is_not_finite_is_refused_before_anything_is_written(backend, bad):
    policy = policies.create("streaming", Budget(sinks=1, window=2, topk=3))
    layer = make_layer(policy, backend=backend)
    rows = Rows.of([0, 2], [9, 2])
    layer.chooser.note(rows, torch.tensor([[[0.0], [bad]], [[bad], [bad]]]))  # nothing has left request 2's window yet
    before = layer.pages.flat.view(torch.int64).clone()
    pairs = torch.zeros(2, HEADS, SIZE, dtype=torch.float64)
    assert not layer.chooser.settle(rows, pairs, pairs)
    assert torch.equal(layer.pages.flat.view(torch.int64), before)
    assert layer.chooser.settle(rows.subset([1]), pairs[1:], pairs[1:])


class Broken(type(policies.create("streaming", 40))):
    """A scorer gone wrong."""

    def priority(self, step):
        return super().priority(step) * torch.nan


def test_a_nan_names_layer_and_position():
    policy = policies.create("streaming", Budget(sinks=1, window=2, topk=3))
    layer = make_layer(policy)
    layer.policy = Broken(policy.budget)
    pairs = torch.zeros(1, HEADS, SIZE, dtype=torch.float64)
    with pytest.raises(NotFinite, match="layer 1: priorities not finite at position 9"):
        layer.step(Rows.of([0], [9]), None, pairs, pairs)


@pytest.mark.parametrize("options", [{}, {"normaliser": "xlstm"}, {"hidden": 5}], ids=str)
@pytest.mark.parametrize("features", [1, 2, 8])
def test_the_compiled_memory_scores_as_the_scorer_does(options, features):
    """To the last bits but a few, also in a block that another request has used."""
    case = ("kvpop", all_policies.ENTRY, {"features": features, "log_gamma": -0.2, "decay_step": 8, **options})
    layers = [make_layer(make(case), backend=backend) for backend in ("numba", "torch")]
    assert [layer.recurrence is not None for layer in layers] == [True, False]
    generator = torch.Generator().manual_seed(features)
    for turn in range(40):
        rows = Rows.of([1, 3], [turn, turn % 20])  # the second block is given to another request
        keys, values = torch.randn(2, 2, HEADS, SIZE, dtype=torch.float64, generator=generator)
        for layer in layers:
            layer.step(rows, None, keys, values)
        for name in ("memory.memory", "memory.stabiliser", "coming", "priority"):
            one, other = (layer.pages.state[name][[1, 3]] for layer in layers)
            left = turn >= all_policies.ENTRY.window or name.startswith("memory")
            assert not left or torch.allclose(one, other, rtol=1e-9, atol=1e-12), (turn, name)


@pytest.mark.parametrize("budget", [Budget(2, 3, 4), Budget(0, 2, 3, 1), Budget(1, 2, 4, 3)], ids=str)
def test_tokens_held_follow_from_how_many_came(budget):
    name = "h2o" if budget.interval else "streaming"
    policy = policies.create(name, budget)
    request = Request(policy, 40, 0)
    for seen in range(1, 40):
        request.follow(1)
        assert int(held(budget, torch.tensor(seen))) == request.residency.slots.held[0]

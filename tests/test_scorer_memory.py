"""The memory of the stateful scorer against its definition, and what it costs: items 9 and 15 of section 12."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from kvkeep import Budget, policies, scorers
from kvkeep.scorers.mlstm import features_for, initial_memory, mlstm, state_entries
from test_scorers import SMOL, SPEC
from tiny import make_cache, random_ids, tiny_model

# --- Section 12, item 9: the memory ----------------------------------------------------------------------------------


def spec_memory():
    query = torch.tensor([(0.5, 0.5), (0.9, 0.1), (0.2, 0.8), (0.5, 0.5)], dtype=torch.float64)[None, None]
    key = torch.tensor([(0.7, 0.3), (0.4, 0.6), (0.1, 0.9), (0.5, 0.5)], dtype=torch.float64)[None, None]
    value = torch.tensor([1.0, 2.0, -1.0, 4.0], dtype=torch.float64)[None, None, :, None]
    forget = logsigmoid(torch.full((1, 1, 4), math.log(3), dtype=torch.float64))
    return query, key, value, torch.zeros(1, 1, 4, dtype=torch.float64), forget


@pytest.mark.parametrize("chunk", [1, 2, 3, 64])
def test_item_9_numbers(chunk):
    query, *written = spec_memory()

    def read(query):
        return mlstm(query, *written, initial_memory(1, 1, 2, 1, dtype=torch.float64), chunk=chunk).flatten()

    immediate = torch.tensor([1, 1.4590163934, 0.2283894449, 1.7542857143], dtype=torch.float64)
    assert (read(query) - immediate).abs().max() <= 1e-10
    delayed = read(torch.cat([query[:, :, :2], query[:, :, :2]], 2))[2:]
    assert (delayed - torch.tensor([0.4594594595, 2.2753465616], dtype=torch.float64)).abs().max() <= 1e-10


def random_memory(length, dtype=torch.float64, gates=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(2, 3, length, *shape, generator=generator, dtype=torch.float64).to(dtype)

    inputs, forget = draw() * gates, logsigmoid(draw() * gates + 3)
    return draw(4).softmax(-1), draw(4).softmax(-1), draw(5), inputs, forget


def naive(query, key, value, inputs, forget, normaliser):
    """Unstabilised, one token at a time: the definition."""
    memory = query.new_zeros(2, 3, 4, 5)
    total = query.new_zeros(2, 3, 4)
    out = []
    for t in range(query.shape[2]):
        i, f = inputs[:, :, t].exp()[..., None], forget[:, :, t].exp()[..., None]
        memory = f[..., None] * memory + (i * key[:, :, t])[..., None] * value[:, :, t, None]
        total = f * total + i * key[:, :, t]
        seen = (query[:, :, t] * total).sum(-1, keepdim=True)
        read = (query[:, :, t, :, None] * memory).sum(-2)
        out.append(read / (seen if normaliser == "ratio" else seen.abs().clamp(min=1)))
    return torch.stack(out, 2)


def step_by_step(tensors, state, normaliser="ratio"):
    length = tensors[0].shape[2]
    return torch.cat([mlstm(*(x[:, :, t : t + 1] for x in tensors), state, normaliser) for t in range(length)], 2)


@pytest.mark.parametrize("normaliser", ["ratio", "xlstm"])
@pytest.mark.parametrize(("length", "chunk"), [(2, 64), (37, 8), (64, 64), (65, 64), (50, 7)])
def test_item_9_recurrent_is_chunkwise_is_the_definition(length, chunk, normaliser):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        tensors = random_memory(length, dtype)
        whole = initial_memory(2, 3, 4, 5, dtype=dtype)
        chunkwise = mlstm(*tensors, whole, normaliser, chunk)
        steps = initial_memory(2, 3, 4, 5, dtype=dtype)
        assert (step_by_step(tensors, steps, normaliser) - chunkwise).abs().max() <= tolerance
        for name in whole:
            assert whole[name].dtype == dtype
            assert (whole[name] - steps[name]).abs().max() <= 10 * tolerance
        if dtype == torch.float64:
            assert (naive(*tensors, normaliser) - chunkwise).abs().max() <= tolerance


@pytest.mark.parametrize("normaliser", ["ratio", "xlstm"])
def test_item_9_gradients_are_those_of_the_definition(normaliser):
    weight = torch.randn(2, 3, 29, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = []
    for run in (
        lambda *tensors: naive(*tensors, normaliser),
        lambda *tensors: mlstm(*tensors, initial_memory(2, 3, 4, 5, dtype=torch.float64), normaliser, 8),
        lambda *tensors: step_by_step(tensors, initial_memory(2, 3, 4, 5, dtype=torch.float64), normaliser),
    ):
        tensors = [tensor.requires_grad_() for tensor in random_memory(29)]
        (run(*tensors) * weight).sum().backward()
        gradients.append([tensor.grad for tensor in tensors])
    for exact, chunkwise, steps in zip(*gradients, strict=True):
        assert exact.abs().max() > 1e-3
        assert (chunkwise - exact).abs().max() <= 1e-10
        assert (steps - exact).abs().max() <= 1e-10


@pytest.mark.parametrize("normaliser", ["ratio", "xlstm"])
@pytest.mark.parametrize("length", [1, 100])
def test_item_9_finite_with_gates_times_100(length, normaliser):
    tensors = [tensor.requires_grad_() for tensor in random_memory(length, torch.float32, gates=100.0)]
    read = mlstm(*tensors, initial_memory(2, 3, 4, 5), normaliser, 16)
    read.square().sum().backward()
    assert torch.isfinite(read).all()
    for tensor in tensors:
        assert torch.isfinite(tensor.grad).all()


def test_item_9_a_constant_on_all_input_gates_changes_nothing():
    query, key, value, inputs, forget = random_memory(70)
    for constant in (-40.0, 300.0):
        read, moved = (
            mlstm(query, key, value, shifted, forget, initial_memory(2, 3, 4, 5, dtype=torch.float64))
            for shifted in (inputs, inputs + constant)
        )
        assert (read - moved).abs().max() <= 1e-11


def test_inactive_steps_leave_the_memory_alone():
    tensors = list(random_memory(9))
    state = initial_memory(2, 3, 4, 5, dtype=torch.float64)
    mlstm(*tensors, state)
    before = dict(state)
    tensors[3], tensors[4] = torch.full_like(tensors[3], -torch.inf), torch.zeros_like(tensors[4])
    mlstm(*tensors, state, chunk=4)
    for name, tensor in before.items():
        assert torch.equal(state[name], tensor)


# --- Section 12, item 15: what a memory costs ------------------------------------------------------------------------


def test_item_15_budget_arithmetic():
    assert policies.budget("kvpop_mlp", 4096) == Budget(4, 256, 3836)
    assert policies.budget("kvpop_mlp", 2048) == Budget(4, 256, 1788)
    assert policies.budget("kvpop", 4096, state_entries=64) == Budget(4, 256, 3772)
    assert policies.budget("kvpop", 2048, state_entries=64) == Budget(4, 256, 1724)
    assert state_entries(64, 128) == 65  # 64 x 128 float32 and its normaliser
    assert [features_for(slots) for slots in (16, 38, 128, 256, 512, 1024)] == [1, 2, 8, 16, 32, 64]
    assert policies.budget("kvpop", 128) == Budget(4, 32, 83)
    assert policies.budget("kvpop", 256) == Budget(4, 32, 203)
    with pytest.raises(ValueError, match="costs 90 tokens leaves nothing of the 88 top-k places"):
        policies.budget("kvpop", 128, window=36, state_entries=90)


@pytest.mark.parametrize("slots", [128, 256, 1024])
def test_item_15_a_scorer_costs_what_the_default_says(slots):
    scorer = scorers.new("kvpop", SMOL, slots)
    policy = policies.create("kvpop", slots, scorer=scorer)
    assert policy.budget == scorer.budgets[0]
    assert policy.budget.slots + scorer.state_entries == slots
    assert scorer.state_entries <= 0.08 * slots
    numbers = sum(tensor.numel() for tensor in scorer.initial_state(0, 1, "cpu").values()) / 3
    features = scorer.options["features"]
    assert numbers == features * 64 + features + 1
    assert scorer.state_entries == math.ceil(numbers * 4 / (2 * 64 * 2))
    assert 1 <= scorer.state_entries - features <= 2
    given = scorers.new("kvpop", SMOL, policy.budget)
    assert given.options == scorer.options
    assert given.budgets == (policy.budget,)


@pytest.mark.parametrize("name", ["kvpop_mlp", "kvpop"])
def test_item_15_resident_bytes_are_constant(name):
    model = tiny_model()
    scorer = scorers.new(name, model.config, SPEC, **({"features": 4} if name == "kvpop" else {}))
    cache = make_cache(model, policies.create(name, SPEC, scorer=scorer))
    ids, sizes = random_ids(40), []
    with torch.no_grad():
        for t in range(40):
            model(ids[:, t : t + 1], past_key_values=cache)
            sizes.append(cache.nbytes)
    assert len(set(sizes)) == 1
    state = sum(tensor.nbytes for layer in cache.evicting_layers for tensor in layer.residency.memory.values())
    assert state == (2 * 2 * 8 * (4 * 8 + 4 + 1) if name == "kvpop" else 0)


def test_several_budgets_share_one_memory():
    scorer = scorers.new("kvpop", SMOL, [256, 128])
    assert (scorer.options["features"], scorer.state_entries) == (8, 9)
    assert scorer.budgets == (Budget(4, 32, 211), Budget(4, 32, 83))
    overridden = scorers.new("kvpop", SMOL, 128, state_entries=8)
    assert overridden.budgets == (Budget(4, 32, 84),)

"""The loops of a decode step on the CPU against the tensors that they stand for, over random shapes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvkeep
from all_policies import random_scorer
from kvkeep.kernels.loops.places import move, pair_holes
from kvkeep.kernels.place import compiled, raw
from kvkeep.policies.base import Geometry, Observation
from kvkeep.runtime.entry import EntryResidency
from kvkeep.scorers.features import FeatureSpec
from tiny import tiny_model

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

# --- What scores and replaces ----------------------------------------------------------------------------------------


@st.composite
def memories(draw):
    """Options of a scorer of `kvpop` that a loop takes."""
    return {
        "features": draw(st.integers(1, 5)),
        "value_dim": draw(st.sampled_from([None, 1, 3])),
        "normaliser": draw(st.sampled_from(["ratio", "xlstm"])),
        "hidden": draw(st.integers(1, 6)),
    }


@st.composite
def decoders(draw, name):
    """A policy whose steps are a loop, and a copy of it whose steps are not."""
    sizes = {"sinks": draw(st.integers(0, 2)), "window": draw(st.integers(1, 5)), "topk": draw(st.integers(1, 6))}
    budget = kvkeep.Budget(**sizes)
    model = tiny_model(kv_heads=draw(st.sampled_from([1, 2])), group=draw(st.integers(1, 3)))
    config, options = model.config, {}
    if name == "random":
        options = {"seed": draw(st.integers(0, 2**63 - 1))}
    elif name != "streaming":
        decay = {"log_gamma": draw(st.sampled_from([0.0, -0.3])), "decay_step": draw(st.integers(1, 9))}
        shape = draw(memories()) if name == "kvpop" else {"hidden": draw(st.integers(1, 6))}
        options = {"scorer": random_scorer(name, config, budget, seed=draw(st.integers(0, 99)), **decay, **shape)}
    policy = kvkeep.policies.create(name, budget, **options)
    heads, group = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    geometry = Geometry(1, heads, group, config.head_dim, config.head_dim**-0.5)
    shape = draw(st.integers(1, 3)), heads, group, config.head_dim
    return policy, geometry, shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 20)), draw(st.integers(0, 2**31))


def in_tensors(residency):
    """A copy that has no loop."""
    other = copy.deepcopy({key: value for key, value in vars(residency).items() if key not in ("policy", "bound")})
    twin = object.__new__(EntryResidency)
    vars(twin).update(other, policy=residency.policy, bound=None)
    return twin


@pytest.mark.parametrize("name", ["streaming", "random", "kvpop_mlp", "kvpop"])
@settings(max_examples=25)
@given(data=st.data())
def test_a_step_in_a_loop_is_the_step_in_tensors(name, data):
    policy, geometry, (batch, heads, group, size), dtype, prompt, seed = data.draw(decoders(name))
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, size, generator=generator, dtype=torch.float64).to(dtype)

    residency = EntryResidency(policy, geometry, drawn(batch, heads, 0), drawn(batch, heads, 0))
    if prompt:  # of rows padded to different lengths
        pads = torch.randint(0, prompt, (batch,), generator=generator).tolist()
        residency.advance(*(drawn(batch, count, prompt) for count in (heads * group, heads, heads)), pads)
    assert residency.bound is not None
    for _ in range(12):
        twin = in_tensors(residency)
        new = [drawn(batch, count, 1) for count in (heads * group, heads, heads)]
        found, wanted = residency.step(*new), twin.step(*new)
        close = {"atol": 1e-9, "rtol": 1e-9} if dtype == torch.float64 else {"atol": 2e-4, "rtol": 2e-4}
        assert torch.equal(residency.slots.positions, twin.slots.positions)
        assert torch.equal(residency.slots.keys, twin.slots.keys)
        assert torch.equal(residency.slots.values, twin.slots.values)
        assert torch.equal(residency.recent, twin.recent)
        assert residency.clock.tolist() == twin.clock.tolist()
        rivals = (twin.slots.positions >= 0) & (twin.slots.positions < twin.clock[:, None, None] - policy.budget.window)
        mine, its = (one.slots.extras["priority"][rivals] for one in (residency, twin))
        torch.testing.assert_close(mine, its, **close)
        for state in twin.memory:
            torch.testing.assert_close(residency.memory[state], twin.memory[state], **close)
        loose = {"atol": 2e-2, "rtol": 2e-2} if dtype in (torch.bfloat16, torch.float16) else close
        torch.testing.assert_close(found, wanted, **loose)


# --- What counts -----------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(data=st.data())
def test_counting_in_a_loop_is_observing(data):
    """Many queries of one interval, in a loop each, against all of them at once."""
    windows = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 8, "L"]), min_size=1, max_size=4)))
    spec = FeatureSpec(
        windows=windows,
        cumulative=data.draw(st.booleans()),
        decay=data.draw(st.sampled_from([None, 0.9])),
    )
    batch, heads, group, slots, interval = (data.draw(st.integers(1, most)) for most in (2, 3, 4, 12, 6))
    held, first = data.draw(st.integers(1, slots)), data.draw(st.integers(1, interval))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    kept = {
        name: torch.rand(batch, heads, slots, *shape, generator=generator)
        for name, (shape, _) in spec.accumulators(group).items()
    }
    twin = {name: tensor.clone() for name, tensor in kept.items()}
    budget = kvkeep.Budget(sinks=0, window=0, topk=slots, interval=interval)
    policy = kvkeep.policies.create("foresightkv", budget, scorer=_with_features(spec, budget))
    loop = policy.counting({name: raw(tensor) for name, tensor in kept.items()})
    seen, probabilities = slots - held, []
    for until in range(first, 0, -1):
        one = torch.rand(batch * heads, group, held, generator=generator).softmax(-1)
        compiled(loop.name)(*loop.arguments, raw(one), until)
        probabilities.append(one.view(batch, heads, group, 1, held))
    positions = torch.arange(held).expand(batch, heads, -1)
    queries = (held + torch.arange(first)).expand(batch, -1)
    until = torch.arange(first, 0, -1).expand(batch, -1)
    views = {name: tensor[:, :, seen:] for name, tensor in twin.items()}
    spec.observe(views, torch.cat(probabilities, 3), queries, positions, until, interval)
    for name, tensor in twin.items():
        torch.testing.assert_close(kept[name], tensor, atol=1e-5, rtol=1e-5)


def _with_features(spec, budget):
    return random_scorer("foresightkv", tiny_model().config, budget, features=spec)


@given(data=st.data())
def test_the_mean_of_a_group_in_a_loop_is_observing(data):
    batch, heads, group, slots = (data.draw(st.integers(1, most)) for most in (2, 3, 4, 9))
    held = data.draw(st.integers(1, slots))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    received = torch.rand(batch, heads, slots, generator=generator)
    twin = received.clone()
    probabilities = torch.rand(batch, heads, group, 1, held, generator=generator)
    policy = kvkeep.policies.create("h2o", kvkeep.Budget(sinks=0, window=0, topk=slots, interval=1))
    loop = policy.counting({"received": raw(received)})
    compiled(loop.name)(*loop.arguments, raw(probabilities.view(batch * heads, group, held)), 1)
    statistics = {"received": twin[:, :, slots - held :]}
    fields = dict.fromkeys(Observation.__dataclass_fields__) | {"probabilities": probabilities}
    policy.observe(Observation(**fields | {"statistics": statistics}))
    torch.testing.assert_close(received, twin)


# --- Holes -----------------------------------------------------------------------------------------------------------


@given(
    data=st.data(),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 12), st.integers(0, 3)),
)
def test_holes_are_filled_from_the_front_and_nothing_else_moves(data, sizes):
    batch, heads, width, free = sizes
    count = data.draw(st.integers(1, width))
    order = st.permutations(range(width))
    victims = np.array([[data.draw(order)[:count] for _ in range(heads)] for _ in range(batch)], dtype=np.int64)
    tokens = np.arange(batch * heads * (free + width) * 2, dtype=np.float32).reshape(batch, heads, free + width, 2)
    moved = tokens.copy()
    sources, targets = pair_holes(victims, width)
    move(moved, sources, targets, free)
    for row in range(batch):
        for head in range(heads):
            gone = set(victims[row, head].tolist())
            stay = [slot for slot in range(width) if slot not in gone]
            before, after = tokens[row, head, free:], moved[row, head, free:]
            assert sorted(after[count:, 0].tolist()) == [before[slot, 0] for slot in stay]
            assert all(after[slot, 0] == before[slot, 0] for slot in stay if slot >= count)  # already behind the front
            assert (after[:, 1] == after[:, 0] + 1).all()  # whole vectors
            moves = int((sources[row, head] >= 0).sum())
            assert moves == sum(slot < count for slot in stay) <= count
            assert (moved[row, head, :free] == tokens[row, head, :free]).all()

"""Slots against a dict of positions, and the attention over them against dense float64 softmax."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import sparse_attention
from kvkeep.slots import EMPTY, Slots, lowest, lowest_reference
from kvkeep.sparse_attention import causal_attention, live_attention, masked_attention, masked_output

# --- Slots -----------------------------------------------------------------------------------------------------------


FILL = 2.0  # what the extras of a new token start from


class World:
    """Slots beside what they should hold: per row and head, position -> (number, score) of a token.

    A token's number is in its key, its value and its vector extra, so that anything left behind shows.
    """

    def __init__(self, batch, heads, capacity):
        empty = torch.zeros(batch, heads, 0, 2)
        self.slots = Slots.empty(empty, empty[..., :1], capacity)
        self.slots.add_extra("score", (), torch.float64, FILL)
        self.slots.add_extra("vector", (3,), torch.float32, FILL)
        self.rows = [[{} for _ in range(heads)] for _ in range(batch)]
        self.seen = [0] * batch
        self.number = 0

    def new_tokens(self, count):
        """Keys, values and positions of ``count`` new tokens a row; remembers nothing yet."""
        heads = self.slots.keys.shape[1]
        numbers = self.number + 1.0 + torch.arange(len(self.rows) * heads * count).view(-1, heads, count)
        self.number += numbers.numel()
        positions = torch.tensor(self.seen)[:, None] + torch.arange(count)
        self.seen = [seen + count for seen in self.seen]
        return numbers, positions

    def append(self, count):
        numbers, positions = self.new_tokens(count)
        pair = numbers[..., None].expand(-1, -1, -1, 2), -numbers[..., None]
        self.slots.append(*pair, positions)
        self.remember(numbers, positions)

    def write(self, at):
        """Put one new token per head where another one was, by absolute slot ``[B, H, 1]``."""
        gone = self.slots.positions.gather(2, at)
        numbers, positions = self.new_tokens(1)
        pair = numbers[..., None].expand(-1, -1, -1, 2), -numbers[..., None]
        self.slots.write(at, *pair, positions)
        self.forget(gone)
        self.remember(numbers, positions)

    def remember(self, numbers, positions):
        for row, heads in enumerate(self.rows):
            for head, held in enumerate(heads):
                for number, position in zip(numbers[row, head].tolist(), positions[row].tolist(), strict=True):
                    held[position] = [number, FILL, [FILL] * 3]

    def forget(self, positions):
        for row, heads in enumerate(self.rows):
            for head, held in enumerate(heads):
                for position in positions[row, head].tolist():
                    del held[position]

    def touch(self):
        """What a policy does to its statistics: arithmetic in place on the views, free slots included."""
        slots = self.slots
        slots.view(slots.extras["score"]).mul_(2).add_(slots.view(slots.keys)[..., 0])
        slots.view(slots.extras["vector"])[..., 1].copy_(slots.view(slots.values)[..., 0])
        for held in (held for heads in self.rows for held in heads):
            for token in held.values():
                token[1], token[2][1] = 2 * token[1] + token[0], -token[0]

    def drop(self, victims):
        slots = self.slots
        before, at = slots.keys.clone(), self.where()
        gone = slots.view(slots.positions).gather(2, victims)
        slots.drop(victims)
        self.forget(gone)
        changed = (slots.keys != before).any(-1).sum(-1)
        assert int(changed.max()) <= victims.shape[-1], "more slots were written than tokens dropped"
        moved = Counter(token[:2] for token, slot in self.where().items() if slot != at[token])
        assert max(moved.values(), default=0) <= victims.shape[-1], "more tokens were moved than dropped"

    def select(self, rows):
        part = copy.copy(self)
        part.slots = self.slots.select(torch.tensor(rows))
        part.rows = [copy.deepcopy(self.rows[row]) for row in rows]
        part.seen = [self.seen[row] for row in rows]
        return part

    def where(self):
        """(row, head, position) -> slot."""
        live = (self.slots.positions != EMPTY).nonzero().tolist()
        return {(row, head, int(self.slots.positions[row, head, slot])): slot for row, head, slot in live}

    def check(self):
        slots, capacity = self.slots, self.slots.capacity
        assert slots.held == [len(heads[0]) for heads in self.rows]
        assert slots.width == max(slots.held)
        assert slots.uniform == (len(set(slots.held)) == 1)
        assert slots.view(slots.keys).shape[2] == slots.width
        assert slots.view(slots.keys).untyped_storage().data_ptr() == slots.keys.untyped_storage().data_ptr()
        live = (slots.view(slots.positions) != EMPTY)[:, :1]
        assert slots.uniform if slots.live() is None else torch.equal(slots.live(), live)
        for row, heads in enumerate(self.rows):
            for head, held in enumerate(heads):
                positions = slots.positions[row, head]
                assert bool((positions[: capacity - len(held)] == EMPTY).all()), "rows are right-aligned"
                here = slice(capacity - len(held), capacity)
                numbers = slots.keys[row, head, here, 0].tolist()
                assert slots.keys[row, head, here, 1].tolist() == numbers
                assert slots.values[row, head, here, 0].tolist() == [-number for number in numbers]
                scores = slots.extras["score"][row, head, here].tolist()
                vectors = slots.extras["vector"][row, head, here].tolist()
                tokens = [list(token) for token in zip(numbers, scores, vectors, strict=True)]
                assert dict(zip(positions[here].tolist(), tokens, strict=True)) == held


def distinct(data, batch, heads, below, count):
    """int64 ``[batch, heads, count]`` of distinct numbers."""
    shuffle = st.permutations(range(below)).map(lambda order: order[:count])
    return torch.tensor([[data.draw(shuffle) for _ in range(heads)] for _ in range(batch)]).view(batch, heads, count)


TOKENS = ["append", "append", "drop", "drop", "write", "touch"]


def one_step(data, world, actions):
    slots = world.slots
    batch, heads = slots.positions.shape[:2]
    action = data.draw(st.sampled_from(actions))
    if action == "append":
        count = data.draw(st.integers(1, 4))
        if slots.width + count <= slots.capacity:
            world.append(count)
        else:
            pair = torch.zeros(batch, heads, count, 2), torch.zeros(batch, heads, count, 1)
            with pytest.raises(ValueError, match=f"{count} new tokens do not fit: {slots.width} of {slots.capacity}"):
                slots.append(*pair, torch.zeros(batch, count))
    elif action == "drop" and not slots.uniform:
        with pytest.raises(ValueError, match="drop needs rows that hold the same number"):
            slots.drop(torch.zeros(batch, heads, 1, dtype=torch.long))
    elif action == "drop" and slots.width:
        world.drop(distinct(data, batch, heads, slots.width, data.draw(st.integers(1, slots.width))))
    elif action == "write" and min(slots.held):
        at = [[[slots.capacity - 1 - data.draw(st.integers(0, n - 1))] for _ in range(heads)] for n in slots.held]
        world.write(torch.tensor(at))
    elif action == "touch" and slots.width:
        world.touch()
    elif action == "some rows":
        rows = data.draw(st.permutations(range(batch)))[: data.draw(st.integers(1, batch))]
        part = world.select(rows)
        for _ in range(data.draw(st.integers(1, 3))):
            one_step(data, part, TOKENS)
            part.check()
        world.check()  # a part is a copy
        slots.assign(torch.tensor(rows), part.slots)
        world.number = part.number
        for row, held, seen in zip(rows, part.rows, part.seen, strict=True):
            world.rows[row], world.seen[row] = held, seen
    elif action == "beams":
        part = world.select(data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=4)))
        world.slots, world.rows, world.seen = part.slots, part.rows, part.seen


@settings(max_examples=150)
@given(data=st.data(), batch=st.integers(1, 3), heads=st.integers(1, 2), capacity=st.integers(1, 9))
def test_slots_are_a_dict_of_positions(data, batch, heads, capacity):
    world = World(batch, heads, capacity)
    world.check()
    for _ in range(data.draw(st.integers(1, 10))):
        one_step(data, world, [*TOKENS, "some rows", "some rows", "beams"])
        world.check()


def test_bytes_are_those_of_all_that_travels():
    world = World(2, 3, 5)
    assert world.slots.nbytes == 2 * 3 * 5 * (2 * 4 + 1 * 4 + 4 + 8 + 3 * 4)


@given(data=st.data(), size=st.integers(1, 12), shared=st.booleans(), levels=st.integers(1, 5))
def test_lowest_is_a_sort_by_score_then_age(data, size, shared, levels):
    batch, heads = 2, 3
    number = st.sampled_from([-torch.inf, -1.5, 0.0, 0.25, 7.0][:levels])
    scores = [[[data.draw(number) for _ in range(size)] for _ in range(1 if shared else heads)] for _ in range(batch)]
    scores = torch.tensor(scores)
    positions = distinct(data, batch, heads, 2 * size, size).int()
    candidates = distinct(data, batch, heads, size, size) < data.draw(st.integers(1, size))
    count = data.draw(st.integers(1, int(candidates.sum(-1).min())))
    got = lowest(scores, positions, candidates, count)
    assert got.shape == (batch, heads, count)
    assert torch.equal(got, lowest_reference(scores, positions, candidates, count))
    for row in range(batch):
        for head in range(heads):
            score = scores[row, 0 if shared else head].tolist()
            free = [slot for slot in range(size) if candidates[row, head, slot]]
            expected = sorted(free, key=lambda slot: (score[slot], int(positions[row, head, slot])))[:count]
            assert sorted(got[row, head].tolist()) == sorted(expected)


# --- Attention over what is alive ------------------------------------------------------------------------------------


def reference(query, key, value, mask, scaling):
    """Dense float64 softmax attention, ``mask`` ``[B, H, n, m]``; heads repeated, everything at once."""
    group = query.shape[1] // key.shape[1]
    query, key, value = query.double(), *(t.double().repeat_interleave(group, 1) for t in (key, value))
    logits = (query @ key.mT * scaling).masked_fill(~mask.repeat_interleave(group, 1), -torch.inf)
    return logits.softmax(-1) @ value, logits.softmax(-1)


@st.composite
def attention_cases(draw, largest=40):
    """Queries, keys and values in float64 with gradients: the newest n of m positions, values of another size."""
    m = draw(st.integers(1, largest))
    n = draw(st.integers(1, m) | st.just(m))
    batch, heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sizes = (heads * group, n, 4), (heads, m, 4), (heads, m, 3)
    tensors = [torch.randn(batch, *size, generator=generator, dtype=torch.float64) * 2 for size in sizes]
    return [tensor.requires_grad_() for tensor in tensors], generator


def agree(got, expected, inputs, generator, rows=None):
    """Outputs and, through a random linear functional of them, the gradients of all inputs agree."""
    rows = torch.ones_like(got[:, :1, :, :1]) if rows is None else rows[:, None, :, None]
    torch.testing.assert_close(got * rows, expected.nan_to_num() * rows, rtol=0, atol=1e-12)
    weight = torch.randn(got.shape, generator=generator, dtype=got.dtype) * rows
    ours = torch.autograd.grad((got * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-11)


def causal(n, m):
    return torch.arange(m) <= torch.arange(m - n, m)[:, None]


@given(case=attention_cases(), block=st.sampled_from([1, 3, 7, 16, 128]), shape=st.sampled_from(["ragged", "even"]))
def test_live_attention_is_dense_attention_under_its_lifetimes(case, block, shape):
    """Lifetimes of any kind: ``ragged`` leaves heads with different numbers alive, ``even`` is a budget of four."""
    (query, key, value), generator = case
    n, m = query.shape[2], key.shape[2]
    token = torch.arange(m)
    if shape == "ragged":
        share = torch.rand(*key.shape[:3], generator=generator)
        evicted_at = (token + 1 + (share * (m - token)).long()).clamp(max=m)
        evicted_at = torch.where(torch.rand(key.shape[:3], generator=generator) < 0.2, m, evicted_at)
    else:
        evicted_at = (token + 4).clamp(max=m).expand(key.shape[:3])
    query_at = torch.arange(m - n, m)[:, None]
    mask = causal(n, m) & (query_at < evicted_at[:, :, None])
    expected, _ = reference(query, key, value, mask, 0.7)
    got = live_attention(query, key, value, evicted_at.int(), 0.7, block=block)
    agree(got, expected, (query, key, value), generator)


@given(case=attention_cases())
def test_live_attention_without_evictions_is_causal_attention(case):
    (query, key, value), generator = case
    n, m = query.shape[2], key.shape[2]
    got = live_attention(query, key, value, torch.full(key.shape[:3], m, dtype=torch.int32), 0.7)
    assert torch.equal(got, causal_attention(query, key, value, 0.7))
    expected, _ = reference(query, key, value, causal(n, m).expand(*key.shape[:2], n, m), 0.7)
    agree(got, expected, (query, key, value), generator)


@given(case=attention_cases(), data=st.data(), block=st.sampled_from([1, 5, 128]))
def test_causal_attention_of_padded_rows(case, data, block):
    """Queries that are padding themselves have no meaning; the others never see a pad."""
    (query, key, value), generator = case
    n, m = query.shape[2], key.shape[2]
    pads = torch.tensor([data.draw(st.integers(0, m - 1)) for _ in range(key.shape[0])])
    live = (torch.arange(m) >= pads[:, None])[:, None]  # [B, 1, m]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_attention, "ROW_BLOCK", block)
        got = causal_attention(query, key, value, 0.7, live)
    assert bool(torch.isfinite(got).all())
    mask = (causal(n, m) & live[:, :, None]).expand(*key.shape[:2], n, m)
    real = live[:, 0, m - n :]
    mask = mask | ~real[:, None, :, None]  # keep the reference finite where nothing is asked of it
    agree(got, reference(query, key, value, mask, 0.7)[0], (query, key, value), generator, rows=real.double())


@given(case=attention_cases(largest=12), masked=st.booleans())
def test_masked_attention_and_its_probabilities(case, masked):
    (query, key, value), generator = case
    n, m, heads = query.shape[2], key.shape[2], key.shape[1]
    mask = torch.rand(key.shape[0], heads, n, m, generator=generator) < 0.5
    mask[..., 0] |= ~mask.any(-1)
    mask = mask if masked else torch.ones_like(mask)
    got, probabilities = masked_attention(query, key, value, mask if masked else None, 0.7)
    expected, dense = reference(query, key, value, mask, 0.7)
    agree(got, expected, (query, key, value), generator)
    torch.testing.assert_close(probabilities, dense.unflatten(1, (heads, -1)), rtol=0, atol=1e-12)
    assert not probabilities.masked_select(~mask[:, :, None]).any(), "a hidden key got attention"
    assert torch.equal(masked_output(query, key, value, mask if masked else None, 0.7), got)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_masked_attention_softmaxes_in_float32(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 9, 8, generator=generator).to(dtype) for heads in (6, 2, 2))
    output, probabilities = masked_attention(query, key, value, causal(9, 9)[None, None], 0.4)
    assert (output.dtype, probabilities.dtype) == (dtype, torch.float32)
    expected, _ = reference(query, key, value, causal(9, 9).expand(2, 2, 9, 9), 0.4)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_alone_rounds_its_probabilities_once(dtype):
    """Over some of the slots too, whose view is not contiguous; and gradients are those of the other."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 700, 16, generator=generator).to(dtype) for heads in (6, 2, 2))
    query, key, value = query[:, :, :1], key[:, :, 88:], value[:, :, 88:]
    output, probabilities = masked_attention(query, key, value, None, 0.4)
    alone = masked_output(query, key, value, None, 0.4)
    torch.testing.assert_close(alone, output, rtol=0, atol=torch.finfo(dtype).eps * float(probabilities.amax()) * 4)
    query.requires_grad_()
    grads = [torch.autograd.grad(one(query, key, value, None, 0.4).sum(), query)[0] for one in (masked_output, first)]
    assert torch.equal(*grads)


def first(*arguments):
    return masked_attention(*arguments)[0]


LONG_SEQUENCE = """
import resource, sys
from pathlib import Path
import torch
from kvkeep.sparse_attention import live_attention

def peak():
    status = Path("/proc/self/status")
    if status.exists():  # on Linux ru_maxrss starts from the peak of the process that launched this one
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

length, budget = int(sys.argv[1]), 64
query, key, value = (torch.randn(1, heads, length, 16, requires_grad=True) for heads in (2, 1, 1))
evicted_at = torch.arange(length, dtype=torch.int32) + budget
evicted_at[:8] = length
evicted_at = evicted_at.clamp(max=length)[None, None]
live_attention(query[:, :, :256], key[:, :, :256], value[:, :, :256], evicted_at[..., :256].clamp(max=256), 0.25)
before = peak()
with torch.no_grad():
    output = live_attention(query, key, value, evicted_at, 0.25)
forward = peak() - before
live_attention(query, key, value, evicted_at, 0.25).sum().backward()
print(forward, peak() - before, bool(torch.isfinite(output).all() and torch.isfinite(key.grad).all()))
"""


@pytest.mark.slow
def test_live_attention_never_holds_a_square():
    length = 16384
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(sparse_attention.__file__).parents[1])}
    command = [sys.executable, "-c", LONG_SEQUENCE, str(length)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    forward, backward, finite = run.stdout.split()
    assert finite == "True"
    assert int(forward) < length * length / 8  # bytes: not even a bool for every other pair of a head
    assert int(backward) < length * length  # the graph keeps the gathered keys and the probabilities of all blocks

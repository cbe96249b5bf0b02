"""Triton's kernels in its interpreter, on the CPU, against their references and those against plain definitions.

The interpreter shows that a kernel computes the right numbers, not that it compiles: `test_kernels_compile` does that,
for GPUs that need not be there. What only a GPU can show is `python -m kvkeep.kernels.check`.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import sparse_attention
from kvkeep.kernels.choice import takes_triton
from kvkeep.kernels.decode import decode_attention, decode_attention_reference
from kvkeep.kernels.place import replace_lowest, replace_lowest_reference

HAS_WHEEL = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
needs_triton = pytest.mark.skipif(not HAS_WHEEL, reason="Triton has no wheels for this platform")
FEW = settings(max_examples=15)  # the interpreter is slow

# --- Replacement -----------------------------------------------------------------------------------------------------


class Head:
    """One head's tokens as a list of (priority, position, key, value), the slow way."""

    def __init__(self, slots):
        self.slots = [None] * slots

    def replace(self, now, priority, key, value, sinks, window):
        """Returns the slot; `priority[slot]` is what every slot's token has at this step."""
        slot = len(self.slots) - 1 - now
        if slot < 0:
            rivals = [
                (priority[i], self.slots[i][0], i)
                for i in range(len(self.slots))
                if sinks <= self.slots[i][0] <= now - window
            ]
            slot = min(rivals)[2]
        self.slots[slot] = (now, key, value)
        return slot


@st.composite
def replacements(draw):
    sinks, window, topk = draw(st.integers(0, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 9))
    shape = draw(st.integers(1, 2)), draw(st.integers(1, 3)), sinks + window + topk
    sizes = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    wide = draw(st.sampled_from([torch.float32, torch.float64]))
    late = draw(st.lists(st.integers(0, 2 * shape[2]), min_size=shape[0], max_size=shape[0]))
    return sinks, window, shape, sizes, dtype, wide, late, draw(st.integers(1, 4)), draw(st.integers(0, 2**31))


@needs_triton
@FEW
@given(replacements())
def test_replacement_is_a_list_of_tokens(case):
    """Rows that began at different times, as left padding makes them; few priorities, so that many are equal."""
    from kvkeep.kernels.triton_place import replace_lowest_triton

    sinks, window, (batch, heads, slots), sizes, dtype, wide, late, levels, seed = case
    generator = torch.Generator().manual_seed(seed)

    def store():
        return (
            torch.zeros(batch, heads, slots, sizes[0], dtype=dtype),
            torch.zeros(batch, heads, slots, sizes[1], dtype=dtype),
            torch.full((batch, heads, slots), -1, dtype=torch.int32),
            torch.zeros(batch, heads, slots, dtype=wide),
            torch.zeros(batch, heads, window, dtype=torch.int64),
            torch.zeros(batch, dtype=torch.int64),
        )

    stores = store(), store()
    lists = [[Head(slots) for _ in range(heads)] for _ in range(batch)]
    for step in range(2 * slots + 3):
        priority = torch.randint(levels, (batch, heads, slots), generator=generator).to(wide) - 1
        key, value = (torch.randn(batch, 1, heads, size, generator=generator).to(dtype) for size in sizes)
        key, value = key.transpose(1, 2), value.transpose(1, 2)  # as a model has them: heads are not the outer axis
        for replace, (keys, values, positions, ranks, recent, clock) in zip(
            (replace_lowest_reference, replace_lowest_triton), stores, strict=True
        ):
            ranks.copy_(priority)
            replace(keys, values, positions, ranks, recent, clock, key, value, sinks, window)
            for row in range(batch):  # a row whose tokens begin later has seen pads so far: forget them
                if step < late[row]:
                    positions[row], clock[row] = -1, 0
        for mine, other in zip(*stores, strict=True):
            assert torch.equal(mine, other)
        for row in range(batch):
            if step < late[row]:
                continue
            for head in range(heads):
                now = step - late[row]
                expected = lists[row][head].replace(
                    now, priority[row, head].tolist(), key[row, head, 0], value[row, head, 0], sinks, window
                )
                assert int(stores[0][4][row, head, now % window]) == expected
                for slot, token in enumerate(lists[row][head].slots):
                    if token is not None:
                        assert int(stores[0][2][row, head, slot]) == token[0]
                        assert torch.equal(stores[0][0][row, head, slot], token[1])
                        assert torch.equal(stores[0][1][row, head, slot], token[2])


@needs_triton
def test_replacement_over_several_blocks(monkeypatch):
    """More slots than a program looks at at once: the lowest, and of equals the oldest, of all blocks."""
    from kvkeep.kernels import triton_place

    monkeypatch.setattr(triton_place, "MOST_SLOTS_AT_ONCE", 16)
    generator = torch.Generator().manual_seed(0)
    slots, window, sinks = 75, 5, 2
    victims = set()
    for _ in range(12):
        positions = torch.stack([torch.randperm(slots, generator=generator) for _ in range(3)])[None].int()
        priority = torch.randint(3, (1, 3, slots), generator=generator).float()
        recent = torch.zeros(1, 3, window, dtype=torch.int64)
        pair = torch.randn(1, 3, 1, 4, generator=generator)
        stores = [
            (
                *torch.zeros(2, 1, 3, slots, 4),
                positions.clone(),
                priority.clone(),
                recent.clone(),
                torch.tensor([slots]),
            )
            for _ in range(2)
        ]
        replace_lowest_reference(*stores[0], pair, pair, sinks, window)
        triton_place.replace_lowest_triton(*stores[1], pair, pair, sinks, window)
        for mine, other in zip(*stores, strict=True):
            assert torch.equal(mine, other)
        victims |= set((stores[1][2] == slots).nonzero()[:, 2].tolist())
    assert len({victim // 16 for victim in victims}) == 5, "some block never lost a token"


@needs_triton
def test_a_store_that_a_kernel_cannot_write_is_refused():
    from kvkeep.kernels.triton_place import replace_lowest_triton

    keys = torch.zeros(1, 4, 2, 8).transpose(1, 2)
    rest = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, dtype=torch.int32), torch.zeros(1, 2, 4)
    rest += torch.zeros(1, 2, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"keys must be contiguous .* \(64, 8, 16, 1\)"):
        replace_lowest_triton(keys, *rest, torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0, 1)


# --- Attention of one query ------------------------------------------------------------------------------------------


def plain_attention(query, key, value, scaling, live):
    """Float64, a head at a time."""
    logits = torch.einsum("bhgd,bhnd->bhgn", query.double(), key.double()) * scaling
    if live is not None:
        logits = logits.masked_fill(~live[:, :, None].expand_as(logits), -torch.inf)
    return torch.einsum("bhgn,bhnd->bhgd", logits.softmax(-1), value.double()), logits.softmax(-1)


@st.composite
def single_queries(draw):
    batch, heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 7, 17]))
    slots, before = draw(st.integers(1, 150)), draw(st.integers(0, 5))
    sizes = draw(st.sampled_from([4, 8, 20, 33])), draw(st.sampled_from([4, 20, 64]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    query = torch.randn(batch, 1, heads * group, sizes[0], generator=generator).to(dtype)
    query = query.transpose(1, 2).unflatten(1, (heads, group)).squeeze(3)  # as a model has them
    pair = [torch.randn(batch, heads, slots + before, size, generator=generator).to(dtype) for size in sizes]
    key, value = (tensor[:, :, before:] for tensor in pair)  # a view of slots
    live = draw(st.sampled_from([None, "padding", "heads"]))
    if live == "padding":
        first = torch.tensor([draw(st.integers(0, slots - 1)) for _ in range(batch)])
        live = (torch.arange(slots) >= first[:, None])[:, None]
    elif live == "heads":
        live = torch.rand(batch, heads, slots, generator=generator) < 0.5
        live[..., -1] = True
    return query, key, value, live, draw(st.integers(1, 9)), draw(st.booleans())


@needs_triton
@FEW
@given(single_queries())
def test_decode_attention_is_attention(case):
    from kvkeep.kernels.triton_decode import decode_attention_triton

    query, key, value, live, pieces, statistics = case
    expected, probabilities = plain_attention(query, key, value, 0.4, live)
    half = query.dtype == torch.bfloat16
    for attend, options in ((decode_attention_reference, {}), (decode_attention_triton, {"pieces": pieces})):
        output, found = attend(query, key, value, 0.4, live, statistics, **options)
        assert (output.dtype, output.shape) == (query.dtype, expected.shape)
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=0.04 if half else 2e-6)
        if not statistics:
            assert found is None
            continue
        assert found.dtype == torch.float32
        rounded = half and attend is decode_attention_reference  # its logits are bfloat16
        torch.testing.assert_close(found.double(), probabilities, rtol=0, atol=0.02 if rounded else 1e-6)
        if live is not None:
            assert not found.masked_select(~live[:, :, None].expand_as(found)).any(), "an empty slot got attention"


@needs_triton
@pytest.mark.parametrize("pieces", [1, 3])
def test_decode_attention_of_large_logits(pieces):
    """A piece that has nothing to say beside another: no overflow, no NaN."""
    from kvkeep.kernels.triton_decode import decode_attention_triton

    query, key = torch.ones(1, 1, 2, 16), torch.randn(1, 1, 300, 16, generator=torch.Generator().manual_seed(0))
    key[:, :, 200] = 80.0
    output, probabilities = decode_attention_triton(query, key, key, 1.0, pieces=pieces)
    assert probabilities[0, 0, :, 200].tolist() == [1.0, 1.0]
    torch.testing.assert_close(output, key[:, :, 200:201].expand_as(output))


@needs_triton
def test_decode_attention_without_any_token_is_the_reference():
    from kvkeep.kernels.triton_decode import decode_attention_triton

    query, key = torch.randn(2, 1, 2, 16), torch.randn(2, 1, 90, 16)
    live = torch.ones(2, 1, 90, dtype=torch.bool)
    live[1] = False
    for mine, its in zip(
        decode_attention_triton(query, key, key, 0.3, live, pieces=2),
        decode_attention_reference(query, key, key, 0.3, live),
        strict=True,
    ):
        torch.testing.assert_close(mine, its)


# --- Who takes a call ------------------------------------------------------------------------------------------------


def test_the_cpu_is_the_references():
    query, key = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 9, 8)
    assert not takes_triton(query, key)
    for mine, its in zip(
        decode_attention(query, key, key, 0.3), decode_attention_reference(query, key, key, 0.3), strict=True
    ):
        assert torch.equal(mine, its)
    stores = [
        (
            *torch.zeros(2, 1, 2, 3, 8),
            torch.full((1, 2, 3), -1, dtype=torch.int32),
            torch.zeros(1, 2, 3),
            torch.zeros(1, 2, 1, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int64),
        )
        for _ in range(2)
    ]
    for replace, store in zip((replace_lowest, replace_lowest_reference), stores, strict=True):
        replace(*store, key[:, :, :1], key[:, :, 1:2], 0, 1)
    for mine, its in zip(*stores, strict=True):
        assert torch.equal(mine, its)


@needs_triton
@pytest.mark.parametrize("masked", [False, True])
def test_a_decode_step_goes_through_the_kernel(monkeypatch, masked):
    """On the CPU with every call claimed for Triton: one query is the kernel's, several are torch's."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(2, heads, 9, 16, generator=generator) for heads in (6, 3, 3))
    mask = (torch.arange(7) >= torch.tensor([0, 3])[:, None])[:, None, None] if masked else None  # [B, 1, 1, m]
    taken = []
    monkeypatch.setattr("kvkeep.kernels.decode.takes_triton", lambda *tensors: True)
    monkeypatch.setattr(sparse_attention, "takes_triton", lambda *tensors: taken.append(len(tensors)) or True)
    for count in (1, 2):
        given = query[:, :, :count], keys[:, :, 2:].flatten(0, 1), values[:, :, 2:].flatten(0, 1), 0.25, mask
        output, probabilities = sparse_attention.packed_attention_reference(*given)
        mine = sparse_attention.packed_attention(*given)
        torch.testing.assert_close(mine, (output, probabilities), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(sparse_attention.packed_output(*given), output, atol=1e-6, rtol=1e-6)
    assert taken == [3, 3]


@needs_triton
def test_a_replacement_goes_through_the_kernel(monkeypatch):
    monkeypatch.setattr("kvkeep.kernels.place.takes_triton", lambda *tensors: True)
    pair = torch.full((1, 2, 1, 4), float("nan"))  # the compiled loop would refuse it; a kernel does not wait to see
    store = (
        *torch.zeros(2, 1, 2, 3, 4),
        torch.tensor([[[2, 1, 0]] * 2], dtype=torch.int32),
        torch.zeros(1, 2, 3),
        torch.zeros(1, 2, 1, dtype=torch.int64),
        torch.tensor([3]),
    )
    assert replace_lowest(*store, pair, pair, 1, 1) is True
    assert store[2].tolist() == [[[2, 3, 0]] * 2]
    assert store[0].isnan().any(-1).tolist() == [[[False, True, False]] * 2]


class OnCuda:
    """What `takes_triton` asks of a tensor."""

    def __init__(self, dtype=torch.float32, requires_grad=False):
        self.device, self.dtype, self.requires_grad = torch.device("cuda", 0), dtype, requires_grad


@pytest.mark.parametrize(
    ("tensors", "taken"),
    [
        ([OnCuda(), OnCuda(torch.bfloat16), OnCuda(torch.float16)], True),
        ([OnCuda(), OnCuda(torch.float64)], False),
        ([OnCuda(), torch.zeros(1)], False),
        ([OnCuda(), OnCuda(requires_grad=True)], False),
    ],
)
@pytest.mark.parametrize("installed", [True, False])
def test_who_takes_a_call_on_cuda(monkeypatch, tensors, taken, installed):
    monkeypatch.setattr("kvkeep.kernels.choice.has_triton", lambda: installed)
    assert takes_triton(*tensors) is (taken and installed)
    if tensors[-1].requires_grad:
        with torch.no_grad():
            assert takes_triton(*tensors) is installed


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it fails
import torch
import kvkeep.kernels.choice, kvkeep.kernels.decode, kvkeep.kernels.place
assert kvkeep.kernels.choice.has_triton() is False
print(kvkeep.kernels.decode.decode_attention(torch.ones(1, 1, 1, 4), *torch.ones(2, 1, 1, 3, 4), 1.0)[1].tolist())
"""


def python(code, **environment):
    source = str(Path(__file__).resolve().parents[1] / "src")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])} | environment
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_kernels_are_importable_without_triton():
    run = python(WITHOUT_TRITON)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str([[[[1 / 3] * 3]]]).replace("3333333333333333", "3333333432674408")


COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from kvkeep.kernels import triton_decode, triton_place

def build(kernel, pointers, numbers, capability):
    signature = {name: "constexpr" if name in numbers else pointers.get(name, "i32") for name in kernel.arg_names}
    built = compile(ASTSource(kernel, signature, numbers), target=GPUTarget("cuda", capability, 32))
    print(kernel.__name__, capability, built.metadata.shared, len(built.asm["cubin"]))

capability, number, block = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
sizes = dict(VALUE_DIM=128, BLOCK_VALUE=128)
attention = dict(GROUP=3, BLOCK_GROUP=16, BLOCK_SLOTS=block, STATISTICS=True) | sizes
floats = {name: "*fp32" for name in ("logits", "peaks", "sums", "parts")} | {"scaling": "fp32"}
heads = {name: "*" + number for name in ("query", "key", "value", "output", "keys", "values", "new_keys", "new_values")}
whole = {"live": "*u8", "positions": "*i32", "priority": "*fp32", "recent": "*i64", "clock": "*i64"} | floats | heads
only = dict(KEY_DIM=120, BLOCK_KEY=128, MASKED=True, EMPTY=triton_decode.LEAST, AS_BITS=False)
build(triton_decode._attend, whole, attention | only, capability)
build(triton_decode._join, whole, attention, capability)
build(triton_place._replace, whole, dict(KEY_DIM=120, BLOCK_KEY=128, BLOCK=512) | sizes, capability)
"""


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("capability", "number", "block"), [(80, "fp32", 32), (90, "bf16", 64)])
def test_kernels_compile(tmp_path, capability, number, block):
    """For A100 and H100, down to machine code, and in the shared memory that a program may have there."""
    code = COMPILE.replace("sys.argv[1]", f"{capability}").replace("sys.argv[2]", repr(number))
    run = python(code.replace("sys.argv[3]", str(block)), TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert run.returncode == 0, run.stderr
    built = [line.split() for line in run.stdout.splitlines()]
    assert [name for name, *_ in built] == ["_attend", "_join", "_replace"]
    assert all(int(shared) <= 99 * 1024 and int(code) > 0 for _, _, shared, code in built), run.stdout

"""Attention mass by FlexAttention and in rounded products against row blocks in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from kvkeep import attention_mass
from kvkeep.attention_mass import attention_by_age, block_attention, future_attention, query_sums
from kvkeep.kernels.choice import takes_flex
from kvkeep.kernels.flex_mass import blocks_after_window, causal_blocks, causal_lse
from kvkeep.kernels.products import bfloat16_product, bfloat16_product_reference

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
CPU = torch.device("cpu")


def heads(batch, kv_heads, group, length, size, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, kv_heads * group, length, size, generator=generator) * scale
    return query, torch.randn(batch, kv_heads, length, size, generator=generator)


# --- FlexAttention ---------------------------------------------------------------------------------------------------


def agrees(shape, length, window, pads, below, **options):
    """Flex against row blocks in float64; `below` is how far below the dense LSE that of a sparse attention lies."""
    query, key = heads(*shape, length, 8, seed=length)
    options["padding"] = torch.tensor(pads)
    if below:
        scaling = options.get("scaling") or 8**-0.5
        options["lse"] = causal_lse(query, key, scaling) - below * torch.rand(query.shape[:3])
    by_flex = future_attention(query, key, window, backend="flex", **options)
    expected = future_attention(query.double(), key.double(), window, backend="rows", **options)
    torch.testing.assert_close(by_flex.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("length", "pads", "below"), [(200, [0, 70], 0), (130, [130, 1], 0), (40, [0, 0], 1)])
def test_flex_is_row_blocks(length, pads, below):
    agrees((2, 2, 3), length, 9, pads, below)


@pytest.mark.slow
@settings(max_examples=30)
@given(
    length=st.integers(1, 280),
    window=st.integers(1, 150),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3)),
    group=st.sampled_from(["max", "mean_log", "log_mean"]),
    scaling=st.sampled_from([None, 0.5, 0.3]),
    below=st.sampled_from([0, 1]),
    data=st.data(),
)
def test_flex_is_row_blocks_everywhere(length, window, shape, group, scaling, below, data):
    """Slow because torch traces FlexAttention anew for every geometry."""
    pads = [data.draw(st.integers(0, length)) for _ in range(shape[0])]
    agrees(shape, length, window, pads, below, group=group, scaling=scaling)


@settings(max_examples=40)
@given(length=st.integers(1, 700), window=st.integers(1, 700))
def test_listed_blocks_are_those_of_the_mask(length, window):
    """FlexAttention as written on the CPU only asks the mask; compiled, it visits the blocks that are listed."""
    for blocks, offset in ((causal_blocks(length, CPU), 0), (blocks_after_window(length, window, CPU), window)):
        sign = 1 if offset == 0 else -1

        def seen(batch, head, asks, answers, sign=sign, offset=offset):
            return sign * (asks - answers) >= offset

        torchs = create_block_mask(seen, None, None, length, length, device="cpu")
        for kind in ("kv", "full_kv"):
            counts, listed = (getattr(blocks, f"{kind}_{part}")[0, 0] for part in ("num_blocks", "indices"))
            theirs, their_list = (getattr(torchs, f"{kind}_{part}")[0, 0] for part in ("num_blocks", "indices"))
            assert counts.tolist() == theirs.tolist()
            for row, count in enumerate(counts.tolist()):
                assert sorted(listed[row, :count].tolist()) == sorted(their_list[row, :count].tolist())
        grid = torch.arange(length)
        assert torch.equal(blocks.mask_mod(0, 0, grid[:, None], grid), seen(0, 0, grid[:, None], grid))


class OnCuda:
    """What `takes_flex` asks of queries."""

    def __init__(self, dtype=torch.bfloat16, size=64):
        self.device, self.dtype, self.shape = torch.device("cuda", 0), dtype, (1, 2, 3, size)


@pytest.mark.parametrize(
    ("query", "taken"),
    [
        (OnCuda(), True),
        (OnCuda(torch.float32), True),
        (OnCuda(torch.float64), False),
        (OnCuda(size=8), False),
        (torch.zeros(1, 2, 3, 64), False),
    ],
)
def test_who_takes_flex(monkeypatch, query, taken):
    for installed in (True, False):
        monkeypatch.setattr("kvkeep.kernels.choice.has_triton", lambda installed=installed: installed)
        assert takes_flex(query, "auto") is (taken and installed)
        assert takes_flex(query, "rows") is False


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (torch.float32, {"backend": "dense"}, r"backend must be one of auto, rows, flex, got 'dense'"),
        (torch.float64, {"backend": "flex"}, r'backend "flex" works in float32, got queries in float64'),
        (torch.float32, {"precision": "half"}, r"precision must be one of auto, wide, bfloat16, got 'half'"),
        (torch.float64, {"precision": "bfloat16"}, r'"bfloat16" adds up in float32, got queries in float64'),
    ],
)
def test_what_cannot_be_is_refused(dtype, options, message):
    query, key = (tensor.to(dtype) for tensor in heads(1, 1, 1, 5, 4))
    with pytest.raises(ValueError, match=message):
        future_attention(query, key, 1, **options)


# --- Rounded products ------------------------------------------------------------------------------------------------


def everything(query, key, **options):
    return [
        future_attention(query, key, 7, **options),
        block_attention(query, key, 20, 16, **options),
        attention_by_age(query, key, 7, [0, 9, 40], **options),
        query_sums(query, key, [(0, 30), (10, 90)], **options),
    ]


@pytest.fixture(params=["here", "everywhere"])
def product(request, monkeypatch):
    """Products as this processor has them, which may not round at all, and as one that rounds does."""
    if request.param == "everywhere":
        monkeypatch.setattr(attention_mass, "bfloat16_product", bfloat16_product_reference)


@pytest.mark.parametrize("size", [64, 80])  # of the square roots only the first is a power of two
def test_rounding_what_is_bfloat16_loses_nothing(size, product):
    query, key = (tensor.bfloat16() for tensor in heads(2, 2, 3, 96, size, scale=3.0))
    pairs = zip(everything(query, key, precision="bfloat16"), everything(query.double(), key.double()), strict=True)
    for mine, its in pairs:
        torch.testing.assert_close(mine.double(), its, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 80])
def test_flex_takes_bfloat16(size):
    """As written on the CPU it rounds what bfloat16 tensors multiply to, too; compiled for CUDA it does not."""
    query, key = (tensor.bfloat16() for tensor in heads(2, 2, 3, 96, size))
    expected = future_attention(query.double(), key.double(), 7)
    found = future_attention(query, key, 7, precision="bfloat16", backend="flex")
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.03)


@pytest.mark.parametrize(("scale", "most", "mean"), [(1.0, 0.01, 0.001), (3.0, 0.03, 0.004)])
def test_rounding_float32_moves_a_target_by_little(scale, most, mean, product):
    """What `future_attention` says of it."""
    query, key = heads(1, 1, 3, 1024, 64, scale=scale)
    error = future_attention(query, key, 32, precision="bfloat16") - future_attention(query.double(), key.double(), 32)
    assert float(error.abs().max()) < most
    assert float(error.abs().mean()) < mean


def test_a_product_is_that_of_rounded_numbers_or_better():
    a, b = heads(2, 3, 1, 40, 33)
    exact, rounded = a.double() @ b.double().mT, a.bfloat16().double() @ b.bfloat16().double().mT
    torch.testing.assert_close(bfloat16_product_reference(a, b.mT).double(), rounded, rtol=0, atol=1e-5)
    found = bfloat16_product(a, b.mT)
    assert found.dtype == torch.float32
    assert float((found - exact).abs().max()) < 1.5 * float((rounded - exact).abs().max())


def test_the_setting_of_the_process_is_put_back():
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    with pytest.raises(RuntimeError):
        bfloat16_product(torch.zeros(2, 3), torch.zeros(2, 3))
    assert setting.fp32_precision == before
    bfloat16_product(torch.zeros(2, 3), torch.zeros(3, 2))
    assert setting.fp32_precision == before


def test_float16_is_not_rounded_to_bfloat16():
    query, key = (tensor.half() for tensor in heads(1, 1, 2, 60, 16))
    expected = future_attention(query.double(), key.double(), 5)
    torch.testing.assert_close(future_attention(query, key, 5).double(), expected, rtol=0, atol=1e-5)

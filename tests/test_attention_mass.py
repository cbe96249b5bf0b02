"""Attention mass against dense float64 softmax, and the exact numbers of both papers' definitions."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from kvkeep import attention_mass
from kvkeep.attention_mass import block_attention, future_attention, future_maximum, query_sums
from kvkeep.budget import Budget
from kvkeep.lifetimes import running_topk, visible


def random_heads(batch=2, kv_heads=2, group=3, length=96, dim=16, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, kv_heads * group, length, dim, generator=generator, dtype=torch.float64)
    key = torch.randn(batch, kv_heads, length, dim, generator=generator, dtype=torch.float64)
    return query.to(dtype), key.to(dtype)


def dense_logits(query, key, scaling=None):
    """Causal logits in float64, `[B, Hq, S, S]`."""
    query, key = query.double(), key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    return logits.masked_fill(torch.ones(query.shape[2], query.shape[2]).triu(1).bool(), -torch.inf)


def dense_future(query, key, window, group="max", count_normalised=True, eps=1e-6, scaling=None):
    counts = torch.ones(query.shape[2], query.shape[2]).tril(-window)  # query d, key t: d >= t + w
    mass = (dense_logits(query, key, scaling).softmax(-1) * counts).sum(-2).unflatten(1, (key.shape[1], -1))
    if count_normalised:
        mass = mass / torch.clamp(mass.shape[-1] - window - torch.arange(mass.shape[-1]), min=1)
    if group == "log_mean":
        return (eps + mass.mean(2)).log()
    return (eps + mass).log().amax(2) if group == "max" else (eps + mass).log().mean(2)


def dense_blocks(query, key, start, interval, head="mean", scaling=None):
    probability = dense_logits(query, key, scaling).softmax(-1).unflatten(1, (key.shape[1], -1))
    means = [probability[..., first : first + interval, :].mean(-2) for first in range(start, query.shape[2], interval)]
    blocks = torch.stack(means, -1) if means else probability.new_zeros(*probability.shape[:3], query.shape[2], 0)
    return blocks.mean(2) if head == "mean" else blocks.amax(2)


def heads_from_weights(*heads):
    """Queries and one shared key whose softmax, at scaling 1, gives these rows of weights: a query asks for logs."""
    heads = [[[float(weight) for weight in row.split()] for row in rows.split("/")] for rows in heads]
    length = len(heads[0])
    query = torch.zeros(1, len(heads), length, length, dtype=torch.float64)
    for head, rows in enumerate(heads):
        for q, weights in enumerate(rows):
            query[0, head, q, : len(weights)] = torch.tensor(weights, dtype=torch.float64).log()
    return query, torch.eye(length, dtype=torch.float64)[None, None]


# --- KVpop's numbers -------------------------------------------------------------------------------------------------


@pytest.fixture
def six_tokens():
    key = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0], [1, -1], [-1, 0]], dtype=torch.float64)
    first = torch.tensor([[1, 0], [0, 1], [1, 1], [2, 0], [0, 2], [1, -1]], dtype=torch.float64)
    second = torch.tensor([[0, 1], [1, 0], [1, -1], [0, 2], [2, 0], [1, 1]], dtype=torch.float64)
    return torch.stack([first, second])[None] * 2**0.5, key[None, None]


UNNORMALISED = {"group": "log_mean", "count_normalised": False}
EMPTY = -13.81551056  # log(1e-6): no query of the row has the key outside its window


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"group": "max"}, [-1.19608321, -1.51308155, -0.92624031, -2.55279361, EMPTY, EMPTY]),
        ({"group": "mean_log"}, [-1.33118583, -1.62790808, -1.14174094, -2.63682303, EMPTY, EMPTY]),
        ({"group": "log_mean"}, [-1.32208710, -1.62132995, -1.11869821, -2.63329671, EMPTY, EMPTY]),
        (UNNORMALISED, [0.06420445, -0.52272104, -0.42555256, -2.63329671, EMPTY, EMPTY]),
    ],
)
def test_kvpop_12_1_target_of_six_tokens(six_tokens, options, expected):
    target = future_attention(*six_tokens, window=2, **options)
    torch.testing.assert_close(target[0, 0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=2e-8)


def test_kvpop_12_1_lse_and_mass_of_six_tokens(six_tokens):
    query, key = six_tokens
    lse = [
        [1, 1.31326169, 2.55144471, 2.82007519, 2.82810901, 2.55280645],
        [0, 1.31326169, 1.40760596, 2.82007519, 3.18499503, 2.72086765],
    ]
    lse = torch.tensor(lse, dtype=torch.float64)
    torch.testing.assert_close(dense_logits(query, key).logsumexp(-1)[0], lse, rtol=0, atol=1e-8)
    mass = future_attention(query, key.repeat(1, 2, 1, 1), window=2, eps=0.0, lse=lse[None]).exp()
    expected = [
        [0.23077945, 0.17504008, 0.25736873, 0.07786284, 0, 0],
        [0.30237524, 0.22022928, 0.39603890, 0.06581762, 0, 0],
    ]
    torch.testing.assert_close(mass[0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=2e-8)


def transposed_log_mass(query, key, lse, window):
    """KVpop's B.2 the other way round, keys asking: `log m_t = LSE over d >= t + w of (l(d, t) - LSE_d) - log N_t`."""
    length = query.shape[2]
    t, d = torch.arange(length)[:, None], torch.arange(length)
    logits = (dense_logits(query, key) - lse[..., None]).mT  # [B, Hq, keys, queries]
    counts = (length - window - torch.arange(length)).clamp(min=1)
    return logits.masked_fill(d < t + window, -torch.inf).logsumexp(-1) - counts.double().log()


@pytest.mark.parametrize("block", [None, 1, 7, 40, 96, 200])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_kvpop_12_2_transposed_pass_agrees(dtype, tolerance, block):
    query, key = random_heads(dtype=dtype)  # B 2, H 2, G 3, S 96, D 16
    transposed = transposed_log_mass(query, key, dense_logits(query, key).logsumexp(-1), window=7)
    assert int((transposed == -torch.inf).sum()) == 2 * 6 * 7
    per_head = future_attention(query, key.repeat_interleave(3, 1), window=7, eps=0.0, block=block)
    torch.testing.assert_close(per_head.double(), transposed, rtol=0, atol=tolerance)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_kvpop_12_2_flex_attention_agrees():
    query, key = random_heads(dtype=torch.float32)
    key = key.repeat_interleave(3, 1)
    lse = dense_logits(query, key).logsumexp(-1).float()
    mask = create_block_mask(lambda b, h, t, d: d >= t + 7, B=None, H=None, Q_LEN=96, KV_LEN=96, device="cpu")
    with torch.no_grad():
        _, aux = flex_attention(
            key,
            query,
            torch.zeros_like(query),
            score_mod=lambda score, b, h, t, d: score - lse[b, h, d],
            block_mask=mask,
            scale=16**-0.5,
            return_aux=AuxRequest(lse=True),
        )
    log_mass = aux.lse - (96 - 7 - torch.arange(96)).clamp(min=1).log()
    torch.testing.assert_close(future_attention(query, key, window=7, eps=0.0), log_mass, rtol=0, atol=1e-5)


def test_kvpop_12_3_sparse_lse_only_lifts_the_target_and_by_no_more_than_the_mass_lost():
    query, key = random_heads(length=64)
    key = key.repeat_interleave(3, 1)
    logits = dense_logits(query, key)
    dense_lse = logits.logsumexp(-1)
    generator = torch.Generator().manual_seed(1)
    priority = torch.randn(2, 6, 64, generator=generator)
    masses = {}
    for budget in (Budget(2, 5, 9), Budget(2, 5, 57)):
        seen = visible(running_topk(priority, budget))
        sparse_lse = logits.masked_fill(~seen, -torch.inf).logsumexp(-1)
        sparse = future_attention(query, key, window=5, eps=0.0, lse=sparse_lse)[..., :-5]
        masses[budget.rest] = sparse
        lift = sparse - future_attention(query, key, window=5, eps=0.0)[..., :-5]
        assert lift.min() >= -1e-12
        assert (lift <= (dense_lse - sparse_lse).amax(-1, keepdim=True) + 1e-12).all()
    assert (masses[16] - masses[64]).max() > 0.1  # the budget of 16 does evict
    torch.testing.assert_close(masses[64], future_attention(query, key, window=5, eps=0.0)[..., :-5])


# --- ForesightKV's numbers -------------------------------------------------------------------------------------------

G1 = "1 / 1 1 / 2 1 1 / 1 2 1 4 / 1 3 2 1 3 / 5 1 2 4 3 5"
G3_FIRST = "1 / 1 1 / 2 1 1 / 1 1 1 1 / 4 1 1 1 1 / 4 1 1 1 1 2 / 2 4 1 1 4 2 2 / 2 2 1 5 1 1 2 2 / 1 1 6 1 1 1 1 2 2"
G3_SECOND = "1 / 1 1 / 1 1 2 / 2 1 1 1 / 1 1 1 1 1 / 1 1 1 1 2 4 / 8 2 1 1 1 1 2 / 4 1 1 4 2 2 1 1 / 1 1 4 1 1 1 1 3 3"


def test_foresight_g1_alpha_and_the_running_maximum():
    means = block_attention(*heads_from_weights(G1), start=4, interval=1, scaling=1.0)[0, 0]
    rows = [[0.10, 0.30, 0.20, 0.10, 0.30, 0], [0.25, 0.05, 0.10, 0.20, 0.15, 0.25]]
    expected = torch.tensor(rows, dtype=torch.float64)
    torch.testing.assert_close(means, expected.T, rtol=0, atol=1e-12)
    alpha = future_maximum(means)
    torch.testing.assert_close(alpha[:3, 0], torch.tensor([0.25, 0.30, 0.20]).double())
    torch.testing.assert_close(alpha[[0, 1, 3], 1], torch.tensor([0.25, 0.05, 0.20]).double())
    assert (alpha[:3, 0].argmin(), means[:3, 0].argmin()) == (2, 0)  # the next block alone would drop another token


def test_foresight_g2_interval_as_long_as_the_rest():
    means = block_attention(*heads_from_weights(G1), start=4, interval=2, scaling=1.0)[0, 0]
    expected = torch.tensor([[0.175, 0.175, 0.15, 0.15, 0.225, 0.125]], dtype=torch.float64)
    torch.testing.assert_close(means, expected.T, rtol=0, atol=1e-12)


def test_foresight_g3_partial_block_and_group_mean():
    heads = heads_from_weights(G3_FIRST, G3_SECOND)
    means = block_attention(*heads, start=6, interval=2, scaling=1.0)[0, 0]
    expected = torch.tensor([[16, 9, 4, 11, 8, 6, 7, 3, 0], [4, 4, 20, 4, 4, 4, 4, 10, 10]]).double() / 64
    torch.testing.assert_close(means, expected.T, rtol=0, atol=1e-12)
    alpha = future_maximum(means)
    torch.testing.assert_close(alpha[:4, 0], torch.tensor([0.25, 0.140625, 0.3125, 0.171875]).double())
    torch.testing.assert_close(alpha[[0, 2, 4, 5], 1], torch.tensor([1, 5, 1, 1]).double() / 16)
    padded = future_maximum(block_attention(*heads, start=6, interval=2, scaling=1.0, partial="zero_pad")[0, 0])
    torch.testing.assert_close(padded[:4, 0], torch.tensor([0.25, 0.140625, 0.15625, 0.171875]).double())


def test_foresight_g4_row_blocks_equal_dense_and_stay_small(monkeypatch):
    query, key = random_heads(batch=1, kv_heads=1, group=2, length=37, dim=8)
    sizes = []
    row_blocks = attention_mass._row_blocks

    def watched(*arguments):
        for a, b, probability in row_blocks(*arguments):
            sizes.append(probability.numel())
            yield a, b, probability

    monkeypatch.setattr(attention_mass, "_row_blocks", watched)
    budget = Budget(sinks=0, window=0, topk=8, interval=4)
    means = block_attention(query, key, start=budget.slots, interval=4, block=5)
    assert means[0, 0].shape == (37, 7)
    assert budget.evictions(37) == 7
    torch.testing.assert_close(means, dense_blocks(query, key, 12, 4), rtol=0, atol=1e-12)
    assert max(sizes) <= 2 * 4 * 37  # heads * queries of a block * keys


PEAK_OF_20000_TOKENS = """
import pathlib, resource, sys, torch
from kvkeep.attention_mass import attention_by_age, block_attention, future_attention

torch.set_num_threads(1)
query, key = torch.randn(2, 1, 1, 20_000, 8)
means = block_attention(query, key, start=2048 + 512, interval=512)
assert means.shape == (1, 1, 20_000, 35)
target = future_attention(query, key, window=256)
assert target.shape == (1, 1, 20_000) and target.isfinite().all()

status = pathlib.Path("/proc/self/status")
if status.exists():  # on Linux ru_maxrss starts from the peak of the process that launched this one
    peak = next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(peak)
"""


@pytest.mark.slow
def test_foresight_g4_a_head_of_20000_tokens_stays_under_a_gigabyte():
    environment = {**os.environ, "PYTHONPATH": str(Path(attention_mass.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PEAK_OF_20000_TOKENS]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 10**9  # the scores alone would be 1.6 GB


# --- properties ------------------------------------------------------------------------------------------------------


@st.composite
def cases(draw):
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    length = draw(st.integers(1, 33))
    query, key = random_heads(batch, kv_heads, group, length, draw(st.integers(1, 5)), seed=draw(st.integers(0, 2**31)))
    padding = torch.tensor([draw(st.integers(0, length)) for _ in range(batch)])
    scaling = draw(st.sampled_from([None, 0.3, 1.0]))
    return query, key, padding, scaling, draw(st.one_of(st.none(), st.integers(1, 40)))


@settings(deadline=None)
@given(cases(), st.integers(1, 12), st.sampled_from(["max", "mean_log", "log_mean"]), st.booleans())
def test_future_attention_equals_dense_and_padding_equals_alone(case, window, group, count_normalised):
    query, key, padding, scaling, block = case
    options = {"group": group, "count_normalised": count_normalised, "scaling": scaling}
    whole = future_attention(query, key, window, **options, block=block)
    torch.testing.assert_close(whole, dense_future(query, key, window, **options), rtol=0, atol=1e-9)
    lse = dense_logits(query, key, scaling).logsumexp(-1)
    torch.testing.assert_close(future_attention(query, key, window, **options, lse=lse, block=block), whole)
    padded = future_attention(query, key, window, **options, padding=padding, block=block)
    for row, pad in enumerate(padding.tolist()):
        assert torch.equal(padded[row, :, :pad], torch.full_like(padded[row, :, :pad], 1e-6).log())
        if pad < key.shape[2]:
            alone = dense_future(query[[row], :, pad:], key[[row], :, pad:], window, **options)
            torch.testing.assert_close(padded[[row], :, pad:], alone, rtol=0, atol=1e-9)


@settings(deadline=None)
@given(cases(), st.integers(0, 20), st.integers(1, 12), st.sampled_from(["mean", "max"]))
def test_block_attention_equals_dense_and_padding_equals_alone(case, start, interval, head):
    query, key, padding, scaling, block = case
    length = key.shape[2]
    options = {"start": start, "interval": interval, "scaling": scaling, "head": head}
    whole = block_attention(query, key, **options, block=block)
    assert whole.shape == (*key.shape[:3], max(0, -(-(length - start) // interval)))
    torch.testing.assert_close(whole, dense_blocks(query, key, start, interval, head, scaling), rtol=0, atol=1e-12)
    padded = block_attention(query, key, **options, padding=padding, block=block)
    assert padded.shape == whole.shape
    for row, pad in enumerate(padding.tolist()):
        expected = torch.zeros_like(padded[row])
        if pad < length:
            alone = dense_blocks(query[[row], :, pad:], key[[row], :, pad:], start, interval, head, scaling)[0]
            expected[:, pad:, : alone.shape[-1]] = alone
        torch.testing.assert_close(padded[row], expected, rtol=0, atol=1e-12)


@settings(deadline=None)
@given(cases(), st.lists(st.tuples(st.integers(0, 33), st.integers(0, 33)), max_size=5))
def test_query_sums_equal_dense_and_padding_equals_alone(case, pairs):
    query, key, padding, scaling, block = case
    length = key.shape[2]
    ranges = [(min(a, b, length), min(max(a, b), length)) for a, b in pairs]
    padded = query_sums(query, key, ranges, scaling=scaling, padding=padding, block=block)
    assert padded.shape == (*query.shape[:3], len(ranges))
    for row, pad in enumerate(padding.tolist()):
        expected = torch.zeros_like(padded[row])
        if pad < length:
            probability = dense_logits(query[[row], :, pad:], key[[row], :, pad:], scaling).softmax(-1)[0]
            for number, (a, b) in enumerate(ranges):
                expected[:, pad:, number] = probability[:, a:b].sum(-2)
        torch.testing.assert_close(padded[row], expected, rtol=0, atol=1e-12)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 12))
def test_future_maximum_never_rises_and_is_reached(seed, blocks):
    means = torch.rand(2, 3, 7, blocks, generator=torch.Generator().manual_seed(seed))
    alpha = future_maximum(means)
    assert alpha.shape == means.shape
    for t in range(blocks):
        assert torch.equal(alpha[..., t], means[..., t:].amax(-1))


# --- dtypes, layouts, sizes ------------------------------------------------------------------------------------------


def test_half_precision_is_widened_before_anything_is_multiplied():
    query, key = random_heads(dtype=torch.bfloat16)
    assert future_attention(query, key, 7).dtype == torch.float32
    torch.testing.assert_close(future_attention(query, key, 7).double(), dense_future(query, key, 7), rtol=0, atol=1e-5)
    means = block_attention(query, key, 20, 8)
    assert means.dtype == torch.float32
    torch.testing.assert_close(means.double(), dense_blocks(query, key, 20, 8), rtol=0, atol=1e-6)
    assert query_sums(query, key, [(0, 9)]).dtype == torch.float32


def test_inputs_may_be_strided_and_carry_gradients_and_stay_as_they_are():
    query, key = random_heads()
    strided = query.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    before = strided.detach().clone()
    target = future_attention(strided, key.requires_grad_(), 7)
    assert not target.requires_grad
    torch.testing.assert_close(target, future_attention(query, key, 7))
    assert torch.equal(strided.detach(), before)


def test_large_batches_take_turns(monkeypatch):
    query, key = random_heads(batch=5, length=40)
    padding = torch.tensor([3, 0, 3, 3, 7])
    together = future_attention(query, key, 7, padding=padding)
    lse = dense_logits(query, key).logsumexp(-1)
    with_lse = block_attention(query, key, 9, 4, lse=lse, padding=padding)
    monkeypatch.setattr(attention_mass, "BATCH_SCORES", 1)
    torch.testing.assert_close(future_attention(query, key, 7, padding=padding), together)
    torch.testing.assert_close(block_attention(query, key, 9, 4, lse=lse, padding=padding), with_lse)


def test_a_row_of_only_pads_and_a_row_within_its_window():
    query, key = random_heads(length=12)
    target = future_attention(query, key, window=12, padding=torch.tensor([12, 5]))
    assert torch.equal(target, torch.full_like(target, 1e-6).log())


# --- mistakes --------------------------------------------------------------------------------------------------------

QUERY, KEY = torch.zeros(2, 6, 8, 4), torch.zeros(2, 3, 8, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: future_attention(QUERY[:, :5], KEY, 2), "5 query heads are not a multiple of 3 KV heads"),
        (lambda: future_attention(QUERY, KEY[:, :, :7], 2), "length: 8 and 7"),
        (lambda: block_attention(QUERY, KEY[:1], 2, 2), "batch size: 2 and 1"),
        (lambda: query_sums(QUERY, KEY[..., :3], [(0, 1)]), "head_dim: 4 and 3"),
        (lambda: future_attention(QUERY[0], KEY, 2), "(6, 8, 4) and (2, 3, 8, 4)"),
        (
            lambda: future_attention(QUERY, KEY, 2, lse=torch.zeros(2, 3, 8)),
            "(2, 6, 8) like the queries, got (2, 3, 8)",
        ),
        (lambda: future_attention(QUERY * torch.nan, KEY, 2), "not finite"),
        (lambda: future_attention(QUERY, KEY, 0), "at least 1, got 0"),
        (lambda: future_attention(QUERY, KEY, 2, group="mean"), "'mean'"),
        (lambda: future_attention(QUERY, KEY, 2, eps=-1.0), "-1.0"),
        (lambda: future_attention(QUERY, KEY, 2, block=0), "at least 1 query, got 0"),
        (lambda: future_attention(QUERY, KEY, 2, padding=torch.tensor([9, 0])), "length 8, got [9, 0]"),
        (lambda: block_attention(QUERY, KEY, 2, 0), "start 2 and interval 0"),
        (lambda: block_attention(QUERY, KEY, -1, 1), "start -1 and interval 1"),
        (lambda: block_attention(QUERY, KEY, 2, 2, partial="sum"), "'sum'"),
        (lambda: block_attention(QUERY, KEY, 2, 2, head="min"), "'min'"),
        (lambda: query_sums(QUERY, KEY, [(0, 9)]), "length 8, got (0, 9)"),
        (lambda: query_sums(QUERY, KEY, [(5, 3)]), "got (5, 3)"),
    ],
)
def test_mistakes_name_the_sizes_that_clash(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()

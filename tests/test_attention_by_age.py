"""Attention by age against dense attention, alone and padded."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.attention_mass import attention_by_age, future_attention
from test_attention_mass import cases, dense_logits, random_heads


@settings(deadline=None)
@given(cases(), st.integers(1, 12), st.lists(st.integers(0, 40), min_size=2, max_size=6, unique=True))
def test_attention_by_age_equals_dense_and_padding_equals_alone(case, window, edges):
    query, key, padding, scaling, block = case
    edges = sorted(edges)
    options = {"scaling": scaling, "block": block}
    padded = attention_by_age(query, key, window, edges, "mean", padding=padding, **options)
    assert padded.shape == (*key.shape[:3], len(edges) - 1)
    for row, pad in enumerate(padding.tolist()):
        expected = torch.zeros_like(padded[row])
        if pad < key.shape[2]:
            probability = dense_logits(query[[row], :, pad:], key[[row], :, pad:], scaling).softmax(-1)[0]
            probability = probability.unflatten(0, (key.shape[1], -1)).mean(1)  # [Hkv, queries, keys]
            position = torch.arange(key.shape[2] - pad)
            age = position[:, None] - position - window
            for number, (low, high) in enumerate(itertools.pairwise(edges)):
                expected[:, pad:, number] = (probability * ((age >= low) & (age < high))).sum(-2)
        torch.testing.assert_close(padded[row], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("group", ["max", "mean"])
def test_attention_of_all_ages_is_the_future_attention(group):
    query, key = random_heads(batch=2, kv_heads=2, group=3, length=90, dim=4)
    whole = attention_by_age(query, key, 7, [0, 90], group)[..., 0]
    target = future_attention(query, key, 7, "max" if group == "max" else "log_mean", count_normalised=False)
    torch.testing.assert_close((whole + 1e-6).log(), target)
    parts = attention_by_age(query, key, 7, [0, 10, 20, 90], "mean").sum(-1)
    torch.testing.assert_close(parts, attention_by_age(query, key, 7, [0, 90], "mean")[..., 0])

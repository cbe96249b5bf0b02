"""The central invariant: decoding through an EvictingCache is the replay, for every policy, family and padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import all_policies
import kvkeep
from all_policies import ONLINE, WITHOUT_QUERIES, label, make
from kvkeep.runtime.replay import token_losses
from reference import masked_forward
from tiny import FAMILIES, HANDED, left_pad, make_cache, random_ids, tiny_model

LENGTH = 48


def decode(model, ids, policy, pieces, prefill="sparse", mask=None):
    """Feed ``ids`` in pieces of the given lengths, then token by token.

    Returns:
        logits ``[B, S, V]`` and, per bounded layer, the lifetimes read off the slots after every piece, ``[B, H, S]``
        in columns (exact where a piece is one token long).
    """
    cache = make_cache(model, policy, mask, len(ids), prefill=prefill)
    length = ids.shape[1]
    if not HANDED and prefill == "sparse":
        pieces = [min(pieces[0], policy.budget.slots)]
    pieces = list(pieces) + [1] * (length - sum(pieces))
    logits, gone, start = [], {}, 0
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    for piece in pieces:
        stop = start + piece
        inputs = {} if mask is None else {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        with torch.no_grad():
            logits.append(model(ids[:, start:stop], past_key_values=cache, **inputs).logits)
        start = stop
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, type(cache.evicting_layers[0])):
                track(gone, index, layer.positions, stop, length)
    return torch.cat(logits, 1), gone, cache


def track(gone, index, positions, seen, length):
    """Note tokens that are held no longer; ``positions`` are those of one unpadded row."""
    if positions.shape[0] > 1:
        return
    heads = positions.shape[1]
    held = torch.zeros(1, heads, length + 1, dtype=torch.bool)
    held.scatter_(2, positions.long() % (length + 1), True)  # empty slots (-1) fall on the spare column
    first = gone.setdefault(index, torch.full((1, heads, length), length, dtype=torch.int32))
    lost = ~held[..., :seen] & (first[..., :seen] == length)
    first[..., :seen][lost] = seen - 1
    assert not (held[..., :seen] & (first[..., :seen] < seen)).any(), "a token came back"


@pytest.mark.parametrize("case", ONLINE, ids=label)
@pytest.mark.parametrize("prompt", [1, 9, 30], ids=["no-prompt", "prompt-in-budget", "prompt-over-budget"])
def test_decoding_is_the_replay(case, prompt):
    model, ids, policy = tiny_model(), random_ids(LENGTH), make(case)
    offline = kvkeep.replay(model, ids, policy, return_logits=True)
    online, gone, cache = decode(model, ids, policy, [prompt])
    assert cache.evicted >= 3
    assert (online - offline.logits).abs().max() <= 1e-8
    for layer, evicted_at in enumerate(offline.evicted_at):
        inside = evicted_at > prompt  # what went inside the prompt cannot be dated from outside
        assert torch.equal(gone[layer][inside], evicted_at[inside])


@pytest.mark.parametrize("case", ONLINE, ids=label)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(case, family):
    model, ids = tiny_model(family, group=4, kv_heads=1 if family == "gemma3" else 2), random_ids(40)
    policy = make(case, model)
    offline = kvkeep.replay(model, ids, policy, return_logits=True)
    online, gone, _ = decode(model, ids, policy, [3])
    assert (online - offline.logits).abs().max() <= 1e-8
    for layer, evicted_at in enumerate(offline.evicted_at):
        assert (layer in gone) == (evicted_at is not None)
        if evicted_at is not None:
            assert torch.equal(gone[layer], evicted_at)


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("case", [case for case in ONLINE if case[0] in ("random", "h2o_decayed", "rkv")], ids=label)
def test_every_group_size(case, group):
    model, ids, policy = tiny_model(group=group), random_ids(40, seed=group), make(case)
    offline = kvkeep.replay(model, ids, policy, return_logits=True)
    online, _, _ = decode(model, ids, policy, [5])
    assert (online - offline.logits).abs().max() <= 1e-8


@pytest.mark.parametrize("case", ONLINE, ids=label)
def test_float32_logits_under_the_same_decisions(case):
    model, ids, policy = tiny_model(dtype=torch.float32), random_ids(LENGTH), make(case)
    offline = kvkeep.replay(model, ids, policy, return_logits=True)
    online, gone, _ = decode(model, ids, policy, [3])
    same = all(torch.equal(gone[layer], offline.evicted_at[layer]) for layer in gone)
    assert same, "decisions differ in float32: compare logits under the same lifetimes instead"
    assert (online - offline.logits).abs().max() <= 1e-4


@pytest.mark.parametrize("case", all_policies.EVERY, ids=label)
def test_replay_is_full_attention_under_its_lifetimes(case):
    model, ids = tiny_model("gemma3"), random_ids(LENGTH)
    policy = make(case, model)
    offline = kvkeep.replay(model, ids, policy, return_logits=True)
    reference, _ = masked_forward(model, ids, offline.evicted_at)
    dense, _ = masked_forward(model, ids, [None] * 3)
    assert (offline.logits - reference).abs().max() <= 1e-10
    assert torch.equal(token_losses(model, ids, policy), offline.token_loss)
    assert (offline.logits - dense).abs().max() > 1e-3, "eviction changed nothing: the test has no teeth"


@pytest.mark.parametrize("case", all_policies.EVERY, ids=label)
def test_every_head_holds_its_budget(case):
    model, ids, policy = tiny_model(), random_ids(LENGTH), make(case)
    budget = policy.budget
    for evicted_at in kvkeep.replay(model, ids, policy).evicted_at:
        held = kvkeep.lifetimes.visible(evicted_at).sum(-1)  # [B, H, S]
        assert int(held.max()) == budget.slots
        if not budget.interval:
            query = torch.arange(LENGTH)
            assert torch.equal(held, (query + 1).clamp(max=budget.rest).expand_as(held))
        assert (evicted_at[..., : budget.sinks] == LENGTH).all()
        age = (evicted_at - torch.arange(LENGTH))[evicted_at < LENGTH]
        assert int(age.min()) >= max(budget.window, 1)


@pytest.mark.parametrize("case", all_policies.EVERY, ids=label)
def test_heads_keep_different_tokens_where_the_method_allows(case):
    model, ids, policy = tiny_model(), random_ids(LENGTH), make(case)
    lifetimes = kvkeep.replay(model, ids, policy).evicted_at
    alike = all(torch.equal(evicted_at[:, 0], evicted_at[:, 1]) for evicted_at in lifetimes)
    shared = policy.name == "streaming" or (policy.name == "tova" and not policy.per_head)
    assert alike == shared


@pytest.mark.parametrize("case", all_policies.EVERY, ids=label)
def test_batched_is_alone(case):
    model, policy = tiny_model(), make(case)
    rows = [random_ids(length, seed=length)[0] for length in (44, 31, 44, 3)]
    ids, mask = left_pad(rows)
    together = kvkeep.replay(model, ids, policy, attention_mask=mask, return_logits=True)
    decodes = case in ONLINE
    if decodes:
        online, _, _ = decode(model, ids, policy, [17], mask=mask)
    for index, row in enumerate(rows):
        pad = ids.shape[1] - len(row)
        alone = kvkeep.replay(model, row[None], policy, return_logits=True)
        assert (together.logits[index, pad:] - alone.logits[0]).abs().max() <= 1e-8
        assert (together.token_loss[index, pad:] - alone.token_loss[0]).abs().max() <= 1e-8
        for batched, single in zip(together.evicted_at, alone.evicted_at, strict=True):
            assert torch.equal(batched[index, :, pad:], single[0] + pad)
            assert not batched[index, :, :pad].any(), "a pad was seen"
        if decodes:
            assert (online[index, pad:] - alone.logits[0]).abs().max() <= 1e-8


@given(
    case=st.sampled_from(ONLINE),
    pieces=st.lists(st.integers(1, 17), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
def test_pieces_of_any_length_give_the_same(case, pieces, seed):
    """Chunked prefill and later turns: the cache does not care how the tokens arrive."""
    model, ids, policy = tiny_model(seed=1), random_ids(52, seed=seed), make(case)
    while sum(pieces) > 52:
        pieces = pieces[:-1]
    offline = kvkeep.replay(model, ids, policy, return_logits=True)
    online, _, _ = decode(model, ids, policy, pieces or [1])
    assert (online - offline.logits).abs().max() <= 1e-8


@pytest.mark.parametrize("case", WITHOUT_QUERIES, ids=label)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_entry_policies_under_stock_attention(case, attention, family):
    """Keys and values alone decide, so sdpa and eager decode the same; eager's softmax is float32."""
    tolerance = 1e-8 if attention == "sdpa" else 1e-3
    model = tiny_model(family, attention=attention, dtype=torch.float64 if attention == "sdpa" else torch.float32)
    policy = make(case, model)
    rest = policy.budget.rest
    rows = [random_ids(length, seed=length)[0] for length in (22 + rest, 24 + rest, 23 + rest)]
    ids, mask = left_pad(rows)
    prompt = max(rest - 1, 1)
    online, _, _ = decode(model, ids, policy, [prompt], mask=mask)
    for index, row in enumerate(rows):
        pad = ids.shape[1] - len(row)
        alone = kvkeep.replay(model, row[None], policy, return_logits=True)
        assert (online[index, pad:] - alone.logits[0]).abs().max() <= tolerance

"""What scorers compute, online and offline: items 6, 8 and 10 of the KVpop spec's section 12, precision, gradients."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

import kvkeep
from all_policies import ENTRY, LEARNED, label, make, random_scorer
from kvkeep import Budget, policies, scorers
from kvkeep.evaluation.contenders import Contender
from kvkeep.lifetimes import visible
from kvkeep.policies.base import Geometry, Step
from reference import masked_forward
from test_online_offline import decode
from tiny import left_pad, random_ids, tiny_model

SMOL = LlamaConfig(
    num_hidden_layers=30, hidden_size=576, num_attention_heads=9, num_key_value_heads=3, vocab_size=64, head_dim=64
)


# --- Section 12, item 6: static and literal decay --------------------------------------------------------------------


def kept(priority_at, tokens, query, places):
    """The top-k of the tokens by (priority at a query, age: the newest of equals)."""
    return set(sorted(tokens, key=lambda t: (priority_at(t, query), t))[-places:])


def test_item_6_static_and_literal_decay():
    raw, step, log_gamma = {3: 0.5, 4: 0.0}, 4, -1.0

    def literal(token, query):
        return raw[token] + (query - token) // step * log_gamma

    winners = [kept(literal, [3, 4], query, 1) for query in (7, 8, 11, 12, 15, 16)]
    assert winners == [{4}, {3}, {4}, {3}, {4}, {3}]
    scorer = scorers.new("kvpop_mlp", tiny_model().config, ENTRY, decay_step=step)
    scorer.set_decay(log_gamma)
    priority = scorer.priority(0, torch.tensor([[[0.5, 0.0]] * 2]), torch.tensor([[3, 4]]))
    assert priority[0, 0].tolist() == [0.5, 1.0]


# --- Section 12, item 8: decoding is masked full attention -----------------------------------------------------------

SPEC = Budget(sinks=2, window=5, topk=7)
DECAYING = [("kvpop_mlp", {}), ("kvpop", {"features": 4})]


@pytest.mark.parametrize(("name", "options"), DECAYING, ids=["kvpop_mlp", "kvpop"])
@pytest.mark.parametrize("log_gamma", [0.0, -0.4])
def test_item_8_decode_is_masked_full_attention(name, options, log_gamma):
    model, ids = tiny_model(group=3, kv_heads=2), random_ids(60, batch=2)
    scorer = random_scorer(name, model.config, SPEC, log_gamma=log_gamma, decay_step=4, **options)
    policy = policies.create(name, SPEC, scorer=scorer)
    offline = kvkeep.replay(model, ids, policy, return_logits=True)
    reference, _ = masked_forward(model, ids, offline.evicted_at)
    online, _, cache = decode(model, ids, policy, [1])
    assert (online - reference).abs().max() <= 1e-8
    dense, _ = masked_forward(model, ids, [None, None])
    assert (online - dense).abs().max() > 0.1, "eviction changed nothing: the test has no teeth"
    for row in range(2):
        alone, gone, _ = decode(model, ids[row : row + 1], policy, [1])
        assert (alone - online[row]).abs().max() <= 1e-8
        for layer in gone:
            assert torch.equal(gone[layer][0], offline.evicted_at[layer][row])
    for layer in cache.evicting_layers:
        assert layer.keys.shape[2] == 14
        assert ((layer.positions >= 0).sum(-1) == 14).all()


@pytest.mark.parametrize("name", ["kvpop_mlp", "kvpop"])
def test_item_8_a_constant_scorer_is_streaming(name):
    model, ids = tiny_model(), random_ids(60)
    scorer = scorers.new(name, model.config, SPEC)
    with torch.no_grad():
        for layer in scorer.layers.values():
            layer.w2.zero_()
    lifetimes = kvkeep.replay(model, ids, policies.create(name, SPEC, scorer=scorer)).evicted_at
    position = torch.arange(60)
    recent = (position > position[:, None] - 12) | (position < 2)
    for evicted_at in lifetimes:
        assert torch.equal(visible(evicted_at)[0, 0], recent & (position <= position[:, None]))


# --- Section 12, item 10: pieces and padding -------------------------------------------------------------------------


@pytest.mark.parametrize("case", LEARNED, ids=label)
def test_item_10_pieces_and_left_padding(case):
    model, policy = tiny_model(), make(case)
    row = random_ids(51)[0]
    alone = kvkeep.replay(model, row[None], policy, return_logits=True)
    ids, mask = left_pad([row, random_ids(60, seed=1)[0]])
    padded = kvkeep.replay(model, ids, policy, attention_mask=mask, return_logits=True)
    for single, batched in zip(alone.evicted_at, padded.evicted_at, strict=True):
        assert torch.equal(batched[0, :, 9:], single[0] + 9)
        assert not batched[0, :, :9].any(), "a pad was seen"
    online, _, cache = decode(model, ids, policy, [23, 11, 1, 2], mask=mask)
    assert (online[0, 9:] - alone.logits[0]).abs().max() <= 1e-8
    for layer, evicted_at in zip(cache.evicting_layers, alone.evicted_at, strict=True):
        held = [sorted(head.tolist()) for head in layer.positions[0]]
        assert held == [(lifetime == 51).nonzero().flatten().tolist() for lifetime in evicted_at[0]]


# --- What a scorer computes ------------------------------------------------------------------------------------------


def pairs(length, dtype=torch.float64, heads=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, heads, length, 8, generator=generator, dtype=torch.float64).to(dtype) for _ in "kv")


@pytest.mark.parametrize("case", LEARNED, ids=label)
def test_training_and_policy_compute_the_same(case):
    policy, window = make(case), case[1].window
    keys, values = pairs(41)
    whole = policy.scorer(1, keys, values, window)
    assert not whole[..., 41 - window :].any()
    positions = torch.arange(41).expand(2, -1)
    expected = policy.scorer.priority(1, whole, positions)
    geometry = Geometry(1, 2, 3, 8, 8**-0.5)
    memory = policy.new_memory(geometry, 2, keys.device, torch.float64)
    for q in range(41):
        old = max(q - window, 0)
        pair = [(tensor[:, :, q : q + 1], tensor[:, :, old : old + 1]) for tensor in (keys, values)]
        step = Step(
            geometry, (pair[0][0], pair[1][0]), (pair[0][1], pair[1][1]), positions[:, q : q + 1] - window, memory
        )
        priority = policy.priority(step)
        if q >= window:
            assert (priority[..., 0] - expected[..., q - window]).abs().max() <= 1e-10


def test_mlp_is_its_equation():
    scorer = random_scorer("kvpop_mlp", tiny_model().config, ENTRY, log_gamma=-0.3, decay_step=4)
    keys, values = pairs(20)
    got = scorer.priority(0, scorer(0, keys, values, 4), torch.arange(20).expand(2, -1))
    layer = scorer.layer(0)
    for head in range(2):
        x = (torch.cat([keys, values], -1)[:, head] - layer.input_mean[head]) / layer.input_std[head]
        raw = torch.nn.functional.silu(x @ layer.w1[head].double() + layer.b1[head]) @ layer.w2[head].double()
        score = (raw[..., 0] + layer.b2[head] - layer.score_mean[head]) / layer.score_std[head]
        expected = score - (torch.arange(20) // 4) * layer.log_gamma[head]
        assert (got[:, head, :16] - expected[:, :16]).abs().max() <= 1e-6  # parameters are float32


@pytest.mark.parametrize(("delay", "knows"), [(True, True), (False, False)])
def test_only_the_delayed_scorer_knows_what_came_after(delay, knows):
    scorer = random_scorer("kvpop", tiny_model().config, ENTRY, features=4, delay=delay)
    keys, values = pairs(30)
    before = scorer(0, keys, values, 4)
    keys[:, :, 20] += 1.0
    changed = (scorer(0, keys, values, 4) - before).abs().amax((0, 1)) > 1e-9
    assert not changed[:16].any()  # left the window before token 20 came
    assert bool(changed[16:20].any()) == knows
    assert bool(changed[20])


@pytest.mark.parametrize("case", LEARNED, ids=label)
def test_scores_are_float32_or_wider(case):
    scorer, window = make(case).scorer, case[1].window
    keys, values = pairs(30, torch.bfloat16)
    exact = scorer(0, keys.float(), values.float(), window)
    assert exact.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        rounded = scorer(0, keys, values, window)
    assert torch.equal(rounded, exact)
    assert scorer(0, keys.double(), values.double(), window).dtype == torch.float64
    wide = scorer(0, keys.double(), values.double(), window)
    assert (wide - exact).abs().max() <= 1e-4


@pytest.mark.parametrize("case", LEARNED, ids=label)
def test_gradients_reach_every_parameter_and_stop_at_the_pairs(case):
    scorer, window = make(case).scorer, case[1].window
    keys, values = (tensor.requires_grad_() for tensor in pairs(40))
    sum(scorer(layer.index, keys, values, window).square().sum() for layer in scorer.geometry).backward()
    assert keys.grad is None
    assert values.grad is None
    for name, parameter in scorer.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name
    assert not any("log_gamma" in name or "mean" in name or "std" in name for name, _ in scorer.named_parameters())


def test_gates_times_100_in_a_whole_scorer():
    scorer = random_scorer("kvpop", tiny_model().config, ENTRY, features=4)
    with torch.no_grad():
        for layer in scorer.layers.values():
            layer.w_gates.mul_(100)
            layer.b_gates.mul_(100)
    scores = scorer(0, *pairs(130, torch.float32), 4)
    scores.square().sum().backward()
    assert torch.isfinite(scores).all()
    assert all(torch.isfinite(p.grad).all() for p in scorer.layer(0).parameters())


def test_an_untrained_scorer_starts_small_and_seeded():
    for name in scorers.METHODS:
        scorer = scorers.new(name, SMOL, 128, seed=1)
        assert scorer.fingerprint() == scorers.new(name, SMOL, 128, seed=1).fingerprint()
        assert scorer.fingerprint() != scorers.new(name, SMOL, 128, seed=2).fingerprint()
        inputs = torch.randn(1, 3, 50, scorer.layer(3).input_mean.shape[-1], generator=torch.Generator().manual_seed(0))
        state = scorer.initial_state(3, 1, inputs.device, window=32)
        assert scorer.score(3, (inputs,), (inputs,), state).abs().max() < 0.2
    tall = scorers.new("kvpop", SMOL, 128)
    assert tall.layer(0).b_gates[:, 1].tolist() == [3.0, 4.5, 6.0]


def test_standardisation_is_frozen_and_survives_constants():
    layer = scorers.new("kvpop_mlp", tiny_model().config, ENTRY).layer(0)
    keys, values = pairs(30, torch.float32)
    keys[..., 3] = 5.0
    flat = torch.cat([keys, values], -1).transpose(0, 1).flatten(1, 2)  # [H, B * n, 2D]
    layer.standardise_inputs(flat.mean(1), flat.std(1))
    inputs = layer.standardised((keys, values))
    assert inputs.mean((0, 2)).abs().max() <= 1e-5
    assert (inputs[..., 3] == 0).all()
    assert torch.isfinite(inputs).all()


def test_the_decay_is_set_for_all_or_for_some():
    scorer = scorers.new("kvpop_mlp", tiny_model().config, ENTRY)
    before = scorer.fingerprint()
    scorer.set_decay(-0.3, decay_step=32)
    scorer.set_decay({1: torch.tensor([-0.1, 0.0])})
    assert scorer.layer(0).log_gamma.tolist() == pytest.approx([-0.3, -0.3])
    assert scorer.layer(1).log_gamma.tolist() == pytest.approx([-0.1, 0.0])
    assert (scorer.decay_step, scorer.fingerprint() != before) == (32, True)
    for wrong in (0.1, float("nan"), {0: torch.tensor([0.0, 1.0])}):
        with pytest.raises(ValueError, match="finite and at most 0"):
            scorer.set_decay(wrong)
    with pytest.raises(ValueError, match="decay_step must be at least 1"):
        scorer.set_decay(0.0, decay_step=0)


def test_decay_factors_carry_factor_times_tokens_to_other_budgets():
    scorer = random_scorer("kvpop_mlp", tiny_model().config, ENTRY, log_gamma=-0.3, decay_step=64)
    assert scorer.decay_factor(128) == 1, "none given"
    plain = scorer.fingerprint()
    scorer.decay_factors = {256: 1.0, 128: 2.5}
    assert scorer.fingerprint() != plain
    assert scorer.decay_factor(128) == 2.5
    assert scorer.decay_factor(256) == 1.0
    assert scorer.decay_factor(64) == 5.0
    assert scorer.decay_factor(1024) == 0.25
    assert scorer.decay_factor(181) == pytest.approx((320 + 256) / 2 / 181, rel=1e-2)
    score, positions = torch.zeros(1, 2, 1), torch.tensor([[640]])
    expected = -scorer.layer(0).log_gamma[None, :, None] * 10 * 5  # ten steps, five times the decay
    assert torch.allclose(scorer.priority(0, score, positions, 64), expected)
    scorer.set_decay(-0.1)
    assert scorer.decay_factors == {}, "a decay that is set holds for all budgets"


@pytest.mark.parametrize("name", ["kvpop_mlp", "kvpop"])
def test_policies_apply_the_factor_of_their_budget(name):
    model = tiny_model()
    budget = Budget(2, 4, 8)
    scorer = random_scorer(name, model.config, budget, log_gamma=-0.3, decay_step=4)
    ids, unit = random_ids(60), {shape.index: scorer.layer(shape.index).log_gamma.clone() for shape in scorer.geometry}

    def lifetimes():
        return torch.stack(kvkeep.replay(model, ids, policies.create(name, budget, scorer=scorer)).evicted_at)

    once = lifetimes()
    scorer.decay_factors = {4 * budget.rest: 1.0}  # at a quarter of the tokens four times the decay
    by_budget = lifetimes()
    scorer.set_decay({layer: 4 * log_gamma for layer, log_gamma in unit.items()})
    assert torch.equal(by_budget, lifetimes())
    assert not torch.equal(by_budget, once)


def test_a_window_that_a_scorer_was_trained_with_goes_with_it():
    """Of a number of slots; a budget is obeyed as given."""
    config = tiny_model().config
    narrow = scorers.new("foresightkv", config, [64, 128], window=4)
    assert narrow.budgets == (Budget(0, 4, 44, 16), Budget(0, 4, 92, 32))
    assert policies.create("foresightkv", 96, scorer=narrow).budget == Budget(0, 4, 68, 24)
    assert Contender("foresightkv", scorer=narrow).policy(64).budget == Budget(0, 4, 44, 16)
    assert Contender("foresightkv", overrides={"window": 9}, scorer=narrow).policy(64).budget == Budget(0, 9, 39, 16)
    given = Budget(0, 9, 39, 16)
    assert policies.create("foresightkv", given, scorer=narrow).budget == given
    usual = scorers.new("foresightkv", config, 64)
    assert usual.budgets == (Budget(0, 16, 32, 16),)
    assert policies.create("foresightkv", 64, scorer=usual).budget == usual.budgets[0]
    with pytest.raises(ValueError, match="window must be at least 0, not -1"):
        scorers.new("foresightkv", config, 64, window=-1)
    with pytest.raises(ValueError, match="64 slots must be above window 48 \\+ interval 16"):
        scorers.new("foresightkv", config, 64, window=48)

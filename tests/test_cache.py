"""The EvictingCache as transformers uses it: generate, beams, turns, refusals, nothing left behind."""

from __future__ import annotations

import pytest
import torch

import all_policies
import kvkeep
from all_policies import ENTRY, ONLINE, WITH_QUERIES, WITHOUT_QUERIES, label, make
from reference import masked_forward
from test_online_offline import decode
from tiny import FAMILIES, HANDED, left_pad, make_cache, random_ids, tiny_model

ROOMY = {"entry": kvkeep.Budget(2, 4, 200), "attention": kvkeep.Budget(2, 4, 200, interval=3)}
NEW = 24
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "prefill_chunk_size": None if HANDED else 1}
STREAMING, RANDOM, H2O = WITHOUT_QUERIES[0], WITHOUT_QUERIES[2], WITH_QUERIES[2]


def generate(model, ids, policy, mask=None, prefill="sparse", **options):
    cache = None if policy is None else make_cache(model, policy, mask, len(ids), prefill=prefill)
    mask = torch.ones_like(ids) if mask is None else mask
    settings = (GREEDY if policy is not None else GREEDY | {"prefill_chunk_size": None}) | options
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **settings), cache


def roomy(case):
    name, budget, options = case
    return make((name, ROOMY["attention" if budget.interval else "entry"], options))


@pytest.mark.parametrize("case", ONLINE, ids=label)
def test_generate_is_greedy_under_replay(case):
    """Every generated token is the argmax of the replay of what came before it."""
    model, policy = tiny_model(), make(case)
    tokens, cache = generate(model, random_ids(25), policy)
    logits = kvkeep.replay(model, tokens, policy, return_logits=True).logits
    assert torch.equal(logits[:, 24:-1].argmax(-1), tokens[:, 25:])
    assert cache.get_seq_length() == 25 + NEW - 1
    stock, _ = generate(model, random_ids(25), None)
    assert not torch.equal(stock, tokens), "eviction changed nothing: the test has no teeth"


def test_generate_takes_the_cache_by_either_name():
    model, policy = tiny_model(), make(STREAMING)
    expected, _ = generate(model, random_ids(25), policy)
    cache = kvkeep.EvictingCache(model.config, policy)
    name = "cache" if "cache" in model.forward.__wrapped__.__code__.co_varnames else "past_key_values"
    again = model.generate(random_ids(25), **GREEDY, **{name: cache})
    assert torch.equal(again, expected)


@pytest.mark.parametrize("case", ONLINE, ids=label)
def test_generate_of_a_left_padded_batch_is_each_row_alone(case):
    model, policy = tiny_model(), make(case)
    rows = [random_ids(length, seed=length)[0] for length in (33, 9, 20)]
    ids, mask = left_pad(rows)
    together, cache = generate(model, ids, policy, mask)
    for index, row in enumerate(rows):
        alone, _ = generate(model, row[None], policy)
        assert torch.equal(together[index, -NEW:], alone[0, -NEW:])
    for layer in cache.evicting_layers:  # a kept pad would show as a position below 0 or as one too many
        held = (layer.positions >= 0).sum(-1)
        assert (held == held[:, :1]).all()
        assert held[:, 0].tolist() == layer.residency.slots.held


@pytest.mark.parametrize("case", ONLINE, ids=label)
def test_second_turn_continues_exactly(case):
    model, policy = tiny_model(), make(case)
    first, cache = generate(model, random_ids(18), policy)
    follow_up = torch.cat([first, random_ids(21, seed=5)], 1)
    if not HANDED:  # its chunked prefill miscounts the mask of a cache that holds something
        for token in follow_up[:, cache.get_seq_length() : -1].split(1, 1):
            model(token, past_key_values=cache)
    options = {"attention_mask": torch.ones_like(follow_up), "past_key_values": cache}
    second = model.generate(follow_up, **options, **GREEDY | {"prefill_chunk_size": None})
    logits = kvkeep.replay(model, second, policy, return_logits=True).logits
    start = follow_up.shape[1]
    assert torch.equal(logits[:, start - 1 : -1].argmax(-1), second[:, start:])


@pytest.mark.parametrize("case", ONLINE, ids=label)
def test_budget_above_length_is_the_stock_model(case):
    ids = random_ids(40, batch=2)
    for attention, tolerance in (("sdpa", 1e-12), ("eager", 1e-5)):
        stock = tiny_model(attention=attention)
        reference = stock(ids).logits
        got = kvkeep.replay(stock, ids, roomy(case), return_logits=True).logits
        assert (got - reference).abs().max() <= tolerance
    if case[1].interval == 0:
        exact = tiny_model(attention="sdpa")
        assert torch.equal(kvkeep.replay(exact, ids, roomy(case), return_logits=True).logits, exact(ids).logits)
    model = tiny_model()
    assert torch.equal(generate(model, ids, roomy(case))[0], generate(model, ids, None)[0])


def test_full_policy_is_the_stock_model_bit_for_bit():
    model, ids = tiny_model(attention="sdpa"), random_ids(40, batch=2)
    replayed = kvkeep.replay(model, ids, kvkeep.policies.create("full"), return_logits=True)
    assert torch.equal(replayed.logits, model(ids).logits)
    assert torch.equal(generate(model, ids, kvkeep.policies.create("full"))[0], generate(model, ids, None)[0])


def test_constant_priority_is_streaming_llm():
    """Sinks and the newest window + topk, nothing else (spec/kvpop.md 0.6)."""
    model, ids = tiny_model(), random_ids(40)
    lifetimes = kvkeep.replay(model, ids, make(STREAMING)).evicted_at
    expected = torch.arange(40) + ENTRY.window + ENTRY.topk
    expected[: ENTRY.sinks] = 40
    for evicted_at in lifetimes:
        assert torch.equal(evicted_at, expected.clamp(max=40).int().expand_as(evicted_at))


@pytest.mark.parametrize("case", all_policies.ONLINE, ids=label)
@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvkeep"])
def test_causality(case, attention):
    """Changing token p changes no logit before p (the leak of spec/foresightkv.md 12.4)."""
    model, ids, policy = tiny_model(attention=attention), random_ids(48), make(case)
    changed = ids.clone()
    changed[0, 30] = (changed[0, 30] + 7) % 60 + 1
    before = kvkeep.replay(model, ids, policy, return_logits=True).logits
    after = kvkeep.replay(model, changed, policy, return_logits=True).logits
    assert torch.equal(before[:, :30], after[:, :30])
    assert not torch.allclose(before[:, 30], after[:, 30])


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_forward_is_untouched_by_the_attention_function(family):
    """A model loaded with "kvkeep" and no evicting cache is the stock model, padded or not, with stock caches."""
    ids, mask = left_pad([random_ids(31)[0], random_ids(12, seed=2)[0]])
    ours, stock = tiny_model(family), tiny_model(family, attention="sdpa")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    got = ours(ids, attention_mask=mask, position_ids=positions).logits
    want = stock(ids, attention_mask=mask, position_ids=positions).logits
    assert (got - want)[mask.bool()].abs().max() <= 1e-10
    for cache in ("dynamic", "static"):
        options = {"mask": mask, "cache_implementation": cache, "disable_compile": True}
        assert torch.equal(generate(ours, ids, None, **options)[0], generate(stock, ids, None, **options)[0])


def test_model_is_the_same_object_before_and_after():
    model, policy = tiny_model(attention="sdpa"), make(STREAMING)
    forwards = {name: module.forward.__func__ for name, module in model.named_modules() if hasattr(module, "forward")}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    config = model.config.to_dict()
    kvkeep.replay(model, random_ids(30), policy)
    generate(model, random_ids(10), policy)
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    assert forwards == {n: m.forward.__func__ for n, m in model.named_modules() if hasattr(m, "forward")}
    assert attributes == {name: set(vars(module)) for name, module in model.named_modules()}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_attention_is_restored_when_replay_raises():
    model = tiny_model(attention="sdpa")
    model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="layer 1: keys not finite at position 0"):
        kvkeep.replay(model, random_ids(30), make(STREAMING))
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("case", ONLINE, ids=label)
def test_two_runs_in_a_row_are_two_fresh_runs(case):
    """Nothing leaks from one sequence to the next: neither through the policy nor through the model."""
    model, policy = tiny_model(), make(case)
    generate(model, random_ids(30, seed=9), policy)
    again, _ = generate(model, random_ids(25), policy)
    fresh, _ = generate(tiny_model(), random_ids(25), make(case))
    assert torch.equal(again, fresh)


@pytest.mark.parametrize("case", ONLINE, ids=label)
def test_reset_cache_is_a_fresh_cache(case):
    model, policy = tiny_model(), make(case)
    expected, cache = generate(model, random_ids(25), policy)
    cache.reset()
    again = model.generate(random_ids(25), past_key_values=cache, **GREEDY)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("case", ONLINE, ids=label)
def test_beam_search_reorders_everything(case):
    """The best beam's score is the sum of its replayed log-probabilities; a beam that kept another's slots fails."""
    model, policy = tiny_model(), make(case)
    cache = make_cache(model, policy, batch=4)
    out = model.generate(
        random_ids(20),
        past_key_values=cache,
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=16,
        do_sample=False,
        eos_token_id=None,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
        **({} if HANDED else {"prefill_chunk_size": 1}),
    )
    logits = kvkeep.replay(model, out.sequences, policy, return_logits=True).logits.log_softmax(-1)
    token = out.sequences[:, 20:]
    score = logits[:, 19:-1].gather(-1, token[..., None]).sum((1, 2))
    assert (score - out.sequences_scores).abs().max() <= 1e-4


@pytest.mark.parametrize("case", ONLINE, ids=label)
def test_rows_can_be_repeated_and_selected(case):
    model, policy = tiny_model(), make(case)
    ids = random_ids(30, batch=2)
    _, _, cache = decode(model, ids, policy, [11])
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([4, 0]))
    with torch.no_grad():
        got = model(ids[[1, 0], -1:], past_key_values=cache).logits
        _, _, straight = decode(model, ids, policy, [11])
        want = model(ids[:, -1:], past_key_values=straight).logits
    assert (got - want[[1, 0]]).abs().max() <= 1e-12


@pytest.mark.parametrize("case", ONLINE, ids=label)
def test_dense_prefill_attends_densely_and_prunes_once(case):
    model, ids, policy = tiny_model(), random_ids(60), make(case)
    stock, _ = masked_forward(model, ids[:, :40], [None] * 2)
    logits, _, cache = decode(model, ids, policy, [40], prefill="dense")
    assert (logits[:, :40] - stock).abs().max() <= 1e-10
    sparse = kvkeep.replay(model, ids, policy, return_logits=True).logits
    assert (logits[:, 20:40] - sparse[:, 20:40]).abs().max() > 1e-3
    for layer in cache.evicting_layers:
        assert layer.keys.shape[2] == policy.budget.slots
        assert torch.isfinite(layer.keys).all()
        newest = layer.positions.max()
        assert int(newest) == 59


def test_dense_prefill_of_entry_policies_works_under_stock_attention():
    model, ids, policy = tiny_model(attention="sdpa"), random_ids(50), make(RANDOM)
    online, _, _ = decode(model, ids, policy, [40], prefill="dense")
    ours, _, _ = decode(tiny_model(), ids, policy, [40], prefill="dense")
    assert (online - ours).abs().max() <= 1e-10


@pytest.mark.parametrize("case", ONLINE, ids=label)
def test_bytes_are_slots_and_side_state_for_any_length(case):
    model, policy = tiny_model(dtype=torch.float32), make(case)
    sizes = set()
    for length in (30, 60, 200):
        _, _, cache = decode(model, random_ids(length), policy, [length - 3])
        sizes.add(cache.nbytes)
    heads, layers, head_dim = 2, 2, 8
    pairs = layers * heads * policy.budget.slots * 2 * head_dim * 4
    side = sizes.pop() - pairs
    assert not sizes, "the cache grew"
    assert side > 0
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.evicting_layers)
    assert kept == pairs


def test_gradients_of_replay_are_those_of_masked_attention():
    ids, policy = random_ids(40), make(RANDOM)
    ours, reference = tiny_model().requires_grad_(True), tiny_model().requires_grad_(True)
    replayed = kvkeep.replay(ours, ids, policy, gradients=True)
    replayed.token_loss.mean().backward()
    logits, _ = masked_forward(reference, ids, replayed.evicted_at, gradients=True)
    torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
    for mine, its in zip(ours.parameters(), reference.parameters(), strict=True):
        assert (mine.grad - its.grad).abs().max() <= 1e-8 * its.grad.abs().max().clamp(min=1)
    assert ours.model.layers[0].self_attn.k_proj.weight.grad.abs().max() > 0


def test_replay_measures_what_the_logits_say():
    model, ids = tiny_model(), random_ids(40, batch=2)
    result = kvkeep.replay(model, ids, make(STREAMING), return_logits=True)
    log_probability = result.logits[:, :-1].log_softmax(-1)
    loss = -log_probability.gather(-1, ids[:, 1:, None])[..., 0]
    entropy = -(log_probability.exp() * log_probability).sum(-1)
    assert (result.token_loss - loss).abs().max() <= 1e-10
    assert (result.entropy - entropy).abs().max() <= 1e-10
    assert result.valid.all()

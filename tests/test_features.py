"""ForesightKV's features: the spec's exact numbers, and that running sums, a ring of queries and definitions agree."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvkeep
from all_policies import random_scorer
from kvkeep.evaluation.contenders import Contender
from kvkeep.policies.base import Geometry
from kvkeep.policies.foresightkv import ForesightKV
from kvkeep.runtime.interval import IntervalResidency
from kvkeep.scorers import ScorerError
from kvkeep.scorers.features import FeatureSpec
from kvkeep.scorers.foresight import ForesightOptions
from tiny import HANDED, random_ids, tiny_model

EVERYTHING = FeatureSpec(extremes=True, windows=(1, 3, "L"))


class Watching(ForesightKV):
    """Keeps what it is told at every eviction."""

    def inputs(self, held):
        features = super().inputs(held)
        kept = {name: tensor.clone() for name, tensor in held.statistics.items()}  # views of slots that are overwritten
        told = replace(held, positions=held.positions.clone(), statistics=kept, keys=None, values=None)
        self.__dict__.setdefault("_told", []).append((told, features))
        return features


def watch(query, key, value, budget, spec, pieces=None, dense=False, **options):
    """Run one layer; returns the policy, whose ``_told`` has (held, features) of every eviction."""
    heads, size, group = key.shape[1], key.shape[-1], query.shape[1] // key.shape[1]
    policy = Watching(budget, scorer_of(heads, group, size, spec, budget), **options)
    geometry = Geometry(0, heads, group, size, size**-0.5)
    residency = IntervalResidency(policy, geometry, key, value, dense)
    start = 0
    for piece in [*(pieces or []), *[1] * (key.shape[2] - sum(pieces or []))]:
        residency.advance(*(tensor[:, :, start : start + piece] for tensor in (query, key, value)))
        start += piece
    return policy


def scorer_of(heads, group, size, spec, budget):
    class Config:
        num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim = 1, heads * group, heads, size
        hidden_size = heads * group * size

    return random_scorer("foresightkv", Config(), budget, features=spec)


def from_probabilities(chunks, spec, group=1):
    """Accumulators after observing attention written down by hand: chunks of (queries, ``[G, n, N]``, interval)."""
    count = chunks[-1][1].shape[-1]
    kept = {
        name: torch.full((1, 1, count, *shape), fill, dtype=torch.float64)
        for name, (shape, fill) in spec.accumulators(group).items()
    }
    held = torch.arange(count)[None, None]
    for number, (first, probabilities, interval) in enumerate(chunks):
        n = probabilities.shape[1]
        queries = torch.arange(first, first + n)[None]
        until = torch.arange(n, 0, -1)[None] if number else torch.full((1, n), 10**6)
        born = held <= first + n - 1
        told = {name: tensor[:, :, : int(born.sum())] for name, tensor in kept.items()}
        if number:
            spec.end(kept)
            spec.begin({name: tensor[:, :, :first] for name, tensor in kept.items()})
        spec.observe(
            told,
            probabilities[None, None, ..., : int(born.sum())],
            queries,
            held[..., : int(born.sum())],
            until,
            interval,
        )
    spec.end(kept)
    return kept


CHUNKS = [
    (0, torch.tensor([[[1.0, 0, 0, 0], [0.5, 0.5, 0, 0]]], dtype=torch.float64), 2),
    (2, torch.tensor([[[0.5, 0.25, 0.25, 0], [0.25, 0.25, 0.25, 0.25]]], dtype=torch.float64), 2),
]


def test_f1_features():
    """Spec 9, F1: one head, B = L = 2."""
    before = from_probabilities(CHUNKS[:1], EVERYTHING)
    assert before["cumulative"].flatten()[:2].tolist() == [1.5, 0.5]
    kept = from_probabilities(CHUNKS, EVERYTHING)
    spec = FeatureSpec(kv=False, extremes=True, windows=("L", 1), normalize="none")
    built = spec.build(torch.zeros(1, 1, 4, 1, dtype=torch.float64), None, kept, torch.arange(4)[None, None], 4, 2)
    most, least, total, last, cumulative, decayed = built[0, 0].T.tolist()
    assert most == [0.5, 0.25, 0.25, 0.25]
    assert least == [0.25, 0.25, 0.25, 0.0]
    assert total == [0.75, 0.5, 0.5, 0.25]
    assert last == [0.25, 0.25, 0.25, 0.25] != total
    assert cumulative == [2.25, 1.0, 0.5, 0.25]
    assert decayed == pytest.approx([2.10, 0.95, 0.5, 0.25])
    kept = [0, 2, 3]  # after evicting id 1
    assert [cumulative[i] for i in kept] == [2.25, 0.5, 0.25]
    assert [decayed[i] for i in kept] == pytest.approx([2.10, 0.5, 0.25])


def test_f1_means_do_not_depend_on_interval_or_length():
    kept = from_probabilities(CHUNKS, EVERYTHING)
    spec = FeatureSpec(kv=False, windows=("L", 1, 8), normalize="mean")
    kept |= {"last_8": kept["last_L"]}
    total, last, longer, cumulative, decayed = spec.build(
        torch.zeros(1, 1, 4, 1, dtype=torch.float64), None, kept, torch.arange(4)[None, None], 4, 2
    )[0, 0].T.tolist()
    assert total == longer == [0.375, 0.25, 0.25, 0.125]
    assert last == [0.25, 0.25, 0.25, 0.25]
    assert cumulative == pytest.approx([2.25 / 4, 1.0 / 3, 0.5 / 2, 0.25])
    assert decayed == pytest.approx([2.10 / (0.9 * 2 + 2), 0.95 / (0.9 + 2), 0.5 / 2, 0.25])


@pytest.mark.parametrize("group", [2, 16])
def test_f1_permuting_heads_permutes_only_the_inner_axis(group):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 40, 8, generator=generator) for heads in (group, 1, 1))
    order = torch.arange(group).flip(0)
    budget = kvkeep.Budget(sinks=0, window=4, topk=8, interval=4)
    plain, permuted = (watch(q, key, value, budget, EVERYTHING) for q in (query, query[:, order]))
    _, first = plain._told[0]
    _, other = permuted._told[0]
    statistics = [each[..., 16:].unflatten(-1, (-1, group)) for each in (first, other)]
    assert statistics[0].shape[-2] == 7
    torch.testing.assert_close(statistics[0][..., order], statistics[1])
    assert not torch.allclose(statistics[0][..., :1], statistics[0][..., 1:2])


@st.composite
def layers(draw):
    """Random queries, keys and values, a budget with an interval, and how the sequence is cut into pieces."""
    group, heads = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    interval, window, sinks = draw(st.integers(2, 6)), draw(st.integers(0, 5)), draw(st.integers(0, 2))
    topk = draw(st.integers(max(interval - window, 1), 9))
    budget = kvkeep.Budget(sinks=sinks, window=window, topk=topk, interval=interval)
    length = budget.slots + draw(st.integers(3 * interval + 1, 4 * interval + 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    tensors = (torch.randn(1, count, length, 4, generator=generator) for count in (heads * group, heads, heads))
    return (*tensors, budget, draw(st.integers(1, length)))


@given(layers())
def test_f2_running_sums_are_the_ring_and_the_teacher_forced_chunks(case):
    """Spec 9, F2: token by token, in one piece, and recomputed from a ring, after three evictions and more."""
    *tensors, budget, first = case
    runs = [
        watch(*tensors, budget, EVERYTHING, pieces, sums=sums)
        for pieces, sums in (([], "running"), ([first], "running"), ([tensors[0].shape[2]], "running"), ([], "ring"))
    ]
    assert len(runs[0]._told) >= 3
    for held_and_features in zip(*(run._told for run in runs), strict=True):
        by_position = []
        for held, features in held_and_features:
            order = held.positions.argsort(-1)
            by_position.append(
                (held.positions.gather(-1, order), features.gather(2, order[..., None].expand_as(features)))
            )
        for positions, features in by_position[1:]:
            assert torch.equal(positions, by_position[0][0])
            torch.testing.assert_close(features, by_position[0][1], rtol=0, atol=1e-6)


@given(layers())
def test_f2_sums_are_their_definition(case):
    """Against dense attention masked by what had been evicted, a query at a time."""
    query, key, value, budget, _ = case
    policy = watch(query, key, value, budget, EVERYTHING)
    heads, length = key.shape[1], key.shape[2]
    gone = torch.full((heads, length), length)
    for held, _ in policy._told:
        lost = torch.ones(heads, length, dtype=torch.bool).scatter_(1, held.positions[0].long(), False)
        lost[:, held.query_index :] = False
        last = held.query_index - budget.interval
        gone[lost & (gone == length)] = last
    token = torch.arange(length)
    for head in range(heads):
        group = query.shape[1] // heads
        logits = query[0, head * group : (head + 1) * group] @ key[0, head].T * 4**-0.5
        seen = (token <= token[:, None]) & (token[:, None] < gone[head])
        attention = logits.double().masked_fill(~seen, -torch.inf).softmax(-1)  # [G, S, S]
        for held, _ in policy._told:
            q, at = held.query_index, held.positions[0, head].long()
            for name, width in (("last_1", 1), ("last_3", min(3, budget.interval)), ("last_L", budget.interval)):
                told = attention[:, q - width : q].sum(1)[:, at].T
                torch.testing.assert_close(held.statistics[name][0, head].double(), told, rtol=0, atol=1e-5)
            torch.testing.assert_close(
                held.statistics["cumulative"][0, head].double(), attention[:, :q].sum(1)[:, at].T, rtol=0, atol=1e-5
            )
            interval = ((token - budget.rest).div(budget.interval, rounding_mode="floor") + 1).clamp(min=0)
            fade = 0.9 ** (interval[q - 1] - interval[:q]).double()
            told = (attention[:, :q] * fade[:, None]).sum(1)[:, at].T
            torch.testing.assert_close(held.statistics["decayed"][0, head].double(), told, rtol=0, atol=1e-5)
            watched = (seen[:q] * fade[:, None]).sum(0)[at]
            torch.testing.assert_close(held.statistics["watched"][0, head].double(), watched, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sums", ["running", "ring"])
def test_a_prompt_pruned_once_is_judged_by_its_own_last_queries(sums):
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, heads, 41, 4, generator=generator) for heads in (4, 2, 2))
    budget = kvkeep.Budget(sinks=0, window=4, topk=6, interval=4)
    policy = watch(query, key, value, budget, EVERYTHING, [35], dense=True, sums=sums)
    held, features = policy._told[0]
    assert (held.query_index, held.count, held.positions.shape[-1]) == (35, 25, 35)
    logits = (query[0, :2, :35] @ key[0, 0, :35].T * 0.5).masked_fill(~torch.ones(35, 35).tril().bool(), -torch.inf)
    last = logits.softmax(-1)[:, 34:].sum(1).T  # [N, G]
    order = held.positions[0, 0].argsort()
    torch.testing.assert_close(features[0, 0, order, 12:14], last, rtol=0, atol=1e-6)
    assert [told[0].query_index for told in policy._told] == [35, 38], "then the schedule of every 4 from 10 on goes on"


def test_one_shot_sums_start_again_after_it():
    generator = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(1, heads, 41, 4, generator=generator) for heads in (4, 2, 2))
    budget = kvkeep.Budget(sinks=0, window=4, topk=6, interval=4)
    for prompt in (34, 35):  # on a boundary, and off one
        running, ring = (
            watch(query, key, value, budget, FeatureSpec(windows=(1, 3)), [prompt], dense=True, sums=sums)
            for sums in ("running", "ring")
        )
        for (held, told), (_, again) in zip(running._told, ring._told, strict=True):
            torch.testing.assert_close(told, again, rtol=0, atol=1e-6, msg=lambda m, h=held: f"{h.query_index}: {m}")


# ---- the spec and the checkpoint


def test_widths_and_presets():
    assert FeatureSpec.paper().width(128, 4) == 2 * 128 + 6 * 4 == 280
    assert FeatureSpec.released().width(128, 4) == 2 * 128 + 8 * 4 == 288
    assert FeatureSpec.released().width(128, 2) == 272
    assert FeatureSpec.released().width(128, 7) == 312
    assert [FeatureSpec.paper().width(128, group) for group in (3, 7)] == [274, 298]
    assert FeatureSpec.best().width(64, 3) == 2 * 64 + 6 * 3 + 1
    assert FeatureSpec.from_json(FeatureSpec.best().to_json()) == FeatureSpec.best()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"version": 2}, "features of version 2 are wanted, this version of kvkeep has 1"),
        ({"windows": (0,)}, "windows are numbers of queries from 1 on"),
        ({"windows": ("M",)}, "windows are numbers of queries from 1 on"),
        ({"decay": 1.5}, r"in \(0, 1\], or None, not 1.5"),
        ({"normalize": "max"}, "normalize is one of mean, log, none"),
        ({"keys": "raw"}, "keys post or pre"),
        ({"kv": False, "windows": (), "cumulative": False, "decay": None}, "needs a feature"),
        ({"colour": 1}, "features have no colour"),
    ],
)
def test_bad_features_are_refused(changed, sentence):
    with pytest.raises(ScorerError, match=sentence):
        FeatureSpec.from_json(FeatureSpec().to_json() | changed)


def test_c1_checkpoint(tmp_path):
    """Spec 9, C1: bit-exact, small, without the backbone, and nothing but its own features."""
    model = tiny_model()
    budget = kvkeep.Budget(sinks=0, window=5, topk=8, interval=4)
    scorer = random_scorer("foresightkv", model.config, budget, hidden=7, features=FeatureSpec.best())
    scorer.save_pretrained(tmp_path, base_model="tiny")
    again = kvkeep.load_scorer(tmp_path)
    assert again.fingerprint() == scorer.fingerprint()
    assert (again.options, again.budgets) == (scorer.options, scorer.budgets)
    assert again.layer(0).features == FeatureSpec.best()
    for name, tensor in scorer.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 10 * 2**20
    assert set(scorer.state_dict()) == set(again.state_dict())
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"normalize": "log"', '"normalize": "log10"'))
    with pytest.raises(ScorerError, match="normalize is one of mean, log, none"):
        kvkeep.load_scorer(tmp_path)
    config.write_text(config.read_text().replace('"log10"', '"log"').replace('"age": true', '"age": false'))
    with pytest.raises(ScorerError, match="has shape"):
        kvkeep.load_scorer(tmp_path)


def test_a_checkpoint_from_before_there_were_powers_has_none(tmp_path):
    scorer = random_scorer("foresightkv", tiny_model().config, [kvkeep.Budget(0, 4, 8, 4)])
    scorer.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    record = json.loads(config.read_text())
    for power in ("value_power", "age_power"):
        del record["options"][power]
    config.write_text(json.dumps(record))
    assert kvkeep.load_scorer(tmp_path).fingerprint() == scorer.fingerprint()


@given(st.sampled_from([1, 3]), st.sampled_from([FeatureSpec.best(), FeatureSpec(age=True, extremes=True, windows=())]))
def test_a_keep_score_weighs_the_value_and_the_age(group, spec):
    """keep = foreseen + p log |v| - c log(1 + age), of the value and age that the features were built from."""
    heads, size, count, query = 2, 8, 5, 40
    generator = torch.Generator().manual_seed(group)
    keys, values = torch.randn(2, 1, heads, count, size, generator=generator)
    positions = torch.randint(0, query, (1, heads, count), generator=generator)
    kept = {
        name: torch.rand(1, heads, count, *shape, generator=generator)
        for name, (shape, _) in spec.accumulators(group).items()
    }
    features = spec.build(keys, values, kept, positions, query, 8)
    options = {"hidden": 4, "features": spec, "window": 8, "value_power": 0.5, "age_power": 0.25}
    config = tiny_model(group=group, kv_heads=heads).config
    layer = kvkeep.scorers.new("foresightkv", config, [24], **options).layer(0)
    expected = 0.5 * values.norm(dim=-1).log() - 0.25 * (1.0 + query - positions).log()
    torch.testing.assert_close(layer.keep(features) - layer.foreseen(features), expected)


@pytest.mark.parametrize(("power", "missing"), [("value_power", {"kv": False}), ("age_power", {"age": False})])
def test_a_power_of_what_is_not_read_is_refused(power, missing):
    with pytest.raises(ScorerError, match=f"{power} 0.5 needs"):
        ForesightOptions(features=FeatureSpec(**{"age": True} | missing), **{power: 0.5})


def test_c1_another_geometry_is_refused():
    scorer = random_scorer("foresightkv", tiny_model().config, kvkeep.Budget(sinks=0, window=5, topk=8, interval=4))
    with pytest.raises(ScorerError, match="KV heads"):
        scorer.require_fits(tiny_model(group=2, kv_heads=1).config)


def test_options_travel_as_json():
    options = ForesightOptions(hidden=3, features=FeatureSpec.released())
    assert ForesightOptions(**asdict(options)) == options


def test_slots_are_split_as_the_policy_does():
    for slots in (128, 256, 50):
        assert kvkeep.scorers.new("foresightkv", tiny_model().config, slots).budgets == (
            kvkeep.policies.budget("foresightkv", slots),
        )
    with pytest.raises(ScorerError, match="a budget of 2 slots must be above window 1"):
        kvkeep.scorers.new("foresightkv", tiny_model().config, 2)


def test_a_budget_that_a_scorer_was_trained_for_has_the_interval_of_then():
    config = tiny_model().config
    scorer = random_scorer("foresightkv", config, [kvkeep.Budget(0, 3, 32, 5), kvkeep.Budget(0, 3, 61, 3)], window=3)
    create = kvkeep.policies.create
    assert create("foresightkv", 40, scorer=scorer).budget == kvkeep.Budget(0, 3, 32, 5)
    assert create("foresightkv", 67, scorer=scorer).budget.interval == 3
    assert create("foresightkv", 80, scorer=scorer).budget == kvkeep.Budget(0, 3, 57, 20), "a quarter, for others"
    at_rest = Contender("foresightkv", at_rest=True, scorer=scorer)
    assert at_rest.policy(64).budget == kvkeep.Budget(0, 3, 61, 3)
    given = Contender("foresightkv", overrides={"interval": 9}, scorer=scorer)
    assert given.policy(40).budget == kvkeep.Budget(0, 3, 28, 9)


@pytest.mark.skipif(not HANDED, reason="a cache of an attention policy needs a transformers that hands keywords down")
def test_side_state_is_in_the_bytes():
    """What the sums cost is stated: (windows + 2) G + 1 numbers a slot, or a ring of L queries."""
    model, budget = tiny_model(), kvkeep.Budget(sinks=0, window=5, topk=8, interval=4)
    scorer = random_scorer("foresightkv", model.config, budget)
    sizes = {}
    for sums in ("running", "ring"):
        cache = kvkeep.EvictingCache(
            model.config, kvkeep.policies.create("foresightkv", budget, scorer=scorer, sums=sums)
        )
        with torch.no_grad():
            model(random_ids(30), past_key_values=cache)
        sizes[sums] = cache.nbytes
    config = model.config
    layers, heads, size = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    group, wide = config.num_attention_heads // heads, 8
    slots = layers * heads * budget.slots
    pairs = slots * (2 * size * wide + 4)
    assert sizes["running"] == pairs + slots * (6 * group + 1) * wide
    assert sizes["ring"] == pairs + slots * (2 * group + 1) * wide + layers * heads * group * 4 * size * wide

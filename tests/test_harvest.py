"""What a frozen backbone says of a document, on disk: pairs, targets, ages, resumption, refusals; the decay picked."""

from types import SimpleNamespace

import pytest
import torch

import kvkeep
from all_policies import random_scorer
from kvkeep.attention_mass import future_attention
from kvkeep.sparse_attention import live_attention, live_lse
from kvkeep.training import decay
from kvkeep.training.harvest import harvest
from kvkeep.training.teacher import predictions
from reference import masked_forward
from test_training import BUDGETS, texts
from tiny import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


@pytest.mark.parametrize("source", ["dense", "sparse"])
def test_shards_hold_the_layers_pairs_and_targets(model, tmp_path, source):
    policy = kvkeep.policies.create("random", BUDGETS[0])
    (_, ids), *_ = documents = texts(1)
    under = policy if source == "sparse" else None
    (shard,) = harvest(
        model, documents, 4, tmp_path, target_source=source, under=under, group="log_mean", storage="float32"
    )
    lifetimes = kvkeep.replay(model, ids[None], policy).evicted_at if under else [None, None]
    _, seen = masked_forward(model, ids[None], lifetimes)
    for layer, (query, key, value, _) in seen.items():
        keys, values, target = shard.layer(layer)
        assert (keys - key).abs().max() <= 1e-4
        assert (values - value).abs().max() <= 1e-4
        lse = None
        if under:
            logits = query @ key.repeat_interleave(3, 1).transpose(-1, -2) * 8**-0.5
            mask = kvkeep.lifetimes.visible(lifetimes[layer]).repeat_interleave(3, 1)
            lse = logits.masked_fill(~mask, -torch.inf).logsumexp(-1)
        assert (target - future_attention(query, key, 4, group="log_mean", lse=lse)).abs().max() <= 1e-3


def test_live_lse_is_the_normaliser_of_live_attention():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, h, 300, 8, generator=generator, dtype=torch.float64) for h in (6, 2))
    evicted_at = torch.randint(1, 330, (2, 2, 300), generator=generator).clamp(max=300).int()
    evicted_at = torch.maximum(evicted_at, torch.arange(300) + 1).int()
    lse = live_lse(query, key, evicted_at, 0.3)
    logits = (query @ key.repeat_interleave(3, 1).transpose(-1, -2)) * 0.3
    mask = kvkeep.lifetimes.visible(evicted_at).repeat_interleave(3, 1)
    assert (lse - logits.masked_fill(~mask, -torch.inf).logsumexp(-1)).abs().max() <= 1e-10
    ones = live_attention(query, key, torch.ones(2, 2, 300, 1, dtype=torch.float64), evicted_at, 0.3)
    assert (ones - 1).abs().max() <= 1e-12


def test_shards_are_read_once_and_never_half_written(model, tmp_path):
    first = harvest(model, texts(3), 4, tmp_path)
    stamps = [shard.path.stat().st_mtime_ns for shard in first]
    again = harvest(model, texts(4), 4, tmp_path)
    assert [shard.path.stat().st_mtime_ns for shard in again[:3]] == stamps
    assert len(list(tmp_path.iterdir())) == 4
    other = harvest(model, texts(1), 5, tmp_path)
    assert other[0].path != first[0].path, "a shard of another window was taken for this one"


def damage(path, how):
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "header": whole[:20], "tensors": whole[:-5], "other": b"x" * len(whole)}[how])
    return whole


@pytest.mark.parametrize("how", ["empty", "header", "tensors", "other"])
def test_a_damaged_shard_is_read_again(model, tmp_path, how):
    first = harvest(model, texts(2), 4, tmp_path, ages=True)
    whole, other = damage(first[0].path, how), first[1].path.stat().st_mtime_ns
    again = harvest(model, texts(2), 4, tmp_path, ages=True)
    assert [shard.path for shard in again] == [shard.path for shard in first]
    assert again[0].path.read_bytes() == whole
    assert again[1].path.stat().st_mtime_ns == other
    damage(first[0].path, how)
    plain = harvest(model, texts(1), 4, tmp_path)[0]
    assert torch.isfinite(plain.layer(0)[0]).all(), "a damaged shard with ages serves nobody"


@pytest.mark.parametrize("how", ["empty", "tensors"])
def test_damaged_predictions_of_a_teacher_are_read_again(model, tmp_path, how):
    given = [ids for _, ids in texts(2)]
    first = predictions(model, given, tmp_path, top=8)
    whole, other = damage(first[0].path, how), first[1].path.stat().st_mtime_ns
    assert predictions(model, given, tmp_path, top=8) == first
    assert first[0].path.read_bytes() == whole
    assert first[1].path.stat().st_mtime_ns == other
    assert first[0].load().ids.shape == (1, 70, 8)


def test_shards_with_ages_serve_those_who_need_none(model, tmp_path):
    with_ages = harvest(model, texts(2), 4, tmp_path / "both", ages=True)
    assert harvest(model, texts(2), 4, tmp_path / "both") == with_ages
    without = harvest(model, texts(2), 4, tmp_path / "plain")
    assert harvest(model, texts(2), 4, tmp_path / "plain", ages=True) != without, "ages cannot be had from nothing"
    assert torch.equal(without[0].layer(1)[2], with_ages[0].layer(1)[2])


def test_storage_that_overflows_is_refused(model, tmp_path):
    loud = tiny_model(dtype=torch.float32)
    loud.model.layers[0].self_attn.v_proj.weight *= 1e6
    with pytest.raises(ValueError, match=r"values of layer 0 do not fit torch.float16: store them as float32"):
        harvest(loud, texts(1), 4, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_shards_give_some_tokens_as_they_give_all(model, tmp_path):
    (shard,) = harvest(model, texts(1), 4, tmp_path, ages=True)
    tokens = torch.tensor([5, 3, 69, 12])
    for some, every in zip(shard.layer(1, tokens), shard.layer(1), strict=True):
        assert torch.equal(some, every[:, :, tokens])
    mass, first, last = shard.received(0, 4, tokens)
    assert mass.shape == (1, 2, 4, 3)
    assert last[2].tolist() == first[2].tolist()
    assert shard.length == 70


@pytest.mark.parametrize(
    ("fitted", "grid", "taken"),
    [(True, decay.FACTORS, 1.0), (True, (3.0, 0.5, 2.0), 0.5), (False, (0.3, 0.0, 0.1), 0.0), (False, (0.3, 0.1), 0.1)],
)
def test_of_decays_that_lose_the_same_the_one_that_changes_least_is_taken(model, monkeypatch, fitted, grid, taken):
    scorer = random_scorer("kvpop_mlp", model.config, BUDGETS, log_gamma=-0.1)
    same = SimpleNamespace(token_loss=torch.ones(1, 69))
    monkeypatch.setattr(decay, "replay", lambda model, ids, policy: same)
    ratios = decay.calibrate_decay(model, scorer, texts(2), grid, fitted)
    assert {ratio for found in ratios.values() for ratio in found.values()} == {1.0}
    assert scorer.decay_factors == {16: taken, 26: taken}

"""What tuning is made of: logits by blocks, layers computed again, the teacher's predictions, rows, what is logged."""

from __future__ import annotations

import pytest
import torch

import kvkeep
from kvkeep.lifetimes import visible
from kvkeep.policies.full import Full
from kvkeep.runtime import replay
from kvkeep.runtime.replay import HEAD_BLOCK, by_blocks, hidden_states, kvkeep_attention
from kvkeep.training.rows import pack_rows
from kvkeep.training.score_loss import keep_rate
from kvkeep.training.student import checkpointed_layers
from kvkeep.training.teacher import predictions
from test_training import Text, texts
from test_tune import BUDGETS, gradients, scorer_for, tuning
from tiny import left_pad, random_ids, tiny_model


@pytest.fixture
def model():
    return tiny_model(dtype=torch.float32)


# ---------------------------------------------------------------------------------------------------------------------
# Replay, block by block


@pytest.mark.parametrize("length", [60, 2 * HEAD_BLOCK + 7])
def test_blocks_of_logits_are_those_of_replay(length):
    model = tiny_model()
    model.config.max_position_embeddings = 1024
    ids, policy = random_ids(length, batch=2), kvkeep.policies.create("random", BUDGETS[0])
    whole = kvkeep.replay(model, ids, policy, return_logits=True)
    hidden, lifetimes = hidden_states(model, ids, policy)
    starts = by_blocks(model, hidden, lambda logits, start: start)
    assert starts == list(range(0, length, HEAD_BLOCK))
    logits = torch.cat(by_blocks(model, hidden, lambda logits, start: logits), 1)
    assert torch.equal(logits, whole.logits)
    assert all(torch.equal(a, b) for a, b in zip(lifetimes, whole.evicted_at, strict=True))


def test_recomputed_blocks_give_the_gradients_of_all_logits_at_once():
    model = tiny_model().requires_grad_(True)
    ids, policy = random_ids(HEAD_BLOCK + 9), kvkeep.policies.create("random", BUDGETS[0])
    whole = kvkeep.replay(model, ids, policy, return_logits=True, gradients=True)
    whole.logits.square().sum().backward()
    expected = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    hidden, _ = hidden_states(model, ids, policy, gradients=True)
    assert hidden.requires_grad
    sum(by_blocks(model, hidden, lambda logits, start: logits.square().sum())).backward()
    for weight, grad in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(weight.grad, grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("method", ["full", "streaming", "kvpop"])
def test_checkpointed_layers_give_the_same_gradients_under_the_same_lifetimes(family, method):
    """Also with left padding. The scorer is changed between forward and backward: it must not be asked again."""
    model = tiny_model(family).requires_grad_(True)
    ids, mask = left_pad([random_ids(70)[0], random_ids(51, seed=1)[0]])
    scorer = scorer_for(model, "kvpop") if method == "kvpop" else None
    policy = kvkeep.policies.create(method, None if method == "full" else BUDGETS[0], scorer=scorer)
    results, seen = [], []
    for enabled in (False, True):
        model.zero_grad()
        count = len(seen)
        with kvkeep_attention(model), checkpointed_layers(model, enabled):
            hidden, lifetimes = hidden_states(
                model, ids, policy, mask, gradients=True, observe=lambda geometry, *rest: seen.append(geometry.layer)
            )
            observed = len(seen) - count
            if scorer is not None and enabled:
                with torch.no_grad():
                    for weight in scorer.parameters():
                        weight.neg_()
            (hidden * mask[..., None]).square().sum().backward()
        assert len(seen) - count == observed, "a recomputed layer was observed again"
        grads = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
        results.append((hidden.detach(), lifetimes, grads))
    (hidden, lifetimes, grads), (again, same, regained) = results
    assert torch.equal(hidden, again)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(lifetimes, same, strict=True))
    assert max(float((a - b).abs().max()) for a, b in zip(grads, regained, strict=True)) == 0.0
    assert not any(vars(layer).get("gradient_checkpointing") for layer in model.modules())


def test_backward_through_checkpointed_layers_recomputes_them(model, monkeypatch):
    """Without this the test above could pass on a model that never checkpoints anything."""
    count = []
    original = replay._Session._attend_again
    monkeypatch.setattr(
        replay._Session, "_attend_again", lambda self, *rest: count.append(rest[0]) or original(self, *rest)
    )
    model.requires_grad_(True)
    with kvkeep_attention(model), checkpointed_layers(model):
        hidden, _ = hidden_states(model, random_ids(40), kvkeep.policies.create("full"), gradients=True)
        hidden.sum().backward()
    assert sorted(count) == [0, 1]


def test_model_whose_layers_cannot_be_checkpointed_is_refused():
    with (
        pytest.raises(ValueError, match="has no layers that transformers can checkpoint"),
        checkpointed_layers(torch.nn.Linear(2, 2)),
    ):
        pass


# ---------------------------------------------------------------------------------------------------------------------
# The teacher, rows, and what is logged of them


def test_teacher_is_read_once_and_never_half_written(model, tmp_path):
    pieces = [ids for _, ids in texts(3)]
    first = predictions(model, pieces, tmp_path, top=9)
    stamps = [shard.path.stat().st_mtime_ns for shard in first]
    again = predictions(model, pieces, tmp_path, top=9)
    assert [shard.path.stat().st_mtime_ns for shard in again] == stamps
    assert len(list(tmp_path.iterdir())) == 3
    assert predictions(model, pieces[:1], tmp_path, top=8)[0].path != first[0].path
    top = first[0].load()
    logits = kvkeep.replay(model, pieces[0][None], Full(), return_logits=True).logits
    assert torch.equal(top.ids.long(), logits.topk(9).indices)
    assert torch.equal(top.log_probs, kvkeep.training.losses.top_logits(logits, 9).log_probs)


def test_rows_cut_concatenate_or_reset():
    documents = [(Text("a"), torch.arange(5)), (Text("b"), torch.arange(10, 17)), (Text("c"), torch.arange(20, 22))]

    def pieces(packing, length):
        return [[piece.tolist() for piece in row.pieces] for row in pack_rows(documents, packing, length)]

    assert pieces("cut", None) == [[list(range(5))], [list(range(10, 17))], [[20, 21]]]
    assert pieces("cut", 6) == [[list(range(5))], [list(range(10, 16))], [[20, 21]]]
    assert pieces("concat", 6) == [[[0, 1, 2, 3, 4, 10]], [[11, 12, 13, 14, 15, 16]]]
    assert pieces("reset", 6) == [[[0, 1, 2, 3, 4]], [[11, 12, 13, 14, 15, 16]]]
    assert pieces("reset", 7) == [[[0, 1, 2, 3, 4], [10, 11]], [[12, 13, 14, 15, 16], [20, 21]]]
    assert [row.name for row in pack_rows(documents, "concat", 7)] == ["a", "b"]


def test_reset_row_has_the_gradients_of_its_pieces_weighted_by_length(tmp_path):
    model = tiny_model()
    (row,) = pack_rows(texts(2, length=40), "reset", 80)
    assert [piece.numel() for piece in row.pieces] == [40, 40]
    run = tuning(model, tmp_path, "kvpop", rows=[row, row])
    run.gradients(run.train[0], run.plan[0])
    whole = gradients(run.student)
    model.zero_grad()
    kl = sum(run.divergence(*pair, run.plan[0])[0] / 80 for pair in run.train[0])
    kl.backward()
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(whole, gradients(run.student), strict=True))
    (joined,) = pack_rows(texts(2, length=40), "concat", 80)
    other = tuning(model, tmp_path, "kvpop", rows=[joined, joined])
    assert other.gradients(other.train[0], other.plan[0])["kl"] != pytest.approx(float(kl.detach()), rel=1e-3)


def test_keep_rate_is_the_share_of_newcomers_that_stay():
    budget = kvkeep.Budget(1, 2, 3)
    priority = torch.randn(2, 3, 30, generator=torch.Generator().manual_seed(0))
    evicted_at = kvkeep.lifetimes.running_topk(priority, budget)
    seen = visible(evicted_at)
    expected = torch.stack([seen[..., query, query - 2] for query in range(6, 30)]).float().mean(0).flatten()
    assert torch.allclose(keep_rate(evicted_at, budget), expected)
    assert 0 < float(expected.min()) < float(expected.max()) < 1
    assert keep_rate(evicted_at[..., :6], budget) is None

"""ForesightKV's second stage: what is recorded, what is learned from it, that it repeats, and that rewards rise."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

import kvkeep
from all_policies import random_scorer
from kvkeep.policies.foresightkv import ForesightKV
from kvkeep.training import losses, rollout
from kvkeep.training.loop import Loop
from kvkeep.training.reinforce import Reinforce, Schedule, evict_logits, level
from kvkeep.training.rollout import roll_out, seed_of
from test_training import texts
from tiny import HANDED, random_ids, tiny_model

BUDGET = kvkeep.Budget(sinks=0, window=4, topk=8, interval=4)
SINKS = kvkeep.Budget(sinks=2, window=3, topk=9, interval=3)
QUICK = {"batch": 2, "group": 3, "warmup": 1, "variant": "all", "lr": 1e-2, "evaluate_every": 100, "save_every": 100}


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


@pytest.fixture(scope="module")
def exact():
    return tiny_model()


def scorer_for(model, budget=BUDGET, **options):
    return random_scorer("foresightkv", model.config, budget, **{"hidden": 5} | options)


def reinforce(model, folder, documents=None, held_out=(), resume=False, scorer=None, progress=None, **changes):
    documents = texts(3, 40) if documents is None else documents
    scorer = scorer_for(model) if scorer is None else scorer
    schedule = Schedule(**QUICK | {"steps": 2} | changes)
    return Reinforce(model, scorer, documents, held_out, schedule, folder, resume=resume, progress=progress)


def log_of(folder):
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in lines]


def group_of(model, scorer=None, length=40, budget=BUDGET, members=3, **options):
    """Trajectories along one text, and the scorer that drew them."""
    scorer = scorer_for(model, budget) if scorer is None else scorer
    return roll_out(model, scorer, random_ids(length)[0], budget, list(range(members)), **options), scorer


# ---- what is learned from it


def test_ordered_draws_of_a_pool_share_a_probability_of_one(exact):
    group, scorer = group_of(exact, budget=kvkeep.Budget(sinks=0, window=2, topk=6, interval=2))
    features = group.decisions[0].features  # C = 4
    logits = evict_logits(scorer, 0, features)
    total = sum(
        Schedule(ratio="decision").log_probability(logits, torch.tensor(order).expand(*logits.shape[:-1], 2)).exp()
        for order in itertools.permutations(range(4), 2)
    )
    torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.parametrize("ratio", ["decision_mean", "decision", "draw"])
def test_on_policy_the_ratio_is_one_and_the_gradient_that_of_reinforce(exact, tmp_path, ratio):
    """Spec 9, O1: new == old gives -A + beta KL, and the gradient of -A log pi."""
    fit = reinforce(exact, tmp_path, ratio=ratio, beta=0.5)
    group, _ = group_of(exact, fit.scorer)
    with torch.no_grad():
        fit.reference.layer(0).w2.mul_(1.3)  # somebody to stay near
    advantage = torch.tensor([1.0, -1.5, 0.7]).double()
    loss, new, seen = fit.objective(0, group.decisions[0], advantage)
    scorer, order = fit.scorer, group.decisions[0].order
    logits = evict_logits(scorer, 0, group.decisions[0].features)
    reference = evict_logits(fit.reference, 0, group.decisions[0].features).detach()
    per_draw = losses.plackett_luce(logits, order, per_draw=True)
    kl = losses.plackett_luce_kl(logits, reference, order)
    over = {"decision_mean": lambda draws: draws.mean(-1), "decision": lambda draws: draws.sum(-1)}.get(ratio)
    per_draw, kl = (per_draw, kl) if over is None else (over(per_draw), over(kl))
    assert torch.equal(new, per_draw)
    assert seen["clipped"] == 0
    assert loss.item() == pytest.approx(float((-advantage.mean() + 0.5 * kl.mean()).detach()), rel=1e-12)
    each = advantage.view(-1, *[1] * (per_draw.dim() - 1))
    wanted = torch.autograd.grad(-(each * per_draw).mean() + 0.5 * kl.mean(), scorer.layer(0).w1)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, scorer.layer(0).w1)[0], wanted)


OBJECTIVES = [
    {},
    {"ratio": "draw"},
    {"ratio": "decision", "kl": "k3"},
    {"logprob": "independent", "kl": "k3", "ratio": "draw"},
]


@pytest.mark.parametrize("options", OBJECTIVES, ids=str)
def test_finite_differences_agree_with_the_gradient_of_the_objective(exact, tmp_path, options):
    """Through the scorer, in float64, off policy: some ratios are clipped."""
    fit = reinforce(exact, tmp_path, beta=0.3, scorer=scorer_for(exact).double(), **options)
    listed = "candidates" if "logprob" in options else "pool"
    decisions = group_of(exact, fit.scorer, listed=listed)[0].decisions[0]
    advantage = torch.tensor([1.0, -1.5, 0.7]).double()
    _, old, _ = fit.objective(0, decisions, advantage)
    layer, generator = fit.scorer.layer(0), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    loss, _, seen = fit.objective(0, decisions, advantage, old)
    assert 0 < seen["clipped"] < 1
    assert seen["kl"] > 0
    learns = [layer.w1, layer.b1, layer.w2]
    gradients = torch.autograd.grad(loss, learns)
    for weight, gradient in zip(learns, gradients, strict=True):
        direction, step = torch.randn(weight.shape, generator=generator, dtype=torch.float64), 1e-6
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                weight.add_(sign * step * direction)
            values.append(fit.objective(0, decisions, advantage, old)[0].item())
            with torch.no_grad():
                weight.sub_(sign * step * direction)
        slope = (values[0] - values[1]) / (2 * step)
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-4, abs=1e-8)


def test_a_number_added_to_all_scores_is_not_learned(model, tmp_path):
    """Its gradient is rounding, of which Adam makes steps as large as any other."""
    fit = reinforce(model, tmp_path)
    before = fit.scorer.layer(0).b2.clone()
    fit.advance()
    assert torch.equal(fit.scorer.layer(0).b2, before)


def test_only_the_scorer_learns(model, tmp_path):
    frozen = {name: weight.clone() for name, weight in model.named_parameters()}
    scorer = scorer_for(model)
    start = scorer.fingerprint()
    fit = reinforce(model, tmp_path, scorer=scorer)
    fit.advance()
    assert scorer.fingerprint() != start == fit.reference.fingerprint()
    assert all(weight.grad is None and torch.equal(weight, frozen[name]) for name, weight in model.named_parameters())
    assert all(weight.grad is None for weight in fit.reference.parameters())
    assert {"w1", "b1", "w2"} <= {name for name, weight in scorer.layer(1).named_parameters() if weight.grad.any()}
    assert model.config._attn_implementation == "kvkeep"


def test_the_language_model_runs_once_a_group(model, tmp_path, monkeypatch):
    rows = []

    def counted(model, input_ids, policy, **options):
        rows.append((policy.name, len(input_ids)))
        return kvkeep.replay(model, input_ids, policy, **options)

    monkeypatch.setattr(rollout, "replay", counted)
    reinforce(model, tmp_path, documents=texts(2, 40), steps=3).advance()
    assert rows.count(("full", 1)) == 2
    assert rows.count(("foresightkv", 3)) == len(rows) - 2 == 6


def test_several_updates_of_a_batch_are_measured_from_the_scorer_that_drew_it(model, tmp_path, monkeypatch):
    calls = []

    def watched(self, layer, decisions, advantage, old=None):
        found = objective(self, layer, decisions, advantage, old)
        calls.append((layer, old, found[1]))
        return found

    objective = Reinforce.objective
    monkeypatch.setattr(Reinforce, "objective", watched)
    reinforce(model, tmp_path, steps=1, batch=1, epochs=3, lr=0.3, warmup=0).advance()
    first, *others = [calls[i : i + 2] for i in (0, 2, 4)]
    assert len(calls) == 6
    for (layer, old, new), *later in zip(first, *others, strict=True):
        assert old is None
        for its_layer, its_old, its_new in later:
            assert its_layer == layer
            assert torch.equal(its_old, new)
            assert not torch.equal(its_new, new)
    (line,) = log_of(tmp_path)
    assert line["updates"] == 3
    assert line["clipped"] > 0


def test_the_weight_of_the_kl_follows_its_schedule(model, tmp_path):
    fit = reinforce(model, tmp_path, steps=3, beta=0.2, beta_schedule=1)
    fit.advance()
    assert [line["beta"] for line in log_of(tmp_path)] == [0.2, 0.0, 0.0]
    assert [line["kl"] > 0 for line in log_of(tmp_path)] == [False, True, True]
    assert Schedule().beta_at(10**6) == 0.01


# ---- groups without anything to say


def test_a_group_of_equal_rewards_is_left_out_and_counted(model, tmp_path):
    scorer = scorer_for(model)
    start = scorer.fingerprint()
    fit = reinforce(model, tmp_path, scorer=scorer, variant="spike", eta=1e6)
    fit.advance()
    assert scorer.fingerprint() == start
    assert not fit.optimizer.state
    for line in log_of(tmp_path):
        assert (line["groups"], line["skipped"], line["updates"]) == (2, 2, 0)
        assert (line["reward"], line["spread"]) == (0, 0)
        assert line["loss"] is line["kl"] is line["gradient_norm"] is None


def test_the_gradient_is_the_mean_over_the_groups_that_are_left(exact, tmp_path, monkeypatch):
    gradients, groups = [], Reinforce.groups

    def descend(self):
        gradients.append([weight.grad.clone() for weight in self.optimizer.param_groups[0]["params"]])
        return {"gradient_norm": 0.0}

    monkeypatch.setattr(Loop, "descend", descend)
    for first, last in ((0, 1), (1, 2), (0, 2)):

        def some(self, placed, tally, first=first, last=last):
            yield from itertools.islice(groups(self, placed, tally), first, last)

        monkeypatch.setattr(Reinforce, "groups", some)
        reinforce(exact, tmp_path / f"{first}-{last}", steps=1, batch=2).advance()
    for one, other, both in zip(*gradients, strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(both, (one + other) / 2, rtol=1e-5, atol=1e-8)


def test_decisions_are_gone_before_the_next_group_is_drawn(exact, tmp_path):
    fit = reinforce(exact, tmp_path)
    tally = dict.fromkeys(("groups", "rewarded", "skipped", "reward", "spread", "tokens"), 0.0)
    groups = fit.groups(list(enumerate(fit.train)), tally)
    first = next(groups)
    assert first.trajectories.decisions
    next(groups)
    assert not first.trajectories.decisions


def test_rounding_is_no_difference():
    assert level(torch.tensor([-3.0, -3.000001]))
    assert level(torch.zeros(4))
    assert not level(torch.tensor([-3.0, -3.001]))


# ---- it repeats


@pytest.mark.parametrize("options", [{}, {"epochs": 2, "decisions": 2}, {"rollout": "generate"}], ids=str)
def test_resumed_run_is_the_uninterrupted_one(model, tmp_path, options):
    options |= {"steps": 4, "save_every": 2, "evaluate_every": 2, "held_out": texts(4, 40)[3:]}
    if "rollout" in options and not HANDED:
        options.pop("rollout")

    class Killed(Exception):
        pass

    straight = reinforce(model, tmp_path / "straight", **options)
    metrics = straight.run()
    for at in (1, 3, 4, None):

        def progress(stage, done, total, at=at):
            if done == at:
                raise Killed

        resumed = reinforce(model, tmp_path / "resumed", resume=True, progress=progress, **options)
        try:
            assert resumed.run() == metrics
        except Killed:
            assert at is not None
    assert resumed.scorer.fingerprint() == straight.scorer.fingerprint()
    assert log_of(tmp_path / "resumed") == log_of(tmp_path / "straight")
    assert len(log_of(tmp_path / "resumed")) == 4


def test_seeds_come_from_run_step_trace_and_member():
    parts = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, "text")]
    assert len({seed_of(*each) for each in parts}) == len(parts)
    assert seed_of(3, "x") == seed_of(3, "x")
    assert abs(seed_of(0)) < 2**63


def test_every_step_and_place_draws_anew(exact, tmp_path):
    fit = reinforce(exact, tmp_path, epochs=2)  # which keeps what was drawn
    tally = dict.fromkeys(("groups", "rewarded", "skipped", "reward", "spread", "tokens"), 0.0)
    drawn = []
    for step, place in ((0, 0), (0, 1), (1, 0), (0, 0)):
        fit.step = step
        (group,) = fit.groups([(place, fit.train[0])], tally)
        drawn.append(group.trajectories.decisions[0].order)
    assert torch.equal(drawn[0], drawn[3])
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(drawn[:3], 2))


def test_an_early_stop_watches_the_reward(model, tmp_path):
    fit = reinforce(model, tmp_path, steps=50, patience=2, evaluate_every=1, lr=1e-12, held_out=texts(4, 40)[3:])
    fit.advance()
    assert fit.step == 3
    assert fit.goal({"reward": -1.0, "loss_ratio": 1.0}) > fit.goal({"reward": -0.5, "loss_ratio": 2.0})


def test_measured_rewards_depend_on_trace_and_seeds_only(exact, tmp_path):
    fit = reinforce(exact, tmp_path, variant="spike", eta=0.3)
    rollouts, seeds = fit.rollouts, [1, 2]
    every = rollouts.rewards(fit.train, seeds, fit.scorer)
    assert rollouts.rewards(fit.train[1:2], seeds, fit.scorer) == pytest.approx(every[1:2])
    assert rollouts.rewards(fit.train, seeds, fit.scorer) == every
    assert rollouts.rewards(fit.train, [1, 3], fit.scorer) != every
    task = fit.train[1]
    own = [seed_of(seed, task.key) for seed in seeds]
    run = kvkeep.replay(exact, task.ids.expand(2, -1), ForesightKV(BUDGET, fit.scorer, "sample", seed=own))
    full = kvkeep.replay(exact, task.ids[None], kvkeep.policies.create("full"))
    reward = losses.spike_reward(full.token_loss[0], run.token_loss, full.entropy[0], BUDGET.slots, eta=0.3)
    assert every[1] == pytest.approx(float(reward.mean()))


# ---- rewards rise


def test_rewards_rise_on_the_traces_that_are_trained_on(model, tmp_path):
    documents = texts(4, 48)
    options = {"batch": 4, "group": 8, "variant": "spike", "eta": 0.5, "lr": 1e-2, "beta": 0.0}
    fit = reinforce(model, tmp_path, documents, texts(6, 48)[4:], steps=14, **options)
    found = fit.run()
    assert found["train_reward_gain"].low > 0
    record = json.loads((tmp_path / "rewards.json").read_text())
    assert len(record["train"]) == 4
    gains = [row["after"]["reward"] - row["before"]["reward"] for row in record["train"]]
    assert found["train_reward_gain"].value == pytest.approx(sum(gains) / 4)
    assert [row["trace"] for row in record["train"]] == [document.name for document, _ in documents]
    assert {"reward", "reward_gain", "loss_ratio", "loss_ratio_change"} <= set(found)
    fit.schedule = replace(fit.schedule, compare_on=1)
    assert fit.run()["train_reward"].value == record["train"][0]["after"]["reward"]
    last = log_of(tmp_path)[-1]
    assert last["held_out_reward"] == pytest.approx(found["reward"].value)
    assert last["held_out_loss_ratio"] == pytest.approx(found["loss_ratio"].value)
    sums = torch.zeros(2)
    for _, ids in texts(6, 48)[4:]:
        for place, policy in enumerate((ForesightKV(BUDGET, fit.scorer), kvkeep.policies.create("full"))):
            sums[place] += kvkeep.replay(model, ids[None], policy).token_loss[0, BUDGET.slots :].sum()
    assert found["loss_ratio"].value == pytest.approx(float(sums[0] / sums[1]), rel=1e-5)


def test_the_log_says_what_a_step_did(model, tmp_path):
    reinforce(model, tmp_path, steps=1).advance()
    (line,) = log_of(tmp_path)
    assert line["tokens"] == 2 * 3 * 40
    assert (line["groups"], line["skipped"], line["updates"], line["clipped"]) == (2, 0, 1, 0)
    assert line["kl"] == pytest.approx(0, abs=1e-6)
    assert 0 < line["entropy"] <= math.log(8)
    assert line["gradient_norm"] > 0 < line["spread"]
    assert math.isfinite(line["reward"])

"""Whether judging a token late helps where only the future tells: the task, and that the delayed scorer wins there."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

import kvkeep
from kvkeep.evaluation import delay
from kvkeep.evaluation.hints import Hints
from kvkeep.training import from_scratch

TASK = Hints()


def described(row, task=TASK):
    return [task.describe(token) for token in row]


def items_of(tokens):
    """``{key: (position, item)}``."""
    return {token.key: (at, token) for at, token in enumerate(tokens) if token.what == "item"}


def hint_of(tokens, at):
    """The first hint behind position ``at``, with its position."""
    return next((later, token) for later, token in enumerate(tokens) if later > at and token.what == "hint")


@pytest.mark.parametrize("task", [TASK, Hints(blocks=1, colours=3, shades=1), Hints(blocks=7, copies=1, gap=3)])
def test_hint_decides_what_is_asked(task):
    for row in task.episodes(20, seed=3):
        tokens = described(row, task)
        assert len(tokens) == task.length
        asked = [token.key for token in tokens if token.what == "ask"]
        items = items_of(tokens)
        assert len(items) == task.keys
        kept = {key for key, (at, item) in items.items() if hint_of(tokens, at)[1].colour == item.colour}
        assert sorted(asked) == sorted(kept), "asked once each, and nothing else is"
        assert len(asked) == task.questions


def test_hint_comes_within_the_window_and_is_the_last_when_the_item_leaves():
    for row in TASK.episodes(20, seed=4):
        tokens = described(row)
        for at, _ in items_of(tokens).values():
            told, hint = hint_of(tokens, at)
            assert at < told < at + TASK.window
            seen = [token for token in tokens[: at + TASK.window + 1] if token.what == "hint"]
            assert seen[-1] == hint


def test_questions_are_answerable_and_come_when_every_item_has_left_the_window():
    rows = TASK.episodes(20, seed=5)
    places = TASK.items_asked(rows)
    for row, items in zip(rows, places, strict=True):
        tokens = described(row)
        for question, at in zip(TASK.asked_at, items, strict=True):
            assert tokens[question].what == "ask"
            assert tokens[at].what == "item"
            assert tokens[at].key == tokens[question].key
            assert tokens[question + 1] == ("answer", None, tokens[at].value, tokens[at].colour)
            assert question - at >= TASK.window, "it is still in the window"


def test_nothing_but_item_and_answer_names_a_value():
    """No leak: between an item and its answer only the item itself holds the value, and only a hint the colour."""
    holders = {token.what for token in map(TASK.describe, range(TASK.vocabulary)) if token.value is not None}
    assert holders == {"item", "answer"}
    for row in TASK.episodes(20, seed=6):
        tokens = described(row)
        first = TASK.asked_at[0]
        assert Counter(token.what for token in tokens[:first]) == {
            "start": 1,
            "item": TASK.keys,
            "hint": TASK.blocks,
            "filler": TASK.gap,
        }


def test_nothing_before_the_hint_foretells_it():
    """Needed or not is independent of the item's place, key, value and block, and of the hint before."""
    needed, features = [], []
    for row in TASK.episodes(600, seed=7):
        tokens = described(row)
        for at, item in items_of(tokens).values():
            block, place = divmod(at - 1, TASK.window)
            before = [token.colour == item.colour for token in tokens[:at] if token.what == "hint"]
            features.append([place, block, item.key, item.value, item.colour, before[-1] if before else 1 / 4])
            needed.append(hint_of(tokens, at)[1].colour == item.colour)
    correlation = np.corrcoef(np.array(needed, float), np.array(features, float).T)[0, 1:]
    assert np.mean(needed) == 1 / TASK.colours
    assert np.abs(correlation).max() < 4 / np.sqrt(len(needed))


def test_seed_decides_the_episodes():
    assert (TASK.episodes(5, seed=1) == TASK.episodes(5, seed=1)).all()
    assert (TASK.episodes(5, seed=1) != TASK.episodes(5, seed=2)).any()
    rows = TASK.episodes(50, seed=1)
    assert rows.min() == 0
    assert rows.max() < TASK.vocabulary
    assert len({row.tobytes() for row in rows}) == 50


def test_learning_episodes_are_shorter_and_ask_for_everything():
    (row,) = TASK.episodes(1, seed=8, blocks=2, ask_all=True)
    tokens = described(row)
    asked = sorted(token.key for token in tokens if token.what == "ask")
    assert asked == sorted(items_of(tokens))
    assert len(asked) == 2 * TASK.block


@pytest.mark.parametrize(
    ("size", "sentence"),
    [("blocks", "blocks must be at least 1, not 0"), ("copies", "copies must be at least 1, not 0")],
)
def test_a_task_that_cannot_be(size, sentence):
    with pytest.raises(ValueError, match=sentence):
        Hints(**{size: 0})
    with pytest.raises(ValueError, match="token 573 is not one of 573"):
        TASK.describe(TASK.vocabulary)


def test_interval_is_that_of_seeds_and_episodes():
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((1, 400))
    value, low, high = delay.interval(noise)
    assert value == pytest.approx(noise.mean())
    assert high - low == pytest.approx(2 * 1.96 * noise.std() / 20, rel=0.15)
    seeds = delay.interval(noise * 0 + np.array([[0.0], [1.0], [2.0]]))
    assert seeds.value == 1
    assert (seeds.low, seeds.high) == (pytest.approx(0, abs=0.01), pytest.approx(2, abs=0.01)), "seeds are drawn too"
    ratio = delay.interval(2 * np.exp(noise), np.exp(noise))
    assert tuple(ratio) == pytest.approx((2, 2, 2))


def few(**changes):
    """An experiment that runs in seconds and means nothing."""
    sizes = from_scratch.Tiny(hidden=16, heads=1, kv_heads=1, head_dim=16, intermediate=16, steps=3, batch=2)
    fields = {"task": Hints(blocks=2), "model": sizes, "steps": 2, "batch": 1, "train": 17, "test": 3}
    return delay.Experiment(**fields | {"presets": ("best",), "seeds": 2, "slots": 20} | changes)


def test_experiment_runs_once_and_says_what_it_did(tmp_path):
    first = delay.run(few(), tmp_path)
    labels = [row["label"] for row in first["rows"]]
    assert labels[:6] == ["full", "streaming", "random", "h2o_decayed", "future_mass", "golden"]
    assert labels[6:] == ["kvpop_mlp (best)", "kvpop, delay off (best)", "kvpop, delay on (best)"]
    assert first["rows"][0]["loss_ratio"] == (1, 1, 1)
    assert first["rows"][0]["held"] == [1, 1]
    assert [row["seeds"] for row in first["rows"]] == [1, 1, 2, 1, 1, 1, 2, 2, 2]
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "result.json"}
    again = delay.run(few(), tmp_path)
    assert json.dumps(again) == json.dumps(first)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items() if path.is_file()
               and path.name != "settings.json")  # fmt: skip
    text = delay.report(json.loads((tmp_path / "result.json").read_text()), "a command")
    assert text.count("\n| ") == 2 + 9 + 1
    with pytest.raises(ValueError, match="holds an experiment with other settings"):
        delay.run(few(train=18), tmp_path)


def test_every_policy_gets_the_same_slots(tmp_path):
    experiment = few()
    config = from_scratch.build(9, 9, experiment.model).config
    for method, options in delay.LEARNED.values():
        budget = experiment.budget(config, method, options)
        scorer = kvkeep.scorers.new(method, config, budget, **experiment.scorer_options(method, options))
        assert budget.slots + scorer.state_entries == experiment.slots
        assert (budget.sinks, budget.window) == (experiment.sinks, experiment.task.window)
    for name in delay.RULES[1:] + delay.ORACLES:
        assert experiment.policy(name, 0).budget.slots == experiment.slots


def test_tiny_model_is_trained_once_and_loads_as_it_was(tmp_path):
    experiment = few()
    model = delay.tiny_model(experiment, tmp_path / "model")
    loaded = delay.tiny_model(experiment, tmp_path / "model")
    ids = torch.from_numpy(experiment.task.episodes(2, seed=0))
    assert (model(ids).logits == loaded(ids).logits).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    again = delay.tiny_model(experiment, tmp_path / "again")
    assert (model(ids).logits == again(ids).logits).all()
    other = replace(experiment, model=replace(experiment.model, steps=4))
    with pytest.raises(ValueError, match="holds a model that was made with other settings"):
        delay.tiny_model(other, tmp_path / "model")


@pytest.mark.slow
def test_delayed_scorer_answers_more_than_the_immediate_one(tmp_path):
    """The experiment of docs/delay.md with the same task, budget and recipe, fewer steps, episodes and seeds."""
    experiment = delay.Experiment(
        model=from_scratch.Tiny(steps=400),
        learned=("kvpop, delay off", "kvpop, delay on"),
        presets=("best",),
        steps=600,
        train=1536,
        test=128,
        seeds=2,
    )
    result = delay.run(experiment, tmp_path)
    rows = {row["label"]: row for row in result["rows"]}
    full, oracle = rows["full"]["accuracy"][0], rows["future_mass"]["accuracy"][0]
    early, late = rows["kvpop, delay off (best)"]["accuracy"], rows["kvpop, delay on (best)"]["accuracy"]
    assert full > 0.8, "the model has not learned the task"
    assert full - rows["streaming"]["accuracy"][0] > 0.4, "the budget does not matter"
    assert oracle > early.high
    assert late.low > early.high
    assert late.value - early.value > 0.1
    assert result["differences"][0]["accuracy"].low > 0.1, "paired by seed and episode"

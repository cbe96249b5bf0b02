"""The loop of every fit: an early stop keeps the best weights, whatever it was stopped and resumed in between."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from torch import nn

from kvkeep.training import loop
from kvkeep.training.loop import Group, Loop


@dataclass
class Timing:
    steps: int = 12
    lr: float = 0.1
    warmup: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    evaluate_every: int = 2
    patience: int = 0
    save_every: int = 3


class Climb(Loop):
    """A weight that rises; a held-out loss that has its minimum on the way."""

    def __init__(self, folder, schedule, resume=False, progress=None, lowest=0.35, held_out=True):
        self.lowest, self.held_out, self.seen = lowest, held_out, []
        weight = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(weight.weight)
        super().__init__(weight, [Group(list(weight.parameters()), schedule.lr)], schedule, folder, resume, 0, progress)

    @property
    def weight(self):
        return float(self.module.weight.detach())

    def update(self):
        (-self.module.weight.sum()).backward()
        return self.descend() | {"tokens": 1}

    def evaluate(self):
        self.seen.append(self.weight)
        return {"loss": (self.weight - self.lowest) ** 2} if self.held_out else {}


class Killed(Exception):
    pass


def log_of(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


def finished(folder, schedule, **options):
    climb = Climb(folder, schedule, **options)
    climb.advance()
    return climb


@pytest.mark.parametrize(("patience", "step"), [(2, 8), (9, 12)], ids=["stopped", "to the end"])
def test_with_patience_a_run_ends_with_its_best_weights(tmp_path, patience, step):
    climb = finished(tmp_path, Timing(patience=patience))
    evaluated = climb.seen[:-1]
    best = min(evaluated, key=lambda weight: (weight - climb.lowest) ** 2)
    assert evaluated.index(best) not in (0, len(evaluated) - 1)
    assert climb.weight == best == climb.seen[-1], "what was measured last is what the run ends with"
    assert climb.step == step
    waited = [line["waited"] for line in log_of(tmp_path) if "waited" in line]
    assert waited == [0, 0, 1, 2, 3, 4][: len(waited)]


def test_without_patience_a_run_ends_with_its_last_weights(tmp_path):
    climb = finished(tmp_path, Timing())
    assert climb.weight == climb.seen[-1] == max(climb.seen)
    assert len(climb.seen) == 6
    assert not (tmp_path / "best.safetensors").exists()
    assert not any("waited" in line for line in log_of(tmp_path))


def test_a_run_whose_last_weights_are_the_best_measures_them_once(tmp_path):
    climb = finished(tmp_path, Timing(patience=2), lowest=9.0)
    assert climb.weight == climb.seen[-1] == max(climb.seen)
    assert len(climb.seen) == 6


def test_a_run_without_held_out_documents_never_stops(tmp_path):
    assert finished(tmp_path, Timing(patience=1), held_out=False).step == 12


@pytest.mark.parametrize("save_every", [1, 3, 5])
def test_stopped_and_resumed_it_ends_with_the_same_weights(tmp_path, save_every):
    schedule = Timing(patience=3, save_every=save_every)
    straight = finished(tmp_path / "straight", schedule)

    def killer(at):
        def progress(stage, done, total):
            if done == at:
                raise Killed

        return progress

    for end in (1, 4, 5, 6, 7, 9):
        with pytest.raises(Killed):
            finished(tmp_path / "killed", schedule, resume=True, progress=killer(end))
    for _ in range(2):  # a finished run stays what it is
        resumed = finished(tmp_path / "killed", schedule, resume=True)
        assert resumed.weight == straight.weight
        assert (resumed.step, resumed.best, resumed.waited) == (straight.step, straight.best, straight.waited)
        assert log_of(tmp_path / "killed") == log_of(tmp_path / "straight")


def test_killed_between_the_best_weights_and_the_state(tmp_path, monkeypatch):
    """The file on disk is then of a later step than the state; the same step writes it again."""
    schedule = Timing(patience=2, save_every=2)
    straight = finished(tmp_path / "straight", schedule)
    save = loop.save_state

    def killed(path, module, optimizer, record):
        if record["step"] == 4:
            raise Killed
        save(path, module, optimizer, record)

    monkeypatch.setattr(loop, "save_state", killed)
    with pytest.raises(Killed):
        finished(tmp_path / "killed", schedule)
    monkeypatch.undo()
    assert finished(tmp_path / "killed", schedule, resume=True).weight == straight.weight


def test_best_weights_of_an_earlier_run_are_not_taken(tmp_path):
    finished(tmp_path, Timing(patience=2))
    climb = finished(tmp_path, Timing(patience=2), lowest=float("nan"))
    assert climb.weight == climb.seen[-1] == climb.seen[1], "nothing was better than nothing: the last weights stay"


@pytest.mark.parametrize("left", [None, b"half a file"])
def test_best_weights_that_are_gone_are_named(tmp_path, left):
    finished(tmp_path, Timing(patience=2))
    best = tmp_path / "best.safetensors"
    best.unlink() if left is None else best.write_bytes(left)
    with pytest.raises(ValueError, match=r"best\.safetensors, the best weights of this run, cannot be read"):
        finished(tmp_path, Timing(patience=2), resume=True)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"evaluate_every": 0}, "evaluate_every must be at least 1, not 0"),
        ({"save_every": 0}, "save_every must be at least 1, not 0"),
        ({"patience": -1}, "patience must be at least 0, not -1"),
    ],
)
def test_intervals_that_do_not_exist(tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        Climb(tmp_path / "run", Timing(**changes))
    assert not (tmp_path / "run").exists()


def test_the_state_itself_keeps_the_last_weights(tmp_path):
    """Best weights are a matter of the end: a longer patience would have gone on from the last."""
    climb = finished(tmp_path, Timing(patience=2))
    resumed = Climb(tmp_path, Timing(patience=2), resume=True)
    assert resumed.weight > climb.weight

"""Two processes that reinforce a scorer learn what one does."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch

from kvkeep.training import loop
from test_reinforce import log_of, reinforce
from test_training import texts
from tiny import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


IN_SHARES = {"steps": 4, "batch": 3, "save_every": 2, "evaluate_every": 4, "held_out": texts(6, 40)[3:]}


def one_of_two(rank, folder):
    torch.set_num_threads(1)
    meeting = {"init_method": f"file://{folder}/meet", "timeout": timedelta(seconds=120)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2, **meeting)
    if rank == 0:  # whoever waits for nobody would go on from nothing
        loop.save_state = late(loop.save_state)
    model = tiny_model(dtype=torch.float32)
    killed = reinforce(model, folder / "two", **IN_SHARES)
    killed.progress = stop
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    fit = reinforce(model, folder / "two", resume=True, **IN_SHARES)  # both go on from what the first has saved
    metrics = fit.run()
    torch.save((fit.scorer.state_dict(), metrics), folder / f"result-{rank}")
    torch.distributed.destroy_process_group()


def late(save):
    def saved(*arguments):
        time.sleep(2)
        save(*arguments)

    return saved


def stop(stage, done, total):
    if done == 2:
        raise KeyboardInterrupt


@pytest.mark.slow
def test_two_processes_learn_what_one_does(model, tmp_path):
    torch.multiprocessing.spawn(one_of_two, (tmp_path,), nprocs=2)
    alone = reinforce(model, tmp_path / "one", **IN_SHARES)
    metrics = alone.run()
    for rank in (0, 1):
        weights, its = torch.load(tmp_path / f"result-{rank}", weights_only=False)
        for name, weight in alone.scorer.state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6)
        assert set(its) == set(metrics)
        for name, interval in metrics.items():
            assert its[name] == pytest.approx(interval, rel=1e-3, abs=1e-5)
    for line, its in zip(log_of(tmp_path / "one"), log_of(tmp_path / "two"), strict=True):
        assert line == pytest.approx(its, rel=1e-3, abs=1e-5)

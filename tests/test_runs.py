"""The folder of a run: what may be resumed, reused or written over."""

from __future__ import annotations

import pytest
import torch

from kvkeep.training import kvpop
from test_training import BUDGETS, small, texts
from tiny import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


def test_resuming_another_run_is_refused(model, tmp_path):
    kvpop.train("kvpop_mlp", model, texts(3), BUDGETS, tmp_path, small())
    with pytest.raises(ValueError, match="holds a run already: give --resume"):
        kvpop.train("kvpop_mlp", model, texts(3), BUDGETS, tmp_path, small())
    with pytest.raises(ValueError, match="holds a run with another seed; it cannot"):
        kvpop.train("kvpop_mlp", model, texts(3), BUDGETS, tmp_path, small(), seed=1, resume=True)


def test_resuming_with_another_model_or_number_format_is_refused(model, tmp_path):
    kvpop.train("kvpop_mlp", model, texts(3), BUDGETS, tmp_path, small())
    other = tiny_model(dtype=torch.float32, seed=1)
    with pytest.raises(ValueError, match="with another model; it cannot be resumed"):
        kvpop.train("kvpop_mlp", other, texts(3), BUDGETS, tmp_path, small(), resume=True)
    with pytest.raises(ValueError, match="with another dtype; it cannot be resumed"):
        kvpop.train("kvpop_mlp", tiny_model(dtype=torch.bfloat16), texts(3), BUDGETS, tmp_path, small(), resume=True)


def test_files_of_others_are_never_written_over(model, tmp_path):
    """A model's folder, say, whose config.json would be lost."""
    (tmp_path / "config.json").write_text("{}")
    for resume in (False, True):
        with pytest.raises(ValueError, match=r"holds config\.json, which no training run put there"):
            kvpop.train("kvpop_mlp", model, texts(3), BUDGETS, tmp_path, small(), resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    with pytest.raises(ValueError, match=r"config\.json is a file; it should be a folder"):
        kvpop.train("kvpop_mlp", model, texts(3), BUDGETS, tmp_path / "config.json", small())
    with pytest.raises(ValueError, match=r"/proc/here cannot be written to"):
        kvpop.train("kvpop_mlp", model, texts(3), BUDGETS, "/proc/here", small(), shards=tmp_path / "shards")


def test_a_damaged_state_is_named(model, tmp_path):
    kvpop.train("kvpop_mlp", model, texts(3), BUDGETS, tmp_path, small())
    state = tmp_path / "run" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"state\.safetensors is damaged, so that the run cannot go on"):
        kvpop.train("kvpop_mlp", model, texts(3), BUDGETS, tmp_path, small(), resume=True)


def test_a_finished_scorer_is_reused_as_it_is_or_refused(model, tmp_path, monkeypatch):
    first = kvpop.train("kvpop_mlp", model, texts(3), BUDGETS, tmp_path, small())
    monkeypatch.setattr(kvpop, "harvest", None)
    again = kvpop.train("kvpop_mlp", model, texts(3), BUDGETS, tmp_path, small(), resume=True, reuse=True)
    assert again.fingerprint() == first.fingerprint()
    with pytest.raises(ValueError, match="with another recipe"):
        kvpop.train("kvpop_mlp", model, texts(3), BUDGETS, tmp_path, small(hidden=5), resume=True, reuse=True)

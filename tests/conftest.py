"""Settings every test runs under: one thread, no hub, a repeatable hypothesis."""

import io
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels for GPUs run on the CPU; read when Triton is imported

# After the lines above: the thread count is read when torch is imported.
import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# The first example of a property often compiles a kernel, so no deadline; in CI the examples are always the same ones.
_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("default", **_common)
settings.register_profile("ci", derandomize=True, **_common)
settings.register_profile("long", max_examples=1000, **_common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model folder for the command line, see byte_model.py."""
    import byte_model

    path = tmp_path_factory.mktemp("byte_model")
    byte_model.write(path)
    return path


@pytest.fixture
def texts(tmp_path):
    """Three text files of more than 100 bytes."""
    paths = []
    for i in range(3):
        path = tmp_path / f"text{i}.txt"
        path.write_text(f"Text number {i}. " + " ".join(str((i + 3) * n * n % 97) for n in range(60)))
        paths.append(path)
    return paths


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs the command line in this process: (exit code, standard output, standard error)."""

    from kvkeep.cli import main

    def call(*arguments, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()  # whatever the test itself printed
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return stopped.value.code, out, err

    return call


@pytest.fixture
def no_model(monkeypatch):
    """Loading a model, the first slow thing, is a failure."""

    from kvkeep.cli import common

    def load(*_, **__):
        raise AssertionError("a model was loaded before the mistake was found")

    monkeypatch.setattr(common, "load", load)

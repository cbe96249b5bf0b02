"""Fixtures: an alias "tiny" for a GGUF of a few kilobytes, in a cache of its own.

A test module takes them with ``pytest_plugins = ["tiny_alias"]``.
"""

import dataclasses

import pytest

from kvkeep.runtime import embedded, models
from tiny_gguf import ALIAS, random_model, write_gguf


@pytest.fixture(scope="session")
def tiny_model():
    return random_model()


@pytest.fixture(scope="session")
def tiny_gguf(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_model)
    return path


@pytest.fixture
def tiny(tiny_gguf, tmp_path, monkeypatch):
    """The alias "tiny", provided as a file, in a cache of its own."""
    alias = dataclasses.replace(
        models.ALIASES[ALIAS], alias="tiny", package="kvkeep-tiny-fixture", version="1.0", member="tiny/tiny.gguf",
        sha256=embedded._sha256(tiny_gguf), variable="KVKEEP_TINY_GGUF",
    )  # fmt: skip
    monkeypatch.setenv("KVKEEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KVKEEP_TINY_GGUF", str(tiny_gguf))
    monkeypatch.setitem(models.ALIASES, "tiny", alias)
    return alias

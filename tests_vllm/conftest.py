"""Settings of the tests that run vLLM, in an environment of its own: `make test-vllm`."""

import os
import sys
from pathlib import Path

SETTINGS = {
    "OMP_NUM_THREADS": "1",  # more than there are free cores is many times slower
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the tests look into the layers
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
os.environ.update(SETTINGS)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import pytest  # noqa: E402  after the lines above: vLLM reads them when it is imported


@pytest.fixture(scope="session")
def model_folder():
    """The embedded model, converted at first use."""
    from kvkeep.runtime.models import resolve

    return str(resolve("smollm2-135m"))


@pytest.fixture(scope="session")
def library(model_folder):
    """The model as the library runs it, in float32."""
    from kvkeep.runtime.models import load

    return load(model_folder, dtype="float32")[0]

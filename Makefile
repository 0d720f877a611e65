# `make help` lists the targets. Everything runs in .venv; stamp files record which packages are already installed.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
# Index from which to install torch, e.g. https://download.pytorch.org/whl/cpu for its CPU build; empty: pip's default.
TORCH_INDEX ?=
RUN_DIR ?= runs/cartpole
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
REQUIREMENTS := requirements.txt constraints.txt pyproject.toml setup.py
THREADS := OMP_NUM_THREADS=1
# Number of processes that run the tests, in the order of tests/conftest.py. One of them runs all tests with Ray, and
# mostly waits for the processes of Ray's workers.
JOBS ?= 3
# PYTHONDONTWRITEBYTECODE is cleared, so that bytecode is written, and processes that tests start can load it.
# If one of the processes crashes, the run ends: pytest-xdist may wait for ever for the tests of its replacement.
PYTEST = $(THREADS) PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(JOBS) --max-worker-restart 0 \
	--dist loadgroup --no-loadscope-reorder
EMULATED = $(THREADS) PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -rs -p tests.emulated_gpu.plugin -n 0
# The files with tests for GPUs; to collect all tests takes longer than to run these.
GPU_TESTS = $(shell grep -rl --include='test_*.py' 'mark\.gpu' tests)

.DEFAULT_GOAL := help
.PHONY: help venv train test test-all test-emulated-gpu test-emulated-gpu-default lint docs notebooks notebooks-sync bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-25s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(VENV)/.stamp  ## make the virtual environment for training

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp: $(REQUIREMENTS) | $(BIN)/python
	@echo "installing pytorchrl into $(VENV) (takes minutes, only once)"
	@$(if $(TORCH_INDEX),$(PIP_INSTALL) torch --index-url $(TORCH_INDEX),:)
	@$(PIP_INSTALL) -e '.[plots,cli]'
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp
	@echo "installing the packages for tests, checks and docs into $(VENV)"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

$(VENV)/.stamp-envs: $(VENV)/.stamp-dev
	@echo "installing environments of other packages into $(VENV)"
	@$(PIP_INSTALL) -e '.[envs]'
	@touch $@

train: $(VENV)/.stamp  ## train PPO on CartPole-v1, plot the learning curve, play 100 evaluation episodes
	@$(BIN)/python -m pytorchrl train ppo --env CartPole-v1 --log-dir $(RUN_DIR) --overwrite
	@$(BIN)/python -m pytorchrl plot $(RUN_DIR)
	@$(BIN)/python -m pytorchrl enjoy $(RUN_DIR) --episodes 100

test: $(VENV)/.stamp-dev  ## run the tests of every change
	@$(PYTEST)

test-all: $(VENV)/.stamp-dev $(VENV)/.stamp-envs  ## run all tests, including those that train until a score is reached
	@code=0; \
	$(PYTEST) -m '' || code=1; \
	$(MAKE) --no-print-directory test-emulated-gpu-default || code=1; \
	exit $$code

test-emulated-gpu: $(VENV)/.stamp-dev  ## run the tests for GPUs on an emulated one, which needs a C++ compiler
	@$(EMULATED) -m gpu $(GPU_TESTS)

test-emulated-gpu-default: $(VENV)/.stamp-dev  ## run the tests of schemes with a GPU as the default device, emulated
	@$(EMULATED) --gpu-by-default tests/unit/scheme tests/unit/learner

lint: $(VENV)/.stamp-dev  ## run ruff and mypy, and check spelling and links
	@code=0; \
	$(BIN)/python -m ruff check . || code=1; \
	$(BIN)/python -m mypy pytorchrl || code=1; \
	$(BIN)/python -m codespell_lib || code=1; \
	$(BIN)/python docs/_ext/check_links.py || code=1; \
	exit $$code

docs: $(VENV)/.stamp-dev  ## build the documentation in docs/_build/html, and check it
	@rm -rf docs/_build/html/_modules  # Sphinx would keep pages with source code whose links are out of date
	@$(THREADS) $(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@PYTORCHRL_SITE=docs/_build/html $(THREADS) $(BIN)/python -m pytest -q -n 0 -m site tests/docs

notebooks: $(VENV)/.stamp-dev  ## measure the results of the notebooks at full size, or only of NOTEBOOK=name
	@$(THREADS) $(BIN)/python docs/_ext/notebooks.py execute $(NOTEBOOK)

notebooks-sync: $(VENV)/.stamp-dev  ## draw the notebooks again from their stored results
	@$(BIN)/python docs/_ext/notebooks.py sync

bench: $(VENV)/.stamp-dev  ## measure steps per second as JSON, also of Stable-Baselines3 if it is installed
	@$(THREADS) $(BIN)/python benchmarks/throughput.py cartpole

clean:  ## remove caches and build outputs, but no runs
	@rm -rf build dist docs/_build .pytest_cache .mypy_cache .ruff_cache *.egg-info

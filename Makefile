# `make help` lists what there is. Everything runs in .venv; stamps make each set-up instant once it is in place.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
# Where torch alone is taken from, e.g. https://download.pytorch.org/whl/cpu for its CPU build; empty: pip's usual index.
TORCH_INDEX ?=
RUN_DIR ?= runs/cartpole
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
REQUIREMENTS := requirements.txt constraints.txt pyproject.toml setup.py
THREADS := OMP_NUM_THREADS=1
# Processes that share the tests, in the order of tests/conftest.py; all that use Ray go to one of them.
JOBS ?= 2
# Processes that tests start load compiled files, even where Python is told not to write them.
PYTEST = $(THREADS) PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help venv train test test-all lint docs bench clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(VENV)/.stamp  ## the environment that training needs

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp: $(REQUIREMENTS) | $(BIN)/python
	@echo "installing pytorchrl into $(VENV) (minutes, once)"
	@$(if $(TORCH_INDEX),$(PIP_INSTALL) torch --index-url $(TORCH_INDEX),:)
	@$(PIP_INSTALL) -e '.[plots,cli]'
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp
	@echo "installing what tests, checks and docs need into $(VENV)"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

train: $(VENV)/.stamp  ## PPO on CartPole-v1: a model, a learning curve, 100 evaluation episodes
	@$(BIN)/python -m pytorchrl train ppo --env CartPole-v1 --log-dir $(RUN_DIR) --overwrite
	@$(BIN)/python -m pytorchrl plot $(RUN_DIR)
	@$(BIN)/python -m pytorchrl enjoy $(RUN_DIR) --episodes 100

test: $(VENV)/.stamp-dev  ## the tests of every change; failures show at once
	@$(PYTEST)

test-all: $(VENV)/.stamp-dev  ## also those that train until a score is reached
	@$(PYTEST) -m ''

lint: $(VENV)/.stamp-dev  ## ruff, mypy, spelling and links; all run, whichever fails
	@code=0; \
	$(BIN)/python -m ruff check . || code=1; \
	$(BIN)/python -m mypy pytorchrl || code=1; \
	$(BIN)/python -m codespell_lib || code=1; \
	$(BIN)/python docs/_ext/check_links.py || code=1; \
	exit $$code

docs: $(VENV)/.stamp-dev  ## the documentation, into docs/_build/html
	@$(THREADS) $(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

bench: $(VENV)/.stamp-dev  ## steps per second as JSON, beside those of Stable-Baselines3 if it is installed
	@$(THREADS) $(BIN)/python benchmarks/throughput.py cartpole

clean:  ## remove caches and built files, never runs
	@rm -rf build dist docs/_build .pytest_cache .mypy_cache .ruff_cache *.egg-info

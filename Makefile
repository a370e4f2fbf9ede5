# `make` lists the targets. Variables: PYTHON (the interpreter that makes the environment), VENV (where), ARGS (appended
# to the command of demo, test, slow and gpu).

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin

# Nothing here needs a model hub, so nothing may ask one. Tokenizers warn when they are forked by data loaders.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test check slow gpu

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(VENV)/.installed ## make the virtual environment with the tested versions

demo: $(VENV)/.installed ## complete a built-in prompt with the shipped network, beside plain decoding
	$(BIN)/python decode.py model=networks/pystdlib drafter=sequential compare=true $(ARGS)

test: $(VENV)/.installed ## run the test suite (CPU, three to five minutes)
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.installed ## lint, format, types and the import rule
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

slow: $(VENV)/.installed ## run the long tests
	$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

gpu: $(VENV)/.installed ## run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(ARGS)

# The stamp is written last, so an interrupted installation is taken up again. torch goes first and alone: asked for
# by its exact version it is the tested build, and nothing that follows may replace it.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@rm -f $@
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@echo "Installing the rest, about a minute"
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

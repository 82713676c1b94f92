# The first of these to run makes .venv and installs the tested versions; later ones start at once.
#
#   make train    train a small hybrid model on rollout trees (examples/tiny.yaml)
#   make test     run all tests
#   make lint     formatting, lint, strict types
#   make format   rewrite the sources in the project's format
#   make clean    remove the virtual environment and everything the tools cached
#
# On Linux, PyPI's PyTorch brings several GB of CUDA libraries. For the small CPU build:
#   make train PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

CANDIDATES := python3.11 python3.12 python3.13 python3 python
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	if $$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then echo $$p; break; fi; done)
PIP_ARGS ?=
CONFIG ?= examples/tiny.yaml
WORKERS ?= 2

BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help install train test lint format clean

help:
	@sed -n '3,7s/^#//p' Makefile

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { \
		echo "make: Python 3.11 or newer with the venv module was not found (tried: $(CANDIDATES))." >&2; \
		echo "Install it, or name it: make $(or $(MAKECMDGOALS),install) PYTHON=/path/to/python" >&2; \
		exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[dev]'
	@touch $@

train: $(STAMP)
	$(BIN)/harts train $(CONFIG) $(ARGS)

# One thread a worker: two workers on two cores lose time to each other's thread pools otherwise.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .ci/tmp build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Everything a person needs: `make serve` and `make test` work on a fresh machine with nothing but Python >= 3.11 and make.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PORT ?= 8000
CONFIG ?= configs/local.yaml
export PYTHONPATH := $(CURDIR)

.DEFAULT_GOAL := help
.PHONY: help setup check format test-fast test serve demo clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## create .venv and install everything (quick when nothing changed)

$(VENV)/.installed: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing dependencies into $(VENV) (some minutes the first time)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev,bench]'
	@touch $@

check: setup ## formatting, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-fast: setup ## tests that need neither Ray nor a model download (under a minute)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto -m "not ray and not model and not gpu and not slow"

test: setup ## everything that runs on this machine
	$(BIN)/python -m pytest -q

serve: setup ## serve SmolLM2 on http://127.0.0.1:$(PORT) with a Ray cluster of its own, until Ctrl-C (PORT=8000, CONFIG=configs/local.yaml)
	@exec $(BIN)/python -m actors.cli.serve --config $(CONFIG) --port $(PORT)

demo: setup ## three tiers of cache on your own machine: cold, then warm from each tier, then a follow-up turn
	$(BIN)/python -m bench.demo

bench-micro: setup ## micro-benchmarks of the KV hierarchy and the engine, each figure beside its limit
	$(BIN)/python -m bench.micro.kv
	$(BIN)/python -m bench.micro.engine

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build *.egg-info

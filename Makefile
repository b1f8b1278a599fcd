# One word for each thing a developer does. `make demo` and `make test` need nothing but Python 3.11 or newer.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= build/demo

.PHONY: demo test check lint types suite fast format clean

demo: $(BIN)/.ready  ## set up, then run the main job on the model in examples/
	$(BIN)/python examples/demo.py $(DEMO)

test: check  ## set up, then lint, types and the whole suite

check: lint types suite

lint: $(BIN)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(BIN)/.ready
	$(BIN)/mypy

suite: $(BIN)/.ready
	$(BIN)/python -m pytest

fast: $(BIN)/.ready  ## the suite without the slow tests
	$(BIN)/python -m pytest -m "not slow"

format: $(BIN)/.ready
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

$(BIN)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache

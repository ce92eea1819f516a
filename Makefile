# make demo | make test | make lint | make typecheck | make venv | make clean
# Needs nothing but python3 (3.10 or newer) with pip and venv: make PYTHON=python3.12 test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

export OMP_NUM_THREADS := 1

.PHONY: demo test lint typecheck venv clean

demo: $(VENV)/.base
	$(BIN)/python -m examples.gpt.train

# Three files of tests at a time: each test forks up to eight ranks, which wait for each other a third of their time. The
# long ones are in tests/distributed; they go first, so that no worker is left with one at the end.
test: lint typecheck
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder
	@echo "make test: ruff, mypy and pytest passed"

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(VENV)/.test
	$(BIN)/mypy

venv: $(VENV)/.test

# torch comes first and pinned: left to itself, pip may take a newer one with several GB of GPU libraries beside it.
$(VENV)/.base: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (torch first; some minutes) ..."
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch==2.13.0
	$(PIP) install -c constraints.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) install -c constraints.txt -e ".[test,hf]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

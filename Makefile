# make lab   set up, then JupyterLab on notebooks/   (PORT=8899, NO_BROWSER=1)
# make test  set up, then linters, types, tests and notebooks
# Any Python from 3.11 on is found by itself; PYTHON=/path/to/python3.12 chooses one.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.mla-lab-ready
ENGINE_TESTS := $(addprefix tests/test_,engines.py engines_sglang.py studies_engine_steps.py \
	capture_solution.py tune_cluster.py)
PORT ?= 8888
PIP := $(BIN)/python -m pip --disable-pip-version-check

# a shim or an old python3 may be on PATH, so each candidate must run and tell its version
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# container images set it; without bytecode on disk each process compiles torch's sources anew, for 1 s
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup lab test lint format types tests parallel-tests serial-tests browser-test engine-tests live html lock clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile
	@echo "also: make setup, lint, types, tests, format, browser-test, engine-tests, live, html, lock, clean"

setup: $(STAMP)
	@echo "ready: $(VENV)"

$(STAMP): requirements.txt pyproject.toml
	@if [ -z "$(PYTHON)" ]; then \
		echo "mla-lab needs Python 3.11 or newer and found none: install one (Debian, Ubuntu: apt install python3 python3-venv) or name yours: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3.11"; exit 1; fi
	@if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		echo "PYTHON=$(PYTHON) does not run as Python 3.11 or newer: name another one"; exit 1; fi
	@if ! $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null; then \
		echo "$(PYTHON) has no venv module: install it (Debian, Ubuntu: apt install python3-venv), then run make again"; exit 1; fi
	@if ! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		echo "[1/3] new environment $(VENV) from $(PYTHON)"; $(PYTHON) -m venv --clear $(VENV); \
	else echo "[1/3] environment $(VENV) is there"; fi
	@$(PIP) install --quiet --upgrade "pip>=25" 2>/dev/null || echo "note: no newer pip to be had; with that of $(PYTHON) the next step takes longer"
	@echo "[2/3] pinned packages (a first time takes minutes, and gigabytes where torch comes with CUDA)"
	@$(PIP) install --no-compile -r requirements.txt | sed -u '/already satisfied/d' || { \
		echo "pip could not install requirements.txt (its own lines above say why): it needs a package index it can reach, or PIP_FIND_LINKS=/folder/of/wheels"; exit 1; }
	@echo "[3/3] mla_lab itself, editable"
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@command -v g++ >/dev/null || echo "note: no g++ here. The workbook, the CPU backend and the tests run without it; compiling kernels needs it (Debian, Ubuntu: apt install g++)"
	@touch $@

lab: $(STAMP)
	@exec $(BIN)/mla-lab lab --port=$(PORT) $(if $(NO_BROWSER),--no-browser)

# types beside the tests: mypy is one process, and what measures time runs after both
test: lint
	@$(MAKE) --jobs=2 types parallel-tests
	@$(MAKE) serial-tests
	@echo "all green"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@sources=$$(git ls-files '*.cu' '*.cuh' '*.h' '*.cc'); \
		if [ -n "$$sources" ]; then $(BIN)/clang-format --dry-run --Werror $$sources; fi

types: $(STAMP)
	$(BIN)/mypy

# two processes of one thread each: most tests are Python, not matrix products; each takes one half,
# so that tests of one build follow each other, and then from the other's; what measures time or
# memory runs alone afterwards
tests: parallel-tests
	@$(MAKE) serial-tests

parallel-tests: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not serial" --nbmake --nbmake-timeout=100 tests notebooks

serial-tests: $(STAMP)
	$(BIN)/pytest -m serial $$(grep -rl --include="*.py" "mark[.]serial" tests)

# on an H200: makes every record anew, executes the notebooks live (mla-lab live --help: its steps)
live: $(STAMP)
	$(BIN)/mla-lab live

# the course: executed notebooks as pages that need no kernel and no network, in site/
html: $(STAMP)
	$(BIN)/python -m mla_lab.lab.site site

browser-test: $(STAMP)
	@command -v chromium >/dev/null || { echo "the browser test drives Chromium and there is none on PATH: install it (Debian, Ubuntu: apt install chromium)"; exit 1; }
	$(PIP) install --quiet -r requirements-browser.txt
	$(BIN)/pytest -m browser --run-browser tests

# vLLM, SGLang, Ray and FlashInfer-Bench on a CPU: their packages (2.3 GB) beside the environment,
# then the tests that `make test` skips without them
engine-tests: $(STAMP)
	$(PIP) install --quiet --no-deps --no-compile --upgrade --target .cache/engines -r requirements-engines.txt
	PYTHONPATH=.cache/engines RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1 $(BIN)/pytest $(ENGINE_TESTS)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m mla_lab.lab.canonical notebooks
	$(BIN)/python -m mla_lab.lab.documents
	@sources=$$(git ls-files '*.cu' '*.cuh' '*.h' '*.cc'); \
		if [ -n "$$sources" ]; then $(BIN)/clang-format -i $$sources; fi

# a new requirements.txt from the newest versions; run it where pip finds a CPU build of torch,
# so that no CUDA library is pinned
lock:
	$(PYTHON) -m venv --clear .cache/lock
	.cache/lock/bin/python -m pip install --upgrade '.[lab,compile,dev]'
	@echo "# written by: make lock" > requirements.txt
	@.cache/lock/bin/python -m pip freeze --all --exclude pip --exclude mla-lab | sed 's/+cpu$$//' >> requirements.txt

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

# Each target sets up .venv by itself and updates it when pyproject.toml has changed.
# ARGS are passed on:  make serve ARGS="--port 31000 --speculative-algorithm NONE"
# PYTHON picks the interpreter that makes .venv:  make serve PYTHON=/opt/python3.12/bin/python

VENV  := .venv
BIN   := $(VENV)/bin
ARGS  ?=

# Few of the files that come with torch and others are ever imported: these are compiled then, once,
# since Python may write it down.
PIP   := $(BIN)/python -m pip install --no-compile
unexport PYTHONDONTWRITEBYTECODE

SCALE   ?= 20
RESULTS ?= $(CURDIR)/benchmark/results/reliability.jsonl

# Workers of `make test`. The tests of one assume that a GPU's memory is theirs.
WORKERS ?= $(if $(shell command -v nvidia-smi),1,2)

.PHONY: help serve test coverage chaos exact soak lint bench eval constraints clean

help:
	@echo "make serve   start the server (needs no model: one is embedded)"
	@echo "make test    all tests that this machine can run, in two processes (WORKERS=2)"
	@echo "make coverage   the same in one process, and the share of lines that ran"
	@echo "make chaos   the long form of test/srt/chaos: SCALE=20 times the clients and rounds"
	@echo "make exact   as long a comparison of random settings' tokens; SCALE=20, SEED=1"
	@echo "make soak    an hour of load with aborts; watches the server's memory"
	@echo "make lint    ruff, mypy, import-linter and a list of words"
	@echo "make bench   one batch, in this process; see benchmark/ for the others"
	@echo "make eval    GSM8K-style accuracy of a running server"
	@echo "make clean   remove .venv, caches and build output"
	@echo "make constraints   write the versions in .venv to constraints.txt"
	@echo 'ARGS="..." is passed on to the command.'

serve: $(VENV)/.installed
	$(BIN)/python -m mamba_eagle.launch_server $(ARGS)

bench: $(VENV)/.installed
	$(BIN)/python -m mamba_eagle.bench_one_batch $(ARGS)

eval: $(VENV)/.installed
	$(BIN)/python -m mamba_eagle.eval.few_shot_gsm8k $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

# slipcover counts the lines of this process, not those of servers that e2e tests start. It costs a
# few percent; a tracer would double the time of the scheduler's tests before Python 3.12.
coverage: $(VENV)/.installed-test
	@rm -f .coverage.json
	$(BIN)/python -m slipcover --json --out .coverage.json -m pytest $(ARGS)
	@$(BIN)/python test/coverage_table.py .coverage.json

# Each appends the counts of what it did to RESULTS, and prints them.
chaos exact: export MAMBA_EAGLE_CHAOS_SCALE = $(SCALE)
chaos exact: export MAMBA_EAGLE_CHAOS_RESULTS = $(RESULTS)
chaos exact: export MAMBA_EAGLE_CHAOS_SEED = $(or $(SEED),1)

chaos: $(VENV)/.installed-test
	$(BIN)/python -m pytest test/srt/chaos --ignore test/srt/chaos/test_exact.py -s $(ARGS)

exact: $(VENV)/.installed-test
	$(BIN)/python -m pytest test/srt/chaos/test_exact.py -s $(ARGS)

soak: $(VENV)/.installed
	$(BIN)/python -m benchmark.soak --own-server --clients 16 --seconds 3600 --abort-rate 0.2 \
		--output $(RESULTS) $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python test/english.py

constraints: $(VENV)/.installed-test
	{ grep '^#' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable \
		| grep -viE '^(torch|triton|nvidia|cuda)'; } > .constraints.new
	mv .constraints.new constraints.txt

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find python -name '*.egg-info' -prune -exec rm -rf {} +
	find . -name __pycache__ -prune -exec rm -rf {} +
	rm -f .coverage.json

# The first interpreter that is new enough and can make an environment (Debian keeps ensurepip in
# python3-venv). The check runs it: a name on the PATH may be a shim with nothing behind it.
PYTHONS = $(if $(PYTHON),"$(PYTHON)",python3.11 python3.12 python3.10 python3)

$(BIN)/python:
	@set -e; \
	check='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))'; \
	for python in $(PYTHONS); do \
		if "$$python" -c "$$check" >/dev/null 2>&1; then \
			echo "making $(VENV) with $$("$$python" --version)"; \
			exec "$$python" -m venv $(VENV); \
		fi; \
	done; \
	echo "No usable Python among: $(subst ",,$(PYTHONS))." >&2; \
	echo "It must be 3.10 or newer and have venv; on Debian and Ubuntu:" >&2; \
	echo "  apt-get install python3-venv" >&2; \
	echo "or name another one: make PYTHON=/path/to/python" >&2; \
	exit 1

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV): torch and others, a few minutes and up to some GB the first time"
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[test]'
	@touch $@ $(VENV)/.installed

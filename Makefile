# The two commands of the README are `make demo` and `make test`; each sets up .venv first, once.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PLAN   ?= 2d
PYTEST_ARGS ?=
# else each of the many processes compiles autopar anew
unexport PYTHONDONTWRITEBYTECODE
# a file's tests share models and worlds of ranks; the order of files is that of tests/conftest.py
WORKERS ?= --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo test test-all verify-all rest lint format types layers sizes clean

help:
	@echo "make demo     train a small Llama-style model on four CPU ranks, compared with one device"
	@echo "make demo PLAN=3d     the same on eight ranks: pipeline × tensor × data parallelism"
	@echo "make test     run the short suite (PYTEST_ARGS='-k name' selects some tests)"
	@echo "make test-all     run every test"
	@echo "make verify-all     every family on every mesh over gloo ranks; writes docs/equivalence.md"
	@echo "make rest     what make test leaves out: long tests, verify-all, planted faults; FIFTH=COMMIT for a fifth"
	@echo "make lint types layers sizes     the static checks; make format rewrites the files"
	@echo "make clean    remove environments, builds and caches"

setup:
	@$(PYTHON) tools/setup_env.py --venv $(VENV) --extras dev

demo: setup
	@$(BIN)/python examples/demo.py --plan $(PLAN)

test: setup
	@$(BIN)/python -m pytest $(WORKERS) $(PYTEST_ARGS)

test-all: setup
	@$(BIN)/python -m pytest -m "" $(WORKERS) $(PYTEST_ARGS)

verify-all: setup
	@$(BIN)/python tools/equivalence.py

rest: setup
	@$(BIN)/python -m pytest -m long $(if $(FIFTH),--fifth $(FIFTH)) $(WORKERS) $(PYTEST_ARGS)
ifdef FIFTH
	@printf '%s\n' 0 1 | xargs -P 2 -n 1 $(BIN)/python tools/equivalence.py --fifth $(FIFTH) --half
else
	@$(BIN)/python tools/equivalence.py
endif
	@$(BIN)/python tools/mutants.py --jobs 2 $(if $(FIFTH),--fifth $(FIFTH))

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: setup
	@$(BIN)/mypy

layers: setup
	@$(BIN)/lint-imports
	@$(BIN)/python tools/check_imports.py

sizes: setup
	@$(BIN)/python tools/sizes.py

clean:
	rm -rf .venv .venv-core .venv-newest .venv-lowest .venv*.lock build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache $(HOME)/.cache/autopar-tests

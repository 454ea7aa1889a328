# Everstep's few targets; CI runs the same ones.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
LOCAL := .venv/.local
WEB := .venv/.web
STAMP := .venv/.set-up
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# uv needs a third of pip's time, but does not read pip's settings. Where it cannot install the packages, pip does.
locked = $(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes --no-deps --no-build-isolation -r $(1) || { echo "==> set-up: again, with pip"; $(PIP) --require-hashes --no-deps --no-build-isolation -r $(1); }
LOCK := $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate --no-header
# A test that not even its own time limit can end takes its process with it, and says where it stood.
HANGS := -o faulthandler_timeout=960 -o faulthandler_exit_on_timeout=true
# In the order of the folders: unit tests, whose files are short, come last and end together. By its own, files of few and long tests would.
# Three processes on two cores, because many tests wait for processes, timers and the disk.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
# A group is a file, or the tests that change the machine's network together with the browser's (tests/e2e/conftest.py).
GROUPED := -n 2 --dist loadgroup --no-loadscope-reorder
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(HANGS) $(if $(SEED),--randomly-seed=$(SEED))
DASHBOARD := control_plane/static/index.html
# Without its bytecode, every process that a test starts would compile Everstep again.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help setup lock demo check mypy pyright check-terraform fix web wheel docs pictures test test-rest test-durations test-production test-dashboard-stories test-integrations-latest test-security simulate bad-day corruption mutants bench-first bench-interleave bench-data-plane bench-faults bench-scale bench-device bench-recovery bench-api bench-hostile bench-dashboard bench-durable bench-parity bench-integrations

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## virtual environment with everything, skipped when nothing changed

$(LOCAL): pyproject.toml requirements/uv.txt requirements/build.txt requirements/local.txt requirements/torch.txt
	@echo "==> set-up: virtual environment in .venv"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Everstep needs Python 3.11 or newer; this is " + sys.version)'
	@$(PYTHON) -m venv .venv
	@$(PIP) --require-hashes --no-deps -r requirements/uv.txt -r requirements/build.txt
	@echo "==> set-up: 100 packages of a local cluster, each checked by its hash"
	@$(call locked,requirements/local.txt)
	@echo "==> set-up: torch"
	@$(PIP) -r requirements/torch.txt
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(STAMP): $(LOCAL) requirements/development.txt
	@echo "==> set-up: 90 packages for tests and checks"
	@$(call locked,requirements/development.txt)
	@touch $@

$(WEB): $(LOCAL) requirements/web.txt
	@echo "==> set-up: node, for the dashboard"
	@$(call locked,requirements/web.txt)
	@touch $@

lock: setup  ## requirements/*.txt: the newest versions within the bounds of pyproject.toml, with the hashes of all platforms
	@$(LOCK) --group build -o requirements/build.txt
	@$(LOCK) --group installer -o requirements/uv.txt
	@$(LOCK) --group docs -o requirements/docs.txt
	@$(LOCK) --group terraform -o requirements/terraform.txt
	@$(LOCK) pyproject.toml --extra dev --extra check --extra web --overrides requirements/overrides.txt --no-emit-package torch --no-emit-package setuptools -o requirements/development.txt
	@$(LOCK) -c requirements/development.txt pyproject.toml --extra web -o requirements/web.txt
	@$(LOCK) -c requirements/development.txt pyproject.toml --extra local --overrides requirements/overrides.txt --no-emit-package torch --no-emit-package setuptools -o requirements/local.txt
	@$(LOCK) --no-emit-package setuptools -c requirements/development.txt -c requirements/torch.txt pyproject.toml --extra worker --extra training -o requirements/node.txt
	@$(LOCK) --no-emit-package setuptools -c requirements/development.txt -c requirements/torch.txt pyproject.toml --extra server --extra postgres -o requirements/server.txt

demo:  ## the set-up of a local cluster, then the main job: a training run that survives lost processes, instances and a lost group; KEEP=1: stays up, with the dashboard
	@$(PYTHON) examples/demo/preflight.py
	@$(MAKE) --no-print-directory $(LOCAL) $(if $(KEEP),web)
	@$(BIN)/python examples/demo/demo.py

check: setup  ## lint, types, contracts, and that what is made from the API is current
	@$(BIN)/ruff format --check --quiet . || { echo "formatting differs: run make fix"; exit 1; }
	@$(BIN)/ruff check .
	@$(MAKE) --no-print-directory --jobs 2 --output-sync mypy pyright
	@$(BIN)/ruff check --preview --select DOC102,DOC202 everstep control_plane worker infra
	@$(BIN)/python -m pytest -q --no-header --no-summary tests/tidy/test_public_docstrings.py -k raises
	@$(BIN)/lint-imports
	@$(BIN)/python -m control_plane.contract --check

mypy pyright: setup
	@$(BIN)/$@

fix: setup  ## format, mend what can be mended mechanically, renew generated documents
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .
	@$(BIN)/python web/build.py format
	@$(BIN)/python -m control_plane.contract
	@$(BIN)/python docs/generate.py

web: $(DASHBOARD)  ## the dashboard's build into control_plane/static, skipped when nothing changed; node comes from PyPI

$(DASHBOARD): $(WEB) docs/runbook.md $(shell find web -type f -not -path 'web/node_modules/*' 2>/dev/null)
	@$(BIN)/python web/build.py

wheel: setup web  ## dist/: a wheel that contains the dashboard
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w dist .
	@ls dist/*.whl

docs: build/docs-venv/.set-up  ## build/site: the documentation as a website; fails on a link that leads nowhere
	@rm -rf build/site-source && mkdir -p build/site-source
	@cp -r README.md ARCHITECTURE.md CHANGELOG.md CONTRIBUTING.md docs examples build/site-source
	@cp docs/site/nav.yml build/site-source/.nav.yml
	@NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --quiet && echo "build/site/index.html"

build/docs-venv/.set-up: requirements/docs.txt
	@$(PYTHON) -m venv build/docs-venv
	@build/docs-venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r $<
	@touch $@

check-terraform: build/terraform-venv/.set-up  ## the policy checker checkov over infra/terraform; fails on a finding without a reason in .checkov.yaml
	@cd infra/terraform && ../../build/terraform-venv/bin/checkov --config-file .checkov.yaml && echo "checkov: no findings"

build/terraform-venv/.set-up: requirements/terraform.txt
	@$(PYTHON) -m venv build/terraform-venv
	@build/terraform-venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r $<
	@touch $@

pictures: setup web  ## docs/pictures: the dashboard over the recorded incidents and the seeded world that its tests use
	@$(BIN)/python -m tests.dashboard --pictures docs/pictures

test: setup web  ## set-up, the dashboard's build and its tests, then the tests that find most per second: those without a cluster, three at a time, then end-to-end tests, two at a time
	@rm -rf build/durations
	@$(BIN)/python web/build.py test
	@$(PYTEST) $(PARALLEL) --junitxml=build/durations/parallel.xml -m 'not e2e and not rest and not production'
	@$(PYTEST) $(GROUPED) --junitxml=build/durations/e2e.xml -m 'e2e and not rest' tests/e2e
	@$(BIN)/python -m tests.durations missing

test-rest: setup web  ## all other tests, an hour or more: long matrices, variants, bad days; ONE_IN=10 draws a tenth of them, SEED repeats it
	@$(PYTEST) $(PARALLEL) --one-in=$(or $(ONE_IN),1) --junitxml=build/durations/rest.xml -m 'rest and not e2e'
	@$(PYTEST) $(GROUPED) --one-in=$(or $(ONE_IN),1) --junitxml=build/durations/rest-e2e.xml -m 'rest and e2e' tests/e2e tests/bad_day
	@$(BIN)/python -m tests.durations missing

test-durations: setup  ## the 50 slowest tests of the newest run of make test and make test-rest
	@$(BIN)/python -m tests.durations

test-production: setup  ## whole installations: Terraform's root `production`; two servers, HAProxy, PostgreSQL and SeaweedFS with faults and a bad day
	@$(PYTEST) -o faulthandler_timeout=2460 -m production tests/production

test-dashboard-stories: setup web  ## COUNT (1,000) random stories of the control plane: fails if figures of the dashboard's pages contradict; SEED repeats
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.dashboard.stories --count $(or $(COUNT),1000) $(if $(SEED),--seed $(SEED))

test-integrations-latest: setup  ## the integrations' tests with the newest versions of their frameworks, in an environment of their own
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.integrations_latest

test-security: setup  ## every test that replays an attack or shows a promise of docs/security.md
	@$(PYTEST) -m security

simulate: setup  ## random stories of the control plane and its world, FAULTS (500) acts long; SEED or STORY replays one
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.sim --faults $(or $(FAULTS),500) $(if $(SEED),--seed $(SEED)) $(if $(STORY),--story '$(STORY)')

bad-day: setup  ## a fleet on a bad day, MINUTES long (10 unless said), and what a checker from outside finds; SEED repeats one
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.bad_day --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

corruption: setup  ## COUNT (10,000) planted corruptions of slots, replicas, parity and objects in S3: counts by place and kind; fails if one is loaded; SEED repeats
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.corruption --count $(or $(COUNT),10000) $(if $(SEED),--seed $(SEED))

mutants: setup  ## COUNT (300) small faults planted in the cores, in at most 20 minutes: reports those that no test notices; SEED repeats
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants --count $(or $(COUNT),300) $(if $(SEED),--seed $(SEED))

bench-first: setup  ## the first measurements: seconds blocked per snapshot, slowdown, seconds per recovery; writes docs/benchmarks.md
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.first

bench-data-plane: setup  ## Everstep's data plane beside its peers and this machine's floors; writes its section of docs/benchmarks.md
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.data_plane

bench-interleave: setup  ## GEMINI's Figure 16 in network namespaces (needs root): snapshots between collectives; writes docs/benchmarks-interleave.md
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.interleave

bench-faults: setup  ## what faults of the data plane cost training, in network namespaces (needs root); writes docs/benchmarks-faults.md
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.faults

bench-scale: setup  ## how long placement takes for up to 10,000 nodes, and a round for up to 1,024 agents; writes docs/benchmarks-scale.md
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.scale

bench-parity: setup  ## memory, steps and restores of a group with parity, beside two copies
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.parity

bench-integrations: setup  ## a Trainer with Everstep beside its own saves and lm-resiliency
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.integrations

bench-device: setup  ## capture, restore and every-step snapshots on a GPU, where there is one; writes docs/benchmarks-device.md
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.device $(ARGUMENTS)

bench-api: setup  ## how fast the API, the agents' line, followed logs and the command line answer; writes docs/benchmarks-api.md
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.api

bench-hostile: setup  ## a well-behaved caller of the API beside hostile callers and agents, and the memory that these cost
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.api --only hostile

bench-recovery: setup  ## how long a failure holds training, beside torchrun and torchft; writes docs/benchmarks-recovery.md
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.interruption

bench-dashboard: setup web  ## how fast the dashboard is, in Chromium: the list of jobs, a fault, scrolling; writes docs/benchmarks-dashboard.md
	@$(BIN)/python -m benchmarks.dashboard

bench-durable: setup  ## checkpoints: transfers to S3, training during uploads, loads by other ranks; writes docs/benchmarks-durable.md
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.durable

# A newcomer needs Python 3.11, make and a C compiler; these targets do the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS := 1

# Two at once, since many start processes of their own.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

.PHONY: quickstart quickstart-vllm test test-extended test-all test-atropos test-trl test-skyrl test-verl test-ray \
	test-verifiers test-data test-export test-kubernetes test-dashboard test-transformers4 test-vllm test-transferqueue test-install soak soak-faults fuzz check docs bench \
	bench-rewards bench-scaling bench-rivals accept newest reference notebook lock clean

# Every package is pinned, and pip refuses a file with another hash. It prints what it does, since it takes minutes.
PIP := -m pip install --disable-pip-version-check --no-deps
LOCKED := $(PIP) --require-hashes --requirement
# The small build of torch if pip finds it, else the one for GPUs: install_torch ENVIRONMENT
define install_torch
	@$(1)/bin/python $(LOCKED) requirements/torch-cpu.txt || { \
		echo "pip finds no build of torch for CPUs: the one for GPUs follows, several GB. To avoid it, name PyTorch's index" \
			"for CPUs in PIP_EXTRA_INDEX_URL and start again."; \
		$(1)/bin/python $(LOCKED) requirements/torch-cuda.txt; }
endef
# This package itself, with the setuptools that was installed before: install_package ENVIRONMENT
define install_package
	$(1)/bin/python $(PIP) --no-build-isolation --editable .
endef
TORCH := requirements/torch-cpu.txt requirements/torch-cuda.txt

$(VENV)/.installed: pyproject.toml requirements/dev.txt $(TORCH)
	@echo "setting up $(VENV): about 125 packages, 400 MB to download with the build of torch for CPUs, 2 GB on disk; minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(LOCKED) requirements/dev.txt
	$(call install_torch,$(VENV))
	$(call install_package,$(VENV))
	$(BIN)/python -m pip check --disable-pip-version-check # --no-deps leaves out what is not in the list
	touch $@

quickstart: $(VENV)/.installed ## train a policy through the bus, and watch it
	$(BIN)/rolloutmq up examples/quickstart.toml

quickstart-vllm: $(VENV)/.installed .venv-vllm/.installed ## the same with vLLM, which maps the trainer's weights
	$(BIN)/rolloutmq up examples/quickstart-vllm.toml

test: $(VENV)/.installed ## the tests, in minutes: all but those that take long or run other software
	$(PYTEST) -m 'not rival and not extended'

test-extended: $(VENV)/.installed ## the tests that take long: whole runs, more kills, more parameters
	$(PYTEST) -m 'extended and not rival'

test-all: test test-extended ## every test that runs no other software

test-atropos: $(VENV)/.installed .venv-atropos/.installed ## Atropos' server, environment, trainer and tests, for real
	$(BIN)/python -m pytest -m rival tests/benchmarks/queues/test_atropos.py tests/benchmarks/queues/test_gateway.py \
		tests/services/gateway/atropos tests/services/programs tests/examples

test-trl: $(VENV)/.installed .venv-trl/.installed ## TRL's trainer on the bus, and our losses against those of TRL
	$(BIN)/python -m pytest -m 'rival and not extended' tests/trainer/integrations/trl tests/trainer/losses \
		tests/benchmarks/training/test_trl.py

test-skyrl: $(VENV)/.installed .venv-skyrl/.installed ## SkyRL's own trainers on the bus
	$(BIN)/python -m pytest -m rival tests/trainer/integrations/skyrl tests/benchmarks/queues/test_skyrl.py

test-verifiers: .venv-verifiers/.installed .venv-verifiers04/.installed ## environments of verifiers, in workers that are killed
	.venv-verifiers/bin/python -m pytest -m rival tests/services/worker/verifiers --ignore tests/services/worker/verifiers/tasksets
	.venv-verifiers04/bin/python -m pytest -m rival tests/services/worker/verifiers/tasksets

test-data: .venv-verifiers/.installed ## rows of data sets as tasks; the environment of verifiers has `datasets`
	.venv-verifiers/bin/python -m pytest -m rival tests/bus/tasks/test_rows.py

test-export: .venv-export/.installed ## experiment trackers, a receiver of traces and Prometheus, fed by telemetry
	.venv-export/bin/python -m pytest -m rival tests/services/telemetry/export

test-kubernetes: .venv-kubernetes/.installed ## the manifests of Kubernetes, by its schemas and that of KEDA
	.venv-kubernetes/bin/python -m pytest -m rival tests/launch/commands/remote/kubernetes

test-verl: $(VENV)/.installed .venv-verl/.installed ## verl's own trainers on the bus, with TransferQueue
	$(BIN)/python -m pytest -m 'rival and not extended' tests/trainer/integrations/verl

test-ray: .venv-ray/.installed ## producers, trainers and workers in a Ray cluster whose actors and nodes die
	.venv-ray/bin/python -m pytest -m rival tests/examples/ray tests/services/orchestrator/cluster/ray

test-transferqueue: $(VENV)/.installed .venv-transferqueue/.installed ## a short round through TransferQueue
	$(BIN)/python -m pytest -m rival tests/benchmarks/queues/test_transferqueue.py

test-vllm: $(VENV)/.installed .venv-vllm/.installed ## real vLLM against forward passes of transformers, and killed
	$(BIN)/python -m pytest -m rival tests/services/inference/vllm tests/services/worker/openai tests/trainer/weights

test-transformers4: $(VENV)/.installed .venv-transformers4/.installed ## tokenizers, read by the version before
	$(BIN)/python -m pytest -m rival tests/trainer/policy/test_tokenizer.py

test-dashboard: $(VENV)/.installed .venv-browser/.installed ## the page of a run in a real Chromium, which is the system's
	@command -v chromium chromium-browser google-chrome >/dev/null && command -v chromedriver >/dev/null || \
		echo "no Chromium with its driver, so these tests are skipped: apt-get install chromium chromium-driver"
	.venv-browser/bin/python -m pytest -m rival tests/services/dashboard/page

test-install: $(VENV)/.installed .venv-build/.installed ## the release, installed by pip on each Python and tried there
	$(PYTEST) --override-ini=faulthandler_timeout=0 -m rival tests/house/distribution # each has a limit of its own

GROUPS ?= 30000
KILLS ?= 60
SEED ?=

soak: $(VENV)/.installed ## kill, stop and abandon everything at random, and account for each group: GROUPS=... KILLS=... SEED=...
	$(BIN)/python -m benchmarks.soak --groups $(GROUPS) --kills $(KILLS) $(if $(SEED),--seed $(SEED))

soak-faults: $(VENV)/.installed ## the faults again, with ten times the rounds
	ROLLOUTMQ_SOAK_ROUNDS=100 $(BIN)/python -m pytest --timeout=0 --override-ini=faulthandler_timeout=0 tests/faults

FUZZERS ?=
SECONDS ?= 60

fuzz: $(VENV)/.installed ## hostile bytes, files and requests until one breaks something: FUZZERS=... SECONDS=... for each, SEED=...
	$(BIN)/python -m tests.fuzz $(FUZZERS) $(SECONDS) $(SEED)

check: $(VENV)/.installed ## style, types, and who may import whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python # and ask nobody for its newest version
	$(BIN)/lint-imports
	$(BIN)/python tests/house/prose.py
	$(MAKE) --no-print-directory docs

docs: $(VENV)/.installed ## the documentation as a site, in site/; needs no network
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict # no --quiet: it hides warnings from --strict
	$(BIN)/python tests/house/site/loads.py site

bench: $(VENV)/.installed ## the figures, with their rivals in the same run
	$(BIN)/python -m benchmarks

bench-rewards: $(VENV)/.installed ## whole runs that show that rewards and curriculum act, with their controls: an hour
	$(BIN)/python -m benchmarks.rewards

SEEDS ?= 20

bench-scaling: $(VENV)/.installed ## the bounds of the autoscaler on all simulated runs, or those left: SEEDS=... each
	nice $(BIN)/python -m benchmarks.scaling --seeds $(SEEDS)

bench-rivals: .venv-atropos/.installed .venv-transferqueue/.installed .venv-trl/.installed .venv-skyrl/.installed \
	.venv-vllm/.installed ## what some figures are compared with; optional

# Atropos whole: its server, its environments, its example trainer's client, and its own tests of its server. And this
# package: what an environment may use beside it, such as the client of OpenAI, is tried there.
.venv-atropos/.installed: pyproject.toml requirements/atropos.txt
	$(PYTHON) -m venv .venv-atropos
	.venv-atropos/bin/python $(LOCKED) requirements/atropos.txt
	$(call install_package,.venv-atropos)
	.venv-atropos/bin/python -m pip check --disable-pip-version-check # --no-deps leaves out what is not in the list
	touch $@

.venv-transferqueue/.installed: requirements/transferqueue.txt $(TORCH)
	$(PYTHON) -m venv .venv-transferqueue
	.venv-transferqueue/bin/python $(LOCKED) requirements/transferqueue.txt
	$(call install_torch,.venv-transferqueue)
	touch $@

# What builds a release, and checks it for an index.
.venv-build/.installed: requirements/build.txt
	$(PYTHON) -m venv .venv-build
	.venv-build/bin/python $(LOCKED) requirements/build.txt
	.venv-build/bin/python -m pip check --disable-pip-version-check # --no-deps leaves out what is not in the list
	touch $@

# The driver of a browser, and the checker of accessibility: npm compares it with the hash of its lock file.
.venv-browser/.installed: pyproject.toml requirements/browser.txt tests/services/dashboard/page/package-lock.json
	$(PYTHON) -m venv .venv-browser
	.venv-browser/bin/python $(LOCKED) requirements/browser.txt
	$(call install_package,.venv-browser)
	.venv-browser/bin/python -m pip check --disable-pip-version-check # --no-deps leaves out what is not in the list
	cp tests/services/dashboard/page/package.json tests/services/dashboard/page/package-lock.json .venv-browser
	cd .venv-browser && PATH="$$PWD/bin:$$PATH" npm ci --ignore-scripts --no-audit --no-fund
	touch $@

# vLLM alone: what runs in it of this package it finds by a link, see services/inference/vllm.
.venv-vllm/.installed: requirements/vllm.txt requirements/torch-cpu.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python $(LOCKED) requirements/vllm.txt --requirement requirements/torch-cpu.txt
	touch $@

.venv-transformers4/.installed: requirements/transformers4.txt
	$(PYTHON) -m venv .venv-transformers4
	.venv-transformers4/bin/python $(LOCKED) requirements/transformers4.txt
	touch $@

.venv-trl/.installed: pyproject.toml requirements/trl.txt $(TORCH)
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python $(LOCKED) requirements/trl.txt
	$(call install_torch,.venv-trl)
	$(call install_package,.venv-trl)
	touch $@

.venv-skyrl/.installed: pyproject.toml requirements/skyrl.txt $(TORCH)
	$(PYTHON) -m venv .venv-skyrl
	.venv-skyrl/bin/python $(LOCKED) requirements/skyrl.txt
	$(call install_torch,.venv-skyrl)
	$(call install_package,.venv-skyrl)
	.venv-skyrl/bin/python -m pip check --disable-pip-version-check # --no-deps leaves out what is not in the list
	touch $@

.venv-verifiers/.installed: pyproject.toml requirements/verifiers.txt $(TORCH)
	$(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python $(LOCKED) requirements/verifiers.txt
	$(call install_torch,.venv-verifiers)
	$(call install_package,.venv-verifiers)
	.venv-verifiers/bin/python -m pip check --disable-pip-version-check # --no-deps leaves out what is not in the list
	touch $@

.venv-verifiers04/.installed: pyproject.toml requirements/verifiers04.txt $(TORCH)
	$(PYTHON) -m venv .venv-verifiers04
	.venv-verifiers04/bin/python $(LOCKED) requirements/verifiers04.txt
	$(call install_torch,.venv-verifiers04)
	$(call install_package,.venv-verifiers04)
	.venv-verifiers04/bin/python -m pip check --disable-pip-version-check # --no-deps leaves out what is not in the list
	touch $@

.venv-export/.installed: pyproject.toml requirements/export.txt
	$(PYTHON) -m venv .venv-export
	.venv-export/bin/python $(LOCKED) requirements/export.txt
	$(call install_package,.venv-export)
	.venv-export/bin/python -m pip check --disable-pip-version-check # --no-deps leaves out what is not in the list
	touch $@

.venv-kubernetes/.installed: pyproject.toml requirements/kubernetes.txt
	$(PYTHON) -m venv .venv-kubernetes
	.venv-kubernetes/bin/python $(LOCKED) requirements/kubernetes.txt
	$(call install_package,.venv-kubernetes)
	.venv-kubernetes/bin/python -m pip check --disable-pip-version-check # --no-deps leaves out what is not in the list
	touch $@

# No `pip check`: two packages that verl declares are left out, see the file. verl also installs folders called `tests` and
# `scripts`, so nothing that runs here imports ours of these names.
.venv-verl/.installed: pyproject.toml requirements/verl.txt $(TORCH)
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python $(LOCKED) requirements/verl.txt
	$(call install_torch,.venv-verl)
	$(call install_package,.venv-verl)
	touch $@

# A run of a Ray cluster whole, its trainer too.
.venv-ray/.installed: pyproject.toml requirements/ray.txt $(TORCH)
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python $(LOCKED) requirements/ray.txt
	$(call install_torch,.venv-ray)
	$(call install_package,.venv-ray)
	.venv-ray/bin/python -m pip check --disable-pip-version-check # --no-deps leaves out what is not in the list
	touch $@

notebook: $(VENV)/.installed ## execute the notebook of the pages, and write its outputs and its page
	$(BIN)/python -m tests.house.site.notebook

lock: $(VENV)/.installed ## the hashes of the pinned packages, after a change of a version in requirements/
	$(BIN)/python tests/house/requirements/lock.py $(filter-out $(TORCH),$(wildcard requirements/*.txt)) requirements/torch-cuda.txt

accept: $(VENV)/.installed .venv-atropos/.installed .venv-trl/.installed .venv-skyrl/.installed .venv-verl/.installed \
	.venv-verifiers/.installed .venv-verifiers04/.installed .venv-transformers4/.installed .venv-vllm/.installed ## every figure that is promised, met or unmet
	$(BIN)/python -m benchmarks.accept

newest: $(VENV)/.installed ## the adapters against the newest releases of their frameworks; only reports
	$(BIN)/python -m tests.house.requirements.newest

reference: $(VENV)/.installed ## the pages of docs/reference that are made from the code
	$(BIN)/python -m rolloutmq.launch.reference docs/reference

clean:
	rm -rf site $(VENV) .venv-atropos .venv-transferqueue .venv-trl .venv-skyrl .venv-verl .venv-ray .venv-verifiers .venv-verifiers04 \
		.venv-export .venv-kubernetes .venv-transformers4 .venv-build .venv-vllm .venv-browser .venv-newest-* build dist *.egg-info src/*.egg-info .mypy_cache .pytest_cache .ruff_cache \
		.import_linter_cache .hypothesis runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

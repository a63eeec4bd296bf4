# make demo | check | test | lowest | e2e | real | chaos | soak | fuzz | cluster | versions | soak-steering | bench | bench-agent | bench-devices | bench-cluster |
# bench-storm | bench-hanging | bench-policies | bench-reviews | bench-sampling | bench-weights | bench-packing | bench-preemption | bench-recommend | bench-page | pictures | auto | overuse | gpu | gpu-cluster | docs | site |
# images | containers | newcomer | neighbours | samples | release | binary | publish-images | publish | lock: the targets of this file; the comment after ## describes each.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Each worker runs one module at a time, the longest first (tests/conftest.py). All tests run on six
# workers for two cores, because tests of real nodes and of whole installations wait half of the time.
# On other machines: make test WORKERS=8.
WORKERS := 6
LOADFILE := --dist loadfile --no-loadscope-reorder
# Collects all tests once in a new clone: the workers then find compiled sources, which each of them
# would compile otherwise, for 13 s.
COMPILED = @[ -d tests/app/__pycache__ ] || $(RUN) -m pytest -q --collect-only > /dev/null || true
unexport PYTHONDONTWRITEBYTECODE
# Outside of the clone, as the built binaries are: mypy compares the contents of files, not their
# times. In a new clone it would take 20 s of CPU otherwise.
CACHE := $(or $(HEADROOM_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/headroom)
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check --require-hashes

.PHONY: demo check test lint quick all lowest e2e real chaos soak fuzz cluster versions soak-steering bench bench-agent bench-devices \
	bench-cluster bench-storm bench-hanging bench-policies bench-reviews bench-sampling bench-weights bench-packing bench-preemption bench-recommend bench-page pictures auto overuse gpu gpu-cluster \
	docs site images containers newcomer neighbours samples release binary publish-images publish lock

demo: $(VENV)/demo.stamp  ## show what Headroom does, in a minute: no cluster, no GPU
	@$(RUN) -m benchmarks.demo $(ARGS)

check: $(VENV)/test.stamp  ## quick checks, in a minute: style, types, imports, unit and property tests
	@$(MAKE) --no-print-directory -j 2 lint quick

test: $(VENV)/test.stamp  ## all tests; the first run also builds a real API server: ALL=1 also for slow tests whose inputs did not change
	@$(RUN) -m tests.gobin.build
	@$(MAKE) --no-print-directory -j 2 lint all

lint: $(VENV)/test.stamp  # style, types, imports
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	@mkdir -p $(CACHE)
	MYPY_CACHE_DIR=$(CACHE)/mypy flock $(CACHE)/mypy.lock $(VENV)/bin/mypy
	PYTHONPATH=. $(VENV)/bin/lint-imports --no-logo
	vale=$$($(RUN) -m tests.gobin.build vale | cut -f 2) && $$vale --no-wrap --output line docs *.md

# Quick tests start no servers: one worker more than cores, and fewer random examples
# (tests/examples.py).
quick: $(VENV)/test.stamp
	$(COMPILED)
	TEST_QUICK=1 $(RUN) -m pytest -q -n $(shell expr $$(nproc) + 1) --maxprocesses 8 $(LOADFILE) -m "not slow" $(ARGS)

# Without slow modules that passed with the same inputs (tests/tiers): make test ALL=1 runs them.
all: $(VENV)/test.stamp
	$(COMPILED)
	$(RUN) -m pytest -q -n $(WORKERS) $(LOADFILE) -p tests.tiers.plugin --unchanged=$(if $(ALL),run,skip) $(ARGS)

LOWEST := .cache/lowest/bin
lowest:  ## quick tests of ports and commands with the lowest versions that pyproject.toml permits
	$(PYTHON) -m venv --clear .cache/lowest
	$(LOWEST)/pip install --quiet --disable-pip-version-check uv==0.13.9
	$(LOWEST)/uv pip compile --quiet --python $(LOWEST)/python --resolution lowest-direct --extra extender --extra agent --extra dev \
		pyproject.toml | $(LOWEST)/uv pip install --quiet --python $(LOWEST)/python -r -
	PYTHONPATH=$(CURDIR) TEST_QUICK=1 $(LOWEST)/python -m pytest -q -m "not slow" \
		tests/admission tests/console tests/kube tests/kubectl tests/recorder tests/server $(ARGS)

e2e: $(VENV)/test.stamp  ## tests against real kube-schedulers of three minor versions
	$(RUN) -m pytest -q tests/e2e $(ARGS)

real: $(VENV)/test.stamp  ## all components on twenty real nodes: duration of a burst and of a requeue
	TEST_REAL_NODES=20 TEST_REAL_ROUNDS=5 $(RUN) -m pytest -q tests/e2e/test_real_nodes.py $(ARGS)

chaos: $(VENV)/test.stamp  ## ten minutes of injected faults, then an audit: ARGS="--seed 1 --minutes 10"
	@$(RUN) -m tests.chaos $(ARGS)

soak: $(VENV)/test.stamp  ## memory of all processes in a day of autoscaling, churn and reconnects: ARGS="--pods 400"
	@$(RUN) -m tests.soak $(ARGS)

fuzz: $(VENV)/test.stamp  ## hostile input for every parser of foreign data: ARGS="--inputs 1000000 --seed 1"
	@PYTHONPATH=. $(RUN) -X faulthandler -m tests.fuzz $(ARGS)

cluster: $(VENV)/test.stamp  ## run a small real cluster for kubectl, until Ctrl-C
	@$(RUN) -m tests.e2e

versions: $(VENV)/test.stamp  ## as root: run the tests with real components on each minor of Kubernetes: ARGS="1.36 1.35"
	@$(RUN) -m tests.versions $(ARGS)

soak-steering: $(VENV)/test.stamp  ## run a steered node for half an hour: 2,000 different pods, 150 restarts
	@$(RUN) -m tests.kubelet.soak $(ARGS)

bench: $(VENV)/test.stamp  ## cost of the calls of kube-scheduler, relative to an echo of the same bodies
	$(RUN) -m benchmarks.hotpath $(ARGS)

bench-agent: $(VENV)/test.stamp  ## memory and CPU of an agent, and their growth
	$(RUN) -m benchmarks.agent $(ARGS)

bench-devices: $(VENV)/test.stamp  ## cost and risk of each device choice and of other schedulers
	$(RUN) -m benchmarks.device_truth $(ARGS)

bench-cluster: $(VENV)/test.stamp  ## pods per second of a real kube-scheduler: alone, with an empty extender, with Headroom
	$(RUN) -m benchmarks.cluster $(ARGS)

bench-storm: $(VENV)/test.stamp  ## delay of other pods by rejected pods that are retried
	$(RUN) -m benchmarks.storm $(ARGS)

bench-hanging: $(VENV)/test.stamp  ## delay of pods without a GPU by an extender that hangs: ARGS="--deployment default"
	$(RUN) -m benchmarks.hanging $(ARGS)

bench-policies: $(VENV)/test.stamp  ## CPU time of the API server for admission policies, with pods at its limits: ARGS=--each
	$(RUN) -m benchmarks.policies $(ARGS)

bench-reviews: $(VENV)/test.stamp  ## delay of honest pods by clients that flood the webhook
	$(RUN) -m benchmarks.reviews $(ARGS)

bench-sampling: $(VENV)/test.stamp  ## effect of percentageOfNodesToScore if one node of 5,000 fits
	$(RUN) -m benchmarks.sampling $(ARGS)

bench-weights: $(VENV)/test.stamp  ## which of kube-scheduler's own scores Headroom's weight outweighs
	$(RUN) -m benchmarks.weights $(ARGS)

bench-packing: $(VENV)/test.stamp  ## how much GPU memory each placement policy can reserve
	$(RUN) -m benchmarks.packing $(ARGS)

overuse: $(VENV)/test.stamp  ## as root: evictions of leaking pods on real kubelets: ARGS="--runs 100 --nodes 6 --seed 1"
	@$(RUN) -m benchmarks.overuse_kubelets $(ARGS)

bench-preemption: $(VENV)/test.stamp  ## preemption: victims, duration and number of filter calls
	$(RUN) -m benchmarks.preemption $(ARGS)

bench-recommend: $(VENV)/test.stamp  ## recommendations: bytes found and misses, beside other rules: ARGS=SUMMARIES.csv
	@PYTHONPATH=. $(RUN) -m benchmarks.recommend $(ARGS)

auto: $(VENV)/test.stamp  ## vram: auto on a real API server: 40 oversized pods on half the GPUs, and a judge
	@PYTHONPATH=. $(RUN) -m benchmarks.right_sizing $(ARGS)

pictures: $(VENV)/test.stamp  ## make the pictures of the docs from the running page: ARGS="--all /tmp/pictures"
	@PYTHONPATH=. $(RUN) -m benchmarks.pictures $(ARGS)

bench-page: $(VENV)/test.stamp  ## the page in a browser while 5,000 nodes report
	@PYTHONPATH=. $(RUN) -m benchmarks.page $(ARGS)

gpu: $(VENV)/agent.stamp  ## on a machine with a GPU: check the assumptions about the driver, under 10 minutes
	@$(RUN) -m benchmarks.gpu $(ARGS)

gpu-cluster: $(VENV)/test.stamp  ## as root, on a machine with a GPU: pods on it in a cluster of one node; without a GPU: ARGS=--pretend
	@$(RUN) -m tests.install.gpu_cluster $(ARGS)

docs: $(VENV)/test.stamp  ## generate the pages of docs/reference from the code and the manifests
	@PYTHONPATH=. $(RUN) -m reference

site: $(VENV)/test.stamp  ## build the site of the docs in .cache/site; dead links are errors: REPOSITORY=https://...
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet $(ARGS)

images:  ## build the images of extender and agent: make images BASE=python:3.12-slim@sha256:... (deploy/images.sh)
	@deploy/images.sh

containers: $(VENV)/test.stamp  ## as root: install the package of a release on containerd and runc, and look into the containers
	$(RUN) -m pytest -q tests/install/check_packaged.py $(ARGS)

newcomer: $(VENV)/test.stamp  ## as root: follow docs/get-started on a clean Debian, with a clock: ARGS=FILE of the transcript
	@$(RUN) -m tests.install.newcomer $(or $(ARGS),docs/design/first-hour.md)

neighbours: $(VENV)/test.stamp  ## as root: Headroom beside real components of others, which it builds: ARGS="-k kueue"
	$(RUN) -m pytest -q tests/neighbours/check_*.py $(ARGS)

samples: $(VENV)/test.stamp  ## start each sample for a framework with the framework's own parser: downloads 5 GB, needs cmake and g++
	$(RUN) -m pytest -q tests/samples/check_frameworks.py $(ARGS)

RELEASE := PYTHONPATH=. .cache/release/bin/python -m
REGISTRY_FLAG := $(and $(REGISTRY),--registry $(REGISTRY))
release: .cache/release/stamp  ## build all that is published, in dist/: make release VERSION=... (RELEASING.md)
	@$(RELEASE) release $(VERSION) $(and $(REPOSITORY),--repository $(REPOSITORY)) $(REGISTRY_FLAG)

binary: .cache/release/stamp  ## build the client without Python for this platform: make binary VERSION=...
	@$(RELEASE) release.binary $(VERSION)

publish-images: .cache/release/stamp  ## build and push the images, and write their digests; only the release workflow runs it
	@$(RELEASE) release.publish $(VERSION) $(REGISTRY_FLAG) --images

publish: .cache/release/stamp  ## sign and publish what was built; only the release workflow runs it
	@$(RELEASE) release.publish $(VERSION) $(REGISTRY_FLAG)

# Pins every dependency by its hashes. The lock files contain no registry addresses.
LOCK := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--no-header --no-emit-index-url --no-emit-find-links pyproject.toml
# The requirements of one extra alone, without those of the client.
EXTRA := $(PYTHON) -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*project["optional-dependencies"][sys.argv[1]], sep="\n")'
lock:  ## pin the dependencies again, after a change of pyproject.toml; needs uv
	$(LOCK) --all-extras -o requirements/test.txt
	$(LOCK) -c requirements/test.txt -o requirements/client.txt
	$(EXTRA) embedded | $(LOCK:pyproject.toml=-) -c requirements/test.txt -o requirements/demo.txt
	$(LOCK) -c requirements/test.txt --extra extender -o requirements/extender.txt
	$(EXTRA) agent | $(LOCK:pyproject.toml=-) -c requirements/test.txt -o requirements/agent.txt
	$(LOCK:pyproject.toml=requirements/build.in) -c requirements/test.txt -o requirements/build.txt
	$(LOCK:pyproject.toml=requirements/release.in) -c requirements/test.txt -o requirements/release.txt

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Headroom needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: requirements/demo.txt | $(VENV)/bin/python
	@echo "Installing what the demo needs into $(VENV) ..."
	@$(PIP) -r requirements/demo.txt
	@touch $@

$(VENV)/agent.stamp: requirements/agent.txt | $(VENV)/bin/python
	@echo "Installing what the agent needs into $(VENV) ..."
	@$(PIP) -r requirements/agent.txt
	@touch $@

$(VENV)/test.stamp: requirements/test.txt | $(VENV)/bin/python
	@echo "Installing what the tests need into $(VENV) ..."
	@$(PIP) -r requirements/test.txt
	@touch $@

.cache/release/stamp: requirements/release.txt
	@$(PYTHON) -m venv .cache/release
	@.cache/release/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/release.txt
	@touch $@

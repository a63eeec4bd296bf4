# make demo | check | test | e2e | real | chaos | fuzz | cluster | soak-steering | bench | bench-agent | bench-devices | bench-cluster |
# bench-storm | bench-sampling | bench-weights | bench-packing | bench-preemption | gpu | docs | lock:
# nothing else to remember.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# A module each, in the order of tests/conftest.py: the longest first. All tests run on four workers,
# also on two cores, because tests of real nodes and of whole installations wait half of their time.
LOADFILE := --dist loadfile --no-loadscope-reorder
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check --require-hashes

.PHONY: demo check test lint quick all e2e real chaos fuzz cluster soak-steering bench bench-agent bench-devices \
	bench-cluster bench-storm bench-sampling bench-weights bench-packing bench-preemption gpu docs lock

demo: $(VENV)/demo.stamp  ## the main job on this machine, in a minute: no cluster, no GPU
	@$(RUN) -m benchmarks.demo $(ARGS)

check: $(VENV)/test.stamp  ## the quick subset, in a minute: style, types, layers, unit and property tests
	@$(MAKE) --no-print-directory -j 2 lint quick

test: $(VENV)/test.stamp  ## everything; the first run builds a real API server and takes minutes
	@$(RUN) -m tests.gobin.build
	@$(MAKE) --no-print-directory -j 2 lint all

lint: $(VENV)/test.stamp  # style, types, layers
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	PYTHONPATH=. $(VENV)/bin/lint-imports --no-logo

# Nothing waits in quick tests: a worker for each core, and fewer random examples.
quick: $(VENV)/test.stamp
	TEST_QUICK=1 $(RUN) -m pytest -q -n auto $(LOADFILE) -m "not slow" $(ARGS)

all: $(VENV)/test.stamp
	$(RUN) -m pytest -q -n 4 $(LOADFILE) $(ARGS)

e2e: $(VENV)/test.stamp  ## the main cases alone, against real kube-schedulers of three minors
	$(RUN) -m pytest -q tests/e2e $(ARGS)

real: $(VENV)/test.stamp  ## the whole stack on twenty real nodes: what a burst and a wake-up take
	TEST_REAL_NODES=20 TEST_REAL_ROUNDS=5 $(RUN) -m pytest -q tests/e2e/test_real_nodes.py $(ARGS)

chaos: $(VENV)/test.stamp  ## ten minutes of seeded faults, then a verdict: ARGS="--seed 1 --minutes 10"
	@$(RUN) -m tests.chaos $(ARGS)

fuzz: $(VENV)/test.stamp  ## hostile input for all that reads what others write: ARGS="--inputs 1000000 --seed 1"
	@PYTHONPATH=. $(RUN) -X faulthandler -m tests.fuzz $(ARGS)

cluster: $(VENV)/test.stamp  ## a small real cluster to try with kubectl, until Ctrl-C
	@$(RUN) -m tests.e2e

soak-steering: $(VENV)/test.stamp  ## a steered node for half an hour: 2,000 pods of every shape, 150 restarts
	@$(RUN) -m tests.kubelet.soak $(ARGS)

bench: $(VENV)/test.stamp  ## what the hot path costs, as a ratio to an echo of the same bodies
	$(RUN) -m benchmarks.hotpath $(ARGS)

bench-agent: $(VENV)/test.stamp  ## what an agent costs its node: memory, CPU, and whether either grows
	$(RUN) -m benchmarks.agent $(ARGS)

bench-devices: $(VENV)/test.stamp  ## what each way to place pods costs and risks, beside the plugin
	$(RUN) -m benchmarks.device_truth $(ARGS)

bench-cluster: $(VENV)/test.stamp  ## pods a second of a real kube-scheduler: alone, with a bare extender, with ours
	$(RUN) -m benchmarks.cluster $(ARGS)

bench-storm: $(VENV)/test.stamp  ## what refused pods that are tried again and again cost the others
	$(RUN) -m benchmarks.storm $(ARGS)

bench-sampling: $(VENV)/test.stamp  ## what percentageOfNodesToScore costs where one node of 5,000 fits
	$(RUN) -m benchmarks.sampling $(ARGS)

bench-weights: $(VENV)/test.stamp  ## which of kube-scheduler's own preferences our weight beats
	$(RUN) -m benchmarks.weights $(ARGS)

bench-packing: $(VENV)/test.stamp  ## how much GPU memory each way to place pods can promise
	$(RUN) -m benchmarks.packing $(ARGS)

bench-preemption: $(VENV)/test.stamp  ## who is evicted for whom, how soon, and for how many filter calls
	$(RUN) -m benchmarks.preemption $(ARGS)

gpu: $(VENV)/agent.stamp  ## on a machine with a GPU: every claim about the driver, in under 10 minutes
	@$(RUN) -m benchmarks.gpu $(ARGS)

docs: $(VENV)/test.stamp  ## the pages that are made of the code: docs/settings.md
	@PYTHONPATH=. $(RUN) -m extender.config.reference > docs/settings.md.new && mv docs/settings.md.new docs/settings.md

# Pins every dependency with its hashes; the locks carry no addresses.
LOCK := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--no-header --no-emit-index-url --no-emit-find-links pyproject.toml
lock:  ## after a change of pyproject.toml; needs uv
	$(LOCK) --all-extras -o requirements/test.txt
	$(LOCK) -c requirements/test.txt --extra extender -o requirements/demo.txt
	$(LOCK) -c requirements/test.txt --extra extender --extra cluster -o requirements/extender.txt
	$(LOCK) -c requirements/test.txt --extra agent -o requirements/agent.txt
	$(LOCK:pyproject.toml=requirements/build.in) -c requirements/test.txt -o requirements/build.txt

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

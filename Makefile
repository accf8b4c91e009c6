# `make demo` and `make test` are the two commands to know. Both make .venv first when it is missing
# or pyproject.toml has changed; that takes minutes once and a moment afterwards.
#
# Every variable below can be given on the command line: make demo ARGS="--experts 4 --ep 2"

# Handed to what the target runs: the demo, pytest, the benchmarks.
ARGS ?=

# The interpreters. Left empty, .ci/venv.sh looks for one that really runs and says which it took.
PYTHON ?=
PYTHON312 ?=

# The Megatron-core that users are on, and the newest one (which needs Python 3.12). Beside the
# first comes one that has nothing but globals, for the tests of what works there.
MCORE ?= 0.16.1
MCORE_NEWEST ?= 0.19.2
MCORE_OLD := 0.12.0

# torch is installed only where none can be imported yet. All of megapg's tests run on the CPU, so
# a build for GPUs (gigabytes) is fetched only when asked for: by ALLOW_CUDA_TORCH=1, or by
# `make test-newest`, which says so. TORCH_INDEX is asked for a CPU build where pip's own indexes
# offer none, as PyPI on Linux; empty: ask no one.
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ALLOW_CUDA_TORCH ?=

# The oldest torch that megapg promises, the newest that there is, and for README's table those
# between: make test-torch TORCH_BETWEEN="2.7.1 2.8.0"
TORCH_LOWEST ?= 2.6.0
TORCH_BETWEEN ?=
TORCH_HIGHEST ?= 2.15.0

# Megatron-core between the two above.
CORES_BETWEEN ?= 0.17.1 0.18.2

# How many tests run at a time: three keep two cores busy, as many of them wait. 0: one, in pytest's
# own process, as `ARGS=--pdb` needs it.
WORKERS ?= 3

# A stamp says "installed". Its name carries the version: `make test MCORE=0.17.0` installs that.
READY := .venv/.ready-megatron-core-$(MCORE)
READY_NEWEST := .venv-newest/.ready-megatron-core-$(MCORE_NEWEST)
READY_DOCS := .venv-docs/.ready
READY_RAY := .venv/.ready-ray
READY_VERL := .corpora/verl/.ready
VERL_NEEDS := tests/support/verl-requirements.txt

# benchmarks/ and tools/ may be absent from a source archive.
SOURCES := megapg tests $(wildcard benchmarks tools)

export PYTHON TORCH TORCH_INDEX ALLOW_CUDA_TORCH
# The tests start interpreters by the hundred. Where none may keep bytecode each compiles megapg anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo demo-rl test test-quick test-slow test-faults test-newest test-torch test-cores test-gpu test-ray test-verl test-roll test-upstream bench bench-migrate figures docs lint clean distclean
.DEFAULT_GOAL := help

help:  ## list the targets (what a plain `make` does)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

setup: $(READY)  ## make .venv with torch, Megatron-core and megapg, for those who want it apart
	@echo ".venv is ready"

demo: $(READY)  ## train a small model on injected groups; options in ARGS, see `make demo ARGS=--help`
	.venv/bin/megapg demo $(ARGS)

demo-rl: $(READY_RAY)  ## train actor, critic and rollouts on a local Ray cluster, through two faults
	.venv/bin/megapg demo rl

# Each rank is a process of its own; with more threads than one they would fight for the cores.
# A file stays in one process, since its tests share what is dear to make. The files come in the order
# that tests/conftest.py puts them in; xdist's own has those of the fewest tests last, and some take long.
PYTEST = -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(READY)  ## run the tests (CPU only, minutes); pytest's options in ARGS
	OMP_NUM_THREADS=1 .venv/bin/python $(PYTEST) -m "not slow and not ray" $(ARGS)

test-quick: $(READY)  ## run the unit tests and a smoke test of each area: two minutes
	OMP_NUM_THREADS=1 .venv/bin/python $(PYTEST) --quick $(ARGS)

# By itself: its ranks have three seconds for what they do, beside others they may get none.
FAULTS = tests/sessions/test_fault_matrix.py

test-slow: $(READY)  ## run the matrices, the fuzzers and what else takes minutes
	OMP_NUM_THREADS=1 .venv/bin/python $(PYTEST) -m slow --ignore=$(FAULTS) $(ARGS)

test-faults: $(READY)  ## run every fault on every rank in every phase, with nothing beside it
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m slow $(FAULTS) $(ARGS)

test-newest: $(READY_NEWEST)  ## run the contract tests on the newest Megatron-core (python3.12, may download gigabytes)
	OMP_NUM_THREADS=1 .venv-newest/bin/python $(PYTEST) -m contract $(ARGS)

test-torch:  ## run what meets torch's changes on the oldest and the newest torch (downloads gigabytes)
	@sh .ci/test-versions.sh torch "$(TORCH_LOWEST) $(TORCH_BETWEEN) $(TORCH_HIGHEST)" $(MCORE) $(PYTEST) -m torch $(ARGS)

test-cores:  ## run the contract tests on the Megatron-cores between (python3.12, downloads gigabytes)
	@PYTHON312="$(PYTHON312)" sh .ci/test-versions.sh core "$(CORES_BETWEEN)" "" $(PYTEST) -m contract $(ARGS)

# One after the other: they share a cluster, and actors, which take seconds to start.
RAY = tests/launch/test_ray.py tests/docs/test_demo.py

test-ray: $(READY_RAY)  ## run the tests that need Ray, on a local cluster of two nodes
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m ray $(RAY) $(ARGS)

# Apart from .venv, in a folder of its own: 130 MB to download, 460 MB on disk.
test-verl: $(READY_VERL)  ## run verl's own engines on two layouts in one worker (downloads 130 MB once)
	OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR)/$(dir $(READY_VERL))$${PYTHONPATH:+:$$PYTHONPATH}" \
		.venv/bin/python -m pytest -m verl tests/sessions/test_verl.py $(ARGS)

# Nothing is fetched and nothing installed: ROLL is a checkout, and PYTHON has what it and the tests need.
test-roll:  ## run two training strategies of the ROLL at ROLL on two layouts in one worker
	OMP_NUM_THREADS=1 PYTHONPATH=".:$(ROLL):$(ROLL)/mcore_adapter/src$${PYTHONPATH:+:$$PYTHONPATH}" \
		$(or $(PYTHON),python3) -m pytest -m roll tests/sessions/test_roll.py $(ARGS)

# Nothing is fetched and nothing installed: MEGATRON is a checkout of Megatron-LM, and PYTHON has what
# its tests need, megapg's own requirements, and GPUs where there are any.
test-upstream:  ## run the unit tests of the Megatron-LM at MEGATRON on its globals and on sessions
	PYTHONPATH=".$${PYTHONPATH:+:$$PYTHONPATH}" $(or $(PYTHON),python3) -m tools.upstream $(MEGATRON) $(ARGS)

# Nothing is installed for it: the torch that belongs to the machine's driver is the one to ask.
test-gpu:  ## suspend, resume and count memory on this machine's GPUs, with the torch of PYTHON
	PYTHONPATH=".$${PYTHONPATH:+:$$PYTHONPATH}" $(or $(PYTHON),python3) -m benchmarks.gpu $(ARGS)

bench: $(READY)  ## run the benchmarks; options in ARGS
	.venv/bin/python -m benchmarks $(ARGS)

bench-migrate: $(READY)  ## migrate published code and check it (downloads 33 MB once); options in ARGS
	.venv/bin/python -m benchmarks.migrate $(ARGS)

figures: $(READY)  ## print the sizes of the sources; ARGS=--names lists them
	.venv/bin/python tools/figures.py $(ARGS)

docs: $(READY_DOCS)  ## build the documentation into build/site; ARGS=serve shows it, and follows changes
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs $(or $(ARGS),build)

lint: $(READY)  ## check format, lint and types
	.venv/bin/ruff format --check $(SOURCES)
	.venv/bin/ruff check $(SOURCES)
	.venv/bin/mypy

clean:  ## remove caches and build outputs; the environments stay
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove the environments and what bench-migrate downloaded too
	rm -rf .venv .venv-docs .venv-newest .venv-torch .venv-core .corpora

$(READY): pyproject.toml .ci/venv.sh
	@sh .ci/venv.sh .venv $(MCORE) 3.11 newer $(MCORE_OLD)
	@rm -f .venv/.ready-* && touch $@

$(READY_NEWEST): export PYTHON := $(PYTHON312)
$(READY_NEWEST): export ALLOW_CUDA_TORCH := 1
$(READY_NEWEST): pyproject.toml
	@sh .ci/venv.sh .venv-newest $(MCORE_NEWEST) 3.12
	@rm -f .venv-newest/.ready-* && touch $@

# Nothing is imported to build the documentation, so it takes neither torch nor Megatron-core.
$(READY_DOCS): pyproject.toml .ci/venv.sh
	@sh .ci/venv.sh .venv-docs none 3.11 newer
	@touch $@

$(READY_RAY): $(READY)
	.venv/bin/python -m pip install -qq -e '.[ray]'
	@touch $@

$(READY_VERL): $(wildcard $(VERL_NEEDS)) | $(READY)
	rm -rf $(@D)
	.venv/bin/python -m pip install -qq --no-deps --target $(@D) -r $(VERL_NEEDS)
	@touch $@

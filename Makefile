# Every verb sets up what it needs: a virtual environment in .venv with the package and its test extras.
# The first of these that is new enough. PYTHON=/path/to/python for another.
PYTHON ?= $(or $(shell for each in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && break; done),python3)
PYTHON3 ?= python3
VENV   := .venv
PURE   := tests/unit tests/sim tests/transcripts tests/fuzz
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
DEV    := $(VENV)/.ready-dev
READY  := $(VENV)/.ready
DEMO   := $(VENV)/.ready-demo
FRAMES := .venv-frameworks/.ready
# Wheels are built of the source archive, as whoever has only that builds them.
OF_SDIST = .venv-release/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --no-cache-dir
# For aarch64, by the compiler of ziglang, against an older glibc than msgspec and uvloop have there. It strips as it
# links: the `strip` of this machine may know no other. (The headers of Debian's own Python are for one machine only.)
FOR_AARCH64 = _PYTHON_HOST_PLATFORM=linux-aarch64 \
	CC="$(CURDIR)/.venv-release/bin/python -m ziglang cc -target aarch64-linux-gnu.2.28 -Wl,-s"

# Where this says not to keep bytecode, each of the thousands of processes that tests start compiles the package anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: check help record drift demo fuzz gpu hops causes test test-all conformance-preload sweep chaos inprocess-kills sim lint docs check-docs man frameworks bench dist release-check lock clean

check: $(DEV)  ## in a minute, without torch: lint, all tests that start no process, with fewer examples, and 200 simulated jobs
	@$(MAKE) --no-print-directory lint
	@$(BIN)/python -m pytest -q -n 3 --dist worksteal --quick -m "not (process or torch or etcd or root)" $(PURE) $(ARGS)
	@$(BIN)/python -m tests.sim --seeds 200

help:  ## this list
	@awk -F ':.*## +' '/^[a-z-]+:.*## /{printf "  make %-20s%s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(or $(wildcard $(READY)),$(DEMO))  ## a training job of torch loses a worker, then a node, and continues
	@$(BIN)/rallyctl demo --program examples/train_ddp.py --standby-program examples/train_ddp_inprocess.py $(ARGS)

# What fails beside other tests and starts processes is run once more, alone, and named at the end (tests/again.py).
test: $(READY)  ## what decides about a change, in eight minutes on two cores (which tests: tests/runs.py)
	@rm -f build/tests.txt
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not long" $(ARGS) || $(BIN)/python -m tests.again

test-all: $(READY)  ## everything: all tests, faults, simulated jobs and fuzzing, for a release (ARGS="simulated" for one part)
	@tests/debian.sh
	@$(MAKE) --no-print-directory $(FRAMES) || echo "without .venv-frameworks, whose packages cannot be had: their examples are not run"
	@$(BIN)/python -m tests.everything $(ARGS)

record: $(READY)  ## what torch answers, asked anew and written to tests/conformance/records (ARGS="-k signals" for some; WITH=PYTHON asks another torch)
	@$(BIN)/python -m tests.conformance.renew $(if $(WITH),--with $(WITH)) $(ARGS)

drift: $(READY)  ## what a version of torch has new, gone or changed beside ours (TORCH=2.15.0, a wheel or a folder; else the installed one)
	@$(BIN)/python -m tests.drift $(TORCH) $(ARGS)

conformance-preload: $(READY)  ## the same commands under torchrun and under rallyrun, whose workers are forked
	RALLYPOINT_TEST_PRELOAD=json $(BIN)/python -m pytest -n 2 --dist worksteal tests/conformance $(ARGS)

sweep: $(READY)  ## the coordinator of a job on etcd dies at each of its steps
	RALLYPOINT_SWEEP=1 $(BIN)/python -m pytest -n 2 tests/faults/test_etcd_steps.py $(ARGS)

chaos: $(READY)  ## random faults against real jobs of three agents (ARGS="--backend etcd --faults 100 --seed 7")
	@$(BIN)/python -m tests.chaos $(ARGS)

inprocess-kills: $(READY)  ## training that continues in process, without and with standby workers, through random kills, to the same loss
	@$(BIN)/python -m tests.inprocess_kills $(ARGS)

hops: $(READY)  ## through how many functions and files one event runs (ARGS="kill term" for some)
	@$(BIN)/python -m tests.hops $(ARGS)

causes: $(READY)  ## does the report name what to fix? 160 ways to end, right, silent or wrong (ARGS="--tool torchrun C1 C5" for some)
	@$(BIN)/python -m tests.causes $(ARGS)

sim: $(DEV)  ## 10,000 jobs in virtual time, with faults from seeds
	@$(BIN)/python -m tests.sim $(ARGS)

fuzz: $(READY)  ## each decoder of foreign bytes, guided by coverage, for FUZZ_SECONDS each (10); ARGS=TARGET for one
	@$(PIP) --only-binary=:all: --require-hashes -r requirements/fuzz.txt || echo "without atheris, which has no build for this Python"
	@$(BIN)/python -m tests.fuzz $(ARGS)

# With the Python that has torch for the GPUs here: what it needs is there, or is not fetched.
gpu:  ## on a machine with NVIDIA GPUs: what there is to see, as a table (PYTHON3=the Python with torch; ARGS="--help" says more)
	@PYTHONPATH=src:. $(PYTHON3) -m tests.gpu $(ARGS)

lint: $(DEV)  ## style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(DEV)  ## the reference pages and the site, in docs/_build/html; a warning is an error
	@$(BIN)/python -m docs.generate
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html $(ARGS)

check-docs: $(DEV)  ## in seconds: links, names, the commands of changed pages (ARGS=docs/PAGE.md for one), and the site as a preview
	@$(BIN)/python -m docs.check $(ARGS)

man: $(DEV)  ## the manual pages, in build/share; then man build/share/man/man1/rallyrun.1
	@$(BIN)/python -m docs.manual

frameworks: $(FRAMES)  ## all examples of other people's frameworks, with workers and nodes killed, stopped and preloaded
	@$(BIN)/python -m tests.frameworks $(ARGS)

bench: $(READY)  ## the budgets, as ratios to torchrun measured in turn in one run
	@$(BIN)/python -m benchmarks $(ARGS)

# The time in the archives: that of the commit, so that whoever builds it again gets the same bytes.
dist: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 1580601600)
dist: man  ## source archive, a wheel without the store in C for every system, and manylinux wheels with it (this machine's, aarch64)
	@$(PYTHON) -m venv .venv-release
	@.venv-release/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/release.txt
	@rm -rf dist
	@.venv-release/bin/python -m build --no-isolation --sdist
	@RALLYPOINT_BUILD=pure $(OF_SDIST) --wheel-dir dist dist/*.tar.gz
	@RALLYPOINT_BUILD=native $(OF_SDIST) --wheel-dir dist/here dist/*.tar.gz
	@RALLYPOINT_BUILD=native $(FOR_AARCH64) $(OF_SDIST) --wheel-dir dist/there dist/*.tar.gz
	@umask 022; export PATH="$(CURDIR)/.venv-release/bin:$$PATH"; \
		auditwheel repair --strip --wheel-dir dist dist/here/*.whl && auditwheel repair --wheel-dir dist dist/there/*.whl
	@rm -rf dist/here dist/there
	@.venv-release/bin/python -m twine check --strict dist/*

release-check: dist  ## what `make dist` has made, installed into each Python that is here and tried; ARGS="--help" says more
	@.venv-release/bin/python -m tests.packaging $(ARGS)

lock:  ## renew requirements/*.txt: what the verbs above install, with hashes (all but torch, whose builds differ)
	@uv pip compile pyproject.toml requirements/build.in --extra test --python-version 3.11 --generate-hashes \
		--override requirements/without-cuda.in \
		--no-emit-package torch --no-emit-package rallypoint --no-emit-index-url --no-emit-find-links --no-header \
		--upgrade --quiet -o requirements/test.txt
	@uv pip compile requirements/release.in --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-emit-find-links --no-header --upgrade --quiet -o requirements/release.txt
	@uv pip compile requirements/fuzz.in --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-emit-find-links --no-header --upgrade --quiet -o requirements/fuzz.txt
	@uv pip compile requirements/frameworks.in --python-version 3.11 --generate-hashes \
		--constraint requirements/test.txt --override requirements/without-cuda.in \
		--no-emit-package torch --no-emit-package numpy --no-emit-index-url --no-emit-find-links --no-header \
		--upgrade --quiet -o requirements/frameworks.txt

clean:  ## what the verbs above made
	rm -rf $(VENV) .venv-frameworks .venv-release dist src/rallypoint/store/_native*.so .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis \
		docs/_build docs/project build

# The package and torch, and nothing that only tests need.
$(DEMO): pyproject.toml src/rallypoint/base/version.py
	@echo "setting up $(VENV) with torch (the first time only)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -e . numpy torch==2.13.0
	@$(BIN)/python -m compileall -q src
	@touch $@

$(READY): $(DEV)
	@echo "fetching torch into $(VENV), for what runs beside it (the first time only)"
	@$(PIP) torch==2.13.0
	@touch $@

# Torch, and all else that the tests have, is that of the other environment.
$(FRAMES): requirements/frameworks.txt | $(READY)
	@echo "setting up .venv-frameworks, for the examples of other people's frameworks (the first time only)"
	@$(PYTHON) -m venv .venv-frameworks
	@packages='import sysconfig; print(sysconfig.get_path("purelib"))' && \
		echo "import site; site.addsitedir('$$($(BIN)/python -c "$$packages")')" \
		>"$$(.venv-frameworks/bin/python -c "$$packages")/rallypoint-tests.pth"
	@.venv-frameworks/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/frameworks.txt
	@DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(CURDIR)/.venv-frameworks/torch-extensions MAX_JOBS=2 .venv-frameworks/bin/python -c \
		"from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load(verbose=False)" >/dev/null 2>&1 || \
		echo "without DeepSpeed, whose operators could not be compiled"
	@touch $@

$(DEV): pyproject.toml requirements/test.txt src/rallypoint/base/version.py hatch_build.py build_native.py $(wildcard src/rallypoint/store/native/*.[ch])
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not on PATH; set PYTHON=/path/to/python (3.11 or newer)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: Rallypoint needs Python 3.11 or newer; set PYTHON=/path/to/python"; exit 1; }
	@echo "setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --require-hashes -r requirements/test.txt
	@$(PIP) --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -q src
	@touch $@

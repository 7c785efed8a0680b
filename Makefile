# Everything that one does with this repository. `make demo` and `make test` need nothing but
# python3 (3.11 or newer), gcc, make and git: they make .venv and install into it by themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What only the benchmarks over hosts compare with: torch, Open MPI, and nothing of ours.
PEERS := .venv-peers
# What only the tests of the front ends import: Ray, Dask and torch.
ENGINES := .venv-engines
# Of pytest. Many tests wait for what other processes do, so four keep two processors busy.
TEST_PROCESSES := 4
ROOMS := hoplite_mp._shm hoplite_mp._tasks hoplite_mp._reduce hoplite_mp._engine hoplite_mp._pages
# A change to one of these installs and compiles again; Python files are used where they lie.
BUILD_INPUTS := pyproject.toml setup.py $(wildcard cext/*)
SANITIZE := .build-sanitize

# Each of the thousands of processes that the tests start would otherwise compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test check bench bench-lan bench-deaths bench-applications bench-learning bench-engines bench-gloo peers engines \
        test-engines test-engines-short docs build debug sanitize tsan soak steady seeds mutants mutation-sample \
        test-wheel test-python files clean

help:
	@echo "make demo      the main job on this host, on real data"
	@echo "make test      every check: style, types, tests"
	@echo "make check     style, types, and the tests that start no cluster, in two minutes"
	@echo "make bench     the benchmarks"
	@echo "make bench-lan the benchmarks over emulated hosts, Gloo beside them, as root"
	@echo "make bench-deaths  what deaths in the middle cost, beside Gloo and Open MPI, as root"
	@echo "make bench-learning  every experiment of hoplite_mp.ml, on emulated hosts, as root"
	@echo "make bench-applications  whole applications on ours, Ray and Dask, over emulated hosts, as root"
	@echo "make bench-engines  broadcast and reduce inside Ray and Dask, beside their own, as root"
	@echo "make bench-gloo  a Group and torch over it beside Gloo, on this host"
	@echo "make peers     the environment of the peers, which these two make by themselves"
	@echo "make engines   the environment with Ray, Dask and torch, which the next two make by themselves"
	@echo "make test-engines  the tests of the front ends to Ray, Dask and torch, all of them"
	@echo "make test-engines-short  those that need one host and little time"
	@echo "make files     each file of the library and what it is for; WORDS=\"copies broadcast\": those with these words"
	@echo "make docs      the documentation as a web site, into docs/_build"
	@echo "make build     compile again what changed, in place"
	@echo "make debug     compile in place without optimisation, with asserts"
	@echo "make sanitize  the compiled modules' tests under ASan and UBSan"
	@echo "make tsan      the engine's threads, clients of shared memory, and a driver with eight threads, under ThreadSanitizer"
	@echo "make soak      the tests that run for minutes"
	@echo "make seeds     50 000 simulated runs under faults, with a ledger for each commit"
	@echo "make mutants   mistakes in shipped lines, each of which the simulation has to see"
	@echo "make mutation-sample  small changes at 300 places that chance chooses, each of which a test has to see"
	@echo "make steady    the whole suite six times on this commit, three of them on a busy machine"
	@echo "make test-wheel  the wheel in empty environments, with every Python that is found here"
	@echo "make test-python VERSION=3.15  the whole suite under another version of Python"
	@echo "make clean     remove everything that was built, keep $(VENV), $(PEERS), $(ENGINES), .pythons"

demo: $(VENV)/.installed-demo
	$(BIN)/hoplite-mp demo

# Types are checked beside the tests, which leave processors idle while they wait. What that says
# comes in one piece at the end; either one that fails fails the whole. OPENBLAS_THREAD_TIMEOUT=4
# makes OpenBLAS's threads sleep at once: they would spin after each product, for 4 % of all that the
# tests compute.
test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build
	@echo "beside pytest: mypy --strict, stubtest"; \
	{ trap 'kill $$!; exit 1' TERM; \
	  $(BIN)/mypy --strict & wait $$! && \
	  { $(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml $(ROOMS) & wait $$!; }; \
	} >build/types.log 2>&1 & types=$$!; \
	trap 'kill $$types 2>/dev/null; exit 130' INT TERM; \
	OPENBLAS_THREAD_TIMEOUT=4 $(BIN)/pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$types; checked=$$?; \
	cat build/types.log; \
	[ $$checked -eq 0 ] || echo "make test: mypy or stubtest has failed, see above"; \
	[ $$tests -eq 0 ] || echo "make test: pytest has failed, see above"; \
	[ $$tests -eq 0 ] && [ $$checked -eq 0 ]

# For the loop of a developer. Left out are clusters, and what is slow (tests/conftest.py has the list,
# from `--durations`): most of the simulation, and the largest state spaces. A later -m replaces the one
# of pyproject.toml.
check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OPENBLAS_THREAD_TIMEOUT=4 $(BIN)/pytest -q -n logical --dist loadfile --no-loadscope-reorder \
	    -m "(unit or component) and not slow and not soak"

bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks

# Hosts are emulated with network namespaces: needs root. Where the peers' environment cannot be made
# the benchmarks say so, and go on without it.
bench-lan: $(VENV)/.installed-bench
	@$(MAKE) --no-print-directory peers || true
	$(BIN)/python -m benchmarks.lan -n 4
	$(BIN)/python -m benchmarks.lan -n 8

bench-deaths: $(VENV)/.installed-bench
	@$(MAKE) --no-print-directory peers || true
	$(BIN)/python -m benchmarks.lan.deaths -n 8
	$(BIN)/python -m benchmarks.lan.sgd -n 8
	$(BIN)/python -m benchmarks.lan.deaths_beside -n 8

# Goes on where it was stopped; `... -m benchmarks.applications --report` prints what there is.
bench-applications: $(ENGINES)/.installed
	$(ENGINES)/bin/python -m benchmarks.applications

bench-learning: $(ENGINES)/.installed-learning
	$(ENGINES)/bin/python -m benchmarks.learning

bench-engines: $(ENGINES)/.installed
	$(ENGINES)/bin/python -m benchmarks.engines -n 8

bench-gloo: $(ENGINES)/.installed
	$(ENGINES)/bin/python -m benchmarks.engines.gloo_here

peers: $(PEERS)/.installed

engines: $(ENGINES)/.installed

# A later -m replaces the one of pyproject.toml.
test-engines: $(ENGINES)/.installed
	$(ENGINES)/bin/python -P -m pytest -m "long or not long" tests/engines

test-engines-short: $(ENGINES)/.installed
	$(ENGINES)/bin/python -P -m pytest -m "not long" tests/engines

files:
	@python3 docs/list_files.py $(WORDS)

docs: $(VENV)/.installed-docs
	rm -rf docs/_build
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs docs/_build

build: $(VENV)/.installed-dev
	$(BIN)/python setup.py --quiet build_ext --inplace

# The marker makes the next `make test` or `make demo` compile the usual way again.
debug: $(VENV)/.installed-dev
	HOPLITE_MP_DEBUG=1 $(BIN)/python setup.py --quiet build_ext --inplace --force \
	    --build-temp build/debug
	rm -f $(VENV)/.installed-*

# A tree of its own: the modules in place stay as they are. The preload is needed because python
# itself is not instrumented; leak detection is off because CPython keeps much until the end.
sanitize: $(VENV)/.installed-dev
	rm -rf $(SANITIZE)/lib
	mkdir -p $(SANITIZE)/lib
	HOPLITE_MP_SANITIZE=address,undefined HOPLITE_MP_DEBUG=1 $(BIN)/python setup.py --quiet \
	    build_ext --build-lib $(SANITIZE)/lib --build-temp $(SANITIZE)/objects
	tar -c --exclude='*.so' --exclude=__pycache__ hoplite_mp | tar -x -C $(SANITIZE)/lib
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" PYTHONMALLOC=malloc \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	$(BIN)/python -P -m pytest -p no:cacheprovider -o "pythonpath=$(SANITIZE)/lib ." \
	    -m "not soak or sanitized" tests/cext

# First programs of C alone. Then eight threads of a driver use every call, with instrumented modules in
# all processes of the cluster. The tool sees the GIL as a lock, because it intercepts the pthread calls
# of an interpreter that is not instrumented. So it finds races with what runs without the GIL (waits,
# copies, the engine's threads), and neither races that the GIL prevents nor those between processes.
TSAN := $(CC) -std=gnu11 -fno-strict-aliasing -Wall -Wno-sign-compare -O1 -g -fsanitize=thread -Icext -pthread
TSAN_S := 30
tsan: $(VENV)/.installed-dev
	mkdir -p $(SANITIZE)
	$(TSAN) tests/cext/race_engine.c cext/engine_*.c cext/reduce_kernels.c -lm -o $(SANITIZE)/race_engine
	$(TSAN) tests/cext/race_coll.c cext/engine_*.c cext/reduce_kernels.c -lm \
	    -o $(SANITIZE)/race_coll
	$(TSAN) tests/cext/race_shm.c -o $(SANITIZE)/race_shm
	$(TSAN) tests/cext/race_spans.c -o $(SANITIZE)/race_spans
	$(TSAN) tests/cext/race_file.c -o $(SANITIZE)/race_file
	TSAN_OPTIONS=halt_on_error=1 $(SANITIZE)/race_engine
	TSAN_OPTIONS=halt_on_error=1 $(SANITIZE)/race_coll
	TSAN_OPTIONS=halt_on_error=1 $(SANITIZE)/race_shm
	TSAN_OPTIONS=halt_on_error=1 $(SANITIZE)/race_spans
	TSAN_OPTIONS=halt_on_error=1 $(SANITIZE)/race_file
	rm -rf $(SANITIZE)/thread/lib $(SANITIZE)/thread/report.*
	mkdir -p $(SANITIZE)/thread/lib
	HOPLITE_MP_SANITIZE=thread $(BIN)/python setup.py --quiet \
	    build_ext --build-lib $(SANITIZE)/thread/lib --build-temp $(SANITIZE)/thread/objects
	tar -c --exclude='*.so' --exclude=__pycache__ hoplite_mp | tar -x -C $(SANITIZE)/thread/lib
	LD_PRELOAD="$$(gcc -print-file-name=libtsan.so)" PYTHONMALLOC=malloc \
	PYTHONPATH="$(CURDIR)/$(SANITIZE)/thread/lib" \
	TSAN_OPTIONS="log_path=$(CURDIR)/$(SANITIZE)/thread/report" \
	$(BIN)/python -P tests/tasks/thread_stress.py $(TSAN_S) $$$$; code=$$?; \
	cat $(SANITIZE)/thread/report.* 2>/dev/null && exit 1; exit $$code

# The fuzzer of the extra `soak` has no wheel for every Python: without it hypothesis does alone.
soak: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet 'atheris>=3.0' || echo "no atheris here: its tests skip"
	$(BIN)/pytest -m soak

# Goes on where it was stopped; `.venv/bin/python tests/steady.py --show` prints what there is.
steady: $(VENV)/.installed-dev
	$(BIN)/python tests/steady.py

# These three go on where they were stopped.
seeds: $(VENV)/.installed-dev
	$(BIN)/python -m tests.seeds

mutants: $(VENV)/.installed-dev
	$(BIN)/python -m tests.mutants.play

# In one process at the lowest priority: the planner's half takes a quarter of an hour, the node's hours.
mutation-sample: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet 'cosmic-ray>=8.7'
	$(BIN)/python -m tests.mutants.sample

test-wheel: $(VENV)/.installed-dev
	$(BIN)/python tests/wheel.py

# A Python that is not on this machine comes from Debian's unstable suite, into .pythons/, as root.
test-python:
	@[ -n "$(VERSION)" ] || { echo "Name a version: make test-python VERSION=3.15"; exit 1; }
	$(PYTHON) tests/python_version.py $(VERSION)

clean:
	rm -rf build dist $(SANITIZE) docs/_build *.egg-info hoplite_mp/*.so
	rm -f $(VENV)/.installed-*

# In CI an environment is used once, and little of it, so Python compiles each module when it is
# imported first, which takes less than to compile all of them, as pip does elsewhere.
LAZILY := $(if $(CI),--no-compile)

# editable_mode=compat installs the package as a path. Without it pip installs a module that finds the
# package, and importing that takes each start of Python as long as all the rest of the start.
# One marker for each extra: .installed-demo, .installed-dev, .installed-bench, .installed-docs.
# The modules go first, so that none compiled with other flags or from other sources stays.
$(VENV)/.installed-%: $(BUILD_INPUTS) | $(VENV)/.made
	rm -f hoplite_mp/*.so
	$(BIN)/python -m pip install --quiet $(LAZILY) --editable '.[$*]' --config-settings editable_mode=compat
	@touch $@

# Begins anew after a change of the pins, and after a failure: nothing is left half made.
$(PEERS)/.installed: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv --clear $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --requirement $<
	@touch $@

# The package is used where it lies, with the modules that were compiled for $(VENV): installing it
# would compile them again, which takes longer than all the rest.
$(ENGINES)/.installed: pyproject.toml tests/engines/requirements.txt | $(VENV)/.installed-dev
	$(PYTHON) -m venv $(ENGINES)
	@$(PYTHON) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	    print(*p["dependencies"], *(r for extra in ("ray", "dask", "torch") \
	        for r in p["optional-dependencies"][extra]), sep="\n")' >$(ENGINES)/needs.txt
	$(ENGINES)/bin/python -m pip install --quiet $(LAZILY) --requirement $(ENGINES)/needs.txt \
	    --requirement tests/engines/requirements.txt
	@$(ENGINES)/bin/python -c 'import os, sysconfig; \
	    open(sysconfig.get_path("purelib") + "/hoplite_mp.pth", "w").write(os.getcwd() + "\n")'
	@touch $@

$(ENGINES)/.installed-learning: benchmarks/learning/requirements.txt | $(ENGINES)/.installed
	$(ENGINES)/bin/python -m pip install --quiet --requirement $<
	@touch $@

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || \
	    { echo "hoplite_mp needs Python 3.11 or newer; there is no '$(PYTHON)' here."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "hoplite_mp needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	           "Name another one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "$(PYTHON) has no venv module; install it (Debian, Ubuntu: apt install" \
	           "python3-venv)."; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig as s; \
	    sys.exit(not os.path.exists(os.path.join(s.get_path("include"), "Python.h")))' || \
	    { echo "Python.h of $(PYTHON) is missing; install the headers (Debian, Ubuntu: apt" \
	           "install python3-dev)."; exit 1; }
	@command -v gcc >/dev/null || \
	    { echo "There is no gcc here; install it (Debian, Ubuntu: apt install gcc)."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# make install | demo | demo-shrink | test | test-alone | test-slow | test-matrix | test-zoo | lint | format | bench | clean. PYTHON is any Python >= 3.11.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := ds_hooks squeezer trials launch benchmarks examples tests

# DeepSpeed compiles nothing at install time; DS_BUILD_OPS says so even where a CUDA toolkit is found.
export DS_BUILD_OPS := 0
# ninja, for the operation that DeepSpeed compiles in its first run, lies in the environment.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# That operation is this environment's own: two environments that share one compile it over and over.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions
# Tests and demos start many processes, each of which would otherwise compile our modules again.
unexport PYTHONDONTWRITEBYTECODE
# DeepSpeed compiles an operation in the first run of an environment, which takes up to a minute.
COMPILE := DS_ACCELERATOR=cpu $(BIN)/python -c 'from deepspeed.comm.torch import build_shm_op; build_shm_op()' > /dev/null

# Of the interpreter that shows our Triton kernels without a GPU. A GPU build of torch brings the release that it needs,
# so constraints.txt has none; and in the environment, it would have torch and transformers do more than on a CPU.
TRITON := 3.9.0

.PHONY: install demo demo-shrink test lint-beside-preparation test-alone test-slow test-matrix test-zoo lint format bench clean
.DELETE_ON_ERROR:

install: $(VENV)/.installed

# torch first: DeepSpeed's setup looks at it. Done again when a pin or a requirement changes.
# Python compiles a module when it first imports it; most of these it never does.
$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=…")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q --no-compile -c constraints.txt setuptools torch numpy
	$(PIP) install -q --no-compile -c constraints.txt --no-build-isolation deepspeed
	$(PIP) install -q --no-compile -c constraints.txt --no-build-isolation -e '.[test]'
	touch $@

$(VENV)/triton/.$(TRITON): | $(VENV)/.installed
	rm -rf $(@D)
	$(PIP) install -q --no-deps --no-compile --target $(@D) triton==$(TRITON)
	touch $@

# On CPUs, with one thread per rank and nothing to compile, so that the study takes the same part of each run wherever
# it is. It begins anew each time.
demo: install
	rm -rf runs/demo/study
	-$(COMPILE)
	DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 $(BIN)/ds_squeeze --squeezer examples/demo.toml --num_accelerators 2 examples/pretrain.py

# Tunes surrogates of a model in the same job's bubbles, and trains the model itself afterwards.
demo-shrink: install
	rm -rf runs/demo-shrink/study
	DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 $(BIN)/ds_squeeze --squeezer examples/shrunk_demo.toml --num_accelerators 2 examples/pretrain.py
	$(BIN)/trials transfer examples/shrunk_digits.py --top 1 --directory runs/demo-shrink/study

# A main job on all cores is tested alone: side tasks have the idle class, so beside anything else they starve. Then each
# worker has a core for one test at a time.
# A file's tests share what is made once for all of them; the longest files come first.
# A worker that crashes ends the run: to replace one with files left, pytest-xdist may wait for ever.
SIDE_BY_SIDE := -n logical --maxprocesses 8 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder -p tests.support.own_core
PYTEST := $(BIN)/python -m pytest --durations=30 --durations-min=5
# A test that hangs says where, and ends the run too.
UNHUNG := -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
test: lint-beside-preparation test-alone
	$(PYTEST) $(UNHUNG) -m "not slow and not alone" $(SIDE_BY_SIDE) tests/integration tests/conformance tests/unit

# The linters need one core for a minute. Meanwhile, on another one, DeepSpeed compiles the operation, Triton is
# unpacked, and Python compiles the tests with all that they import, which each of their processes would do again.
lint-beside-preparation: install
	{ $(COMPILE) && $(MAKE) --no-print-directory $(VENV)/triton/.$(TRITON) && \
	{ $(BIN)/python -m pytest --collect-only -q > /dev/null || true; }; } & \
	preparing=$$!; $(MAKE) --no-print-directory lint && wait $$preparing

test-alone: install
	$(PYTEST) $(UNHUNG) -m "alone and not slow" tests/integration

test-slow: install $(VENV)/triton/.$(TRITON)
	$(BIN)/python -m pytest -m slow

# Losses on four releases of DeepSpeed, each in an environment of its own.
test-matrix: install
	$(BIN)/python -m tests.matrix
	$(BIN)/python -m tests.support.document_tables

# Their pins in constraints.txt are of releases that take torch as it is.
test-zoo: install
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[zoo]'
	$(BIN)/python -m pytest tests/zoo

lint: install
	$(BIN)/lint-imports --no-cache
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: install
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

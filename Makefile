# Two commands matter: `make quickstart` and `make test`. `make help` lists the rest.
#
# Everything is installed into $(VENV) on the first call and not touched again until pyproject.toml, setup.py, this file or
# TORCH changes: a second call needs no network.

PYTHON ?= python3
VENV   ?= .venv

# Any pip requirement for torch: a version, a wheel on disk, or a version with an index (see README.md for a CPU build).
# What the environment was made with is remembered, so later calls need not repeat it.
DEFAULT_TORCH := torch==2.13.0
ifeq ($(origin TORCH),undefined)
TORCH := $(shell cat $(VENV)/.torch 2>/dev/null || echo '$(DEFAULT_TORCH)')
endif
# Triton 3.6 interprets kernels on a CPU, and fails there with numpy 2.4. CUDA builds of torch bring their own Triton.
NUMPY  := numpy<2.4
TRITON := triton==3.6.0

PY          := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check --quiet
JOBS        ?= 2
PYTEST      := OMP_NUM_THREADS=1 $(PY) -m pytest
PARALLEL    := -n $(JOBS) --dist loadgroup
ARGS        ?=

.PHONY: help quickstart test test-full test-gpu lint gates docs check-docs install install-test install-ci clean FORCE
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   install, then train a small mixture of experts on two processes (minutes, CPU)"
	@echo "make test         install, then run the tests that every change must pass (ARGS='-k name' selects)"
	@echo "make test-full    the whole matrices as well"
	@echo "make test-gpu     the tests that need an accelerator, with the torch that is there"
	@echo "make lint         formatter, linter, types, import layers"
	@echo "make gates        lint, architecture test, generated documents: what CI runs before the tests"
	@echo "make docs         write docs/claims.md and the status table of README.md again"
	@echo "make clean        remove builds and caches, keep $(VENV) and runs/"
	@echo "variables         PYTHON=$(PYTHON)  VENV=$(VENV)  TORCH='$(TORCH)'  JOBS=$(JOBS)"

# ---------------------------------------------------------------------------------------------------- installation
$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "PYTHON=$(PYTHON): Python 3.10 or newer is needed; name one, as in make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "python -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }

# rewritten only when the requirement changes, so that the stamps below follow it
$(VENV)/.torch: FORCE | $(PY)
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

INPUTS := pyproject.toml setup.py Makefile $(wildcard megatron/core/datasets/helpers.cpp) $(VENV)/.torch

$(VENV)/.installed-base: $(INPUTS)
	@echo "installing $(TORCH) and this package into $(VENV) (once; later calls need no network)"
	xargs $(PIP_INSTALL) '$(NUMPY)' < $(VENV)/.torch
	@if [ "$$(uname -s)" = Linux ] && ! $(PY) -c 'import triton' 2>/dev/null; then \
	  echo "$(PIP_INSTALL) '$(TRITON)'"; $(PIP_INSTALL) '$(TRITON)'; fi
	$(PIP_INSTALL) --editable . '$(NUMPY)'
	@if ls megatron/core/datasets/helpers_cpp*.so >/dev/null 2>&1; then echo "index builder: C++"; \
	  else echo "index builder: NumPy (no C++ compiler was found; same bits, slower)"; fi
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-base
	$(PIP_INSTALL) --editable '.[test]' '$(NUMPY)'
	@touch $@

$(VENV)/.installed-ci: $(VENV)/.installed-base
	$(PIP_INSTALL) --editable '.[ci]' '$(NUMPY)'
	@touch $@ $(VENV)/.installed-test

install: $(VENV)/.installed-base
install-test: $(VENV)/.installed-test
install-ci: $(VENV)/.installed-ci

# ---------------------------------------------------------------------------------------------------------- commands
quickstart: install
	PYTHON="$(abspath $(VENV))/bin/python" bash examples/tiny_moe.sh

test: install-test
	$(PYTEST) $(PARALLEL) -m 'not full and not gpu' $(ARGS)

test-full: install-test
	$(PYTEST) $(PARALLEL) -m 'not gpu' --evidence cpu $(ARGS)
	$(PY) tools/claims.py

# On a machine with accelerators the environment is usually given: PY=python3 uses it as it is.
test-gpu:
	$(PY) tests/gpu_tests/run.py $(ARGS)

lint: install-ci
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(PY)
	$(VENV)/bin/lint-imports

gates: lint check-docs
	$(PYTEST) -q tests/unit_tests/test_architecture.py

docs: install
	$(PY) tools/claims.py
	$(PY) tools/status_table.py

check-docs: install
	$(PY) tools/claims.py --check
	$(PY) tools/status_table.py --check

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache
	find megatron tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

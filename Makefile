# Each target first makes .venv from a lock file: `make test LOCK=cpu PYTHON=python3.12`.
PYTHON ?= python3
LOCK ?= $(if $(shell command -v nvidia-smi 2>/dev/null),cuda,cpu)
# Where torch's CPU build is, unless pip finds it already; PyPI has only the CUDA build.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := .venv/bin
# The locks are complete, and two packages in them disagree on a third (requirements/README.md): no dependency resolution.
INSTALL := $(BIN)/pip install -qq --no-deps --no-compile --disable-pip-version-check
COMPILE := $(BIN)/uv pip compile --quiet --no-annotate --no-header --only-binary :all: --python-platform x86_64-manylinux_2_31

.PHONY: demo test lint lock clean

demo: .venv/installed
	$(BIN)/qerl-pl demo

test: .venv/installed
	$(BIN)/pytest

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/codespell

# Where torch's index cannot be reached: make lock TORCH_BACKEND="--find-links FOLDER_WITH_ITS_WHEEL"
TORCH_BACKEND ?= --torch-backend cpu
FOR_311 := --python-version 3.11 --override requirements/overrides.txt

lock: .venv/installed
	$(COMPILE) requirements/cpu.in $(FOR_311) --override requirements/cpu-overrides.txt $(TORCH_BACKEND) -o requirements/cpu.lock
	$(COMPILE) requirements/cuda.in $(FOR_311) -o requirements/cuda.lock
	@# The same pins must have wheels for the later Pythons (torch's CPU build, which PyPI lacks, is left out).
	for v in 3.12 3.13; do for lock in cpu cuda; do \
		grep -v '^torch==.*+cpu' requirements/$$lock.lock | $(COMPILE) - --no-deps --python-version $$v >/dev/null || exit 1; \
	done; done

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# A file named after the lock says that .venv holds it; a changed lock updates .venv, another lock replaces it.
.venv/$(LOCK): requirements/$(LOCK).lock
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null || \
		{ echo "qerl-pl needs Python 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) -V 2>&1 || true). Try: make PYTHON=python3.12" >&2; exit 1; }
	@test -e $@ || $(PYTHON) -m venv --clear .venv
	@echo "Installing $< into .venv (a few minutes)"
	@torch=$$(grep '^torch==.*+cpu' $<) || exit 0; \
		$(INSTALL) $$torch 2>/dev/null || $(INSTALL) --index-url $(TORCH_INDEX) $$torch
	@$(INSTALL) -r $<
	@touch $@

.venv/installed: .venv/$(LOCK) pyproject.toml qerl_pl/__init__.py
	@$(INSTALL) --no-build-isolation -e .
	@touch $@

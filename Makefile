# `make demo` and `make test` set themselves up on a fresh machine: a virtual environment with the CPU build of PyTorch.
# On an accelerator, install with the vendor's extra instead: pip install "hal-attn[cuda,demo]".

PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
CONSTRAINTS := ci/constraints-cpu.txt
QUERY ?=

.PHONY: demo test check lint types contracts unit clean

demo: $(VENV)/.demo
	$(VENV)/bin/hal-attn demo $(if $(QUERY),"$(QUERY)")

test: lint types contracts unit

check: lint types contracts

lint: $(VENV)/.test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/.test
	$(RUN) -m mypy

contracts: $(VENV)/.test
	$(VENV)/bin/lint-imports

unit: $(VENV)/.test
	$(RUN) -m pytest -n 2 --dist worksteal

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# PyTorch first and alone, pinned by the constraints: a looser request would bring a build for an accelerator.
$(VENV)/.torch: $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) torch
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable ".[demo]"
	touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable ".[demo,dev]"
	touch $@ $(VENV)/.demo

# `make demo` and `make test` set themselves up on a fresh machine: a virtual environment with the CPU build of PyTorch.
# On an accelerator, install with the vendor's extra instead: pip install "hal-attn[cuda,demo]".

PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
CONSTRAINTS := ci/constraints-cpu.txt
QUERY ?=

VENDOR_SOURCES := $(VENV)/vendor-sources
ASCEND_VENV ?= .venv-ascend

.PHONY: demo test check lint types contracts unit browser vendor-sources ascend-contract clean

demo: $(VENV)/.demo
	$(VENV)/bin/hal-attn demo $(if $(QUERY),"$(QUERY)")

test: lint types contracts unit ascend-contract

check: lint types contracts

lint: $(VENV)/.test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/.test
	$(RUN) -m mypy

contracts: $(VENV)/.test
	$(VENV)/bin/lint-imports

unit: $(VENV)/.test vendor-sources browser
	VENDOR_SOURCES=$(VENDOR_SOURCES) $(RUN) -m pytest -n 2 --dist worksteal

# Chromium, in which the tests open the report of `hal-attn verify`.
browser:
	ci/browser

# The sources of vendors' newest releases, whose signatures the tests compare; `rm -r` the folder to look for newer ones.
vendor-sources: $(VENV)/.test
	$(RUN) ci/vendor_sources.py $(VENDOR_SOURCES)

# The Ascend tests once more, through the dispatcher of the real torch_npu over a stand-in for CANN (needs a C compiler).
ascend-contract:
	$(PYTHON) ci/ascend_contract/environment.py run --folder $(ASCEND_VENV) tests/vendors/ascend_contract tests/ascend \
		--ascend-library torch_npu

clean:
	rm -rf $(VENV) $(ASCEND_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

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

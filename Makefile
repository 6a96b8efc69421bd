# Two commands set everything up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements/constraints.txt

.PHONY: demo test test-all lint bench docs clean

demo: $(VENV)/.installed          ## tune the char-GPT example: a few minutes on two cores
	$(BIN)/saturate tune --budget 4m -- $(BIN)/python examples/char_gpt.py

test: $(VENV)/.tested             ## lint, and all tests but the slow ones
	$(BIN)/ruff check src tests bench examples
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: $(VENV)/.tested         ## the slow tests as well
	$(BIN)/python -m pytest -m "not gpu"

bench: $(VENV)/.tested            ## every benchmark in full: some four hours; read bench/README.md first
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/flops.py
	$(BIN)/python bench/step_split.py
	$(BIN)/python bench/diagnosis.py
	$(BIN)/python bench/verify.py
	$(BIN)/python bench/trace_readers.py
	$(BIN)/python bench/aa.py --simulated
	$(BIN)/python bench/aa.py --real 40
	$(BIN)/python bench/turns.py
	$(BIN)/python bench/expert.py
	$(BIN)/python bench/regret.py
	$(BIN)/python bench/activation_memory.py
	$(BIN)/python bench/checkpoint.py
	$(BIN)/python bench/incremental.py
	$(BIN)/python bench/loader.py
	$(BIN)/python bench/fit.py
	$(BIN)/python bench/inference.py
	$(BIN)/python bench/inference_search.py
	$(BIN)/python bench/speculative.py

docs: $(VENV)/.installed          ## the pages of techniques and findings, from their docstrings
	$(BIN)/python docs/generate.py

$(VENV)/.installed: pyproject.toml requirements/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy
	$(PIP) --editable .
	touch $@

$(VENV)/.tested: $(VENV)/.installed requirements/test.txt requirements/examples.txt
	$(PIP) --requirement requirements/test.txt --requirement requirements/examples.txt
	sh scripts/install-browser.sh
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache

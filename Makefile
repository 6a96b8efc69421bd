# Two commands set everything up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements/constraints.txt

# Tests have one thread each. Each process of theirs takes a gigabyte or two with what it starts.
SIDE_BY_SIDE := --numprocesses auto --maxprocesses 4 --dist worksteal

.PHONY: demo test test-all lint bench docs clean

demo: $(VENV)/.installed          ## tune the char-GPT example: a few minutes on two cores
	$(BIN)/saturate tune --budget 4m -- $(BIN)/python examples/char_gpt.py

lint: $(VENV)/.tested             ## ruff
	$(BIN)/ruff check src tests bench examples docs

test: lint                        ## lint, and all tests but the slow ones
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow and not gpu"

test-all: $(VENV)/.tested         ## the slow tests as well
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not gpu"

# In order; one that misses its targets does not keep the others from running.
BENCHMARKS := overhead.py flops.py step_split.py diagnosis.py verify.py trace_readers.py "aa.py --simulated" "aa.py --real 40" \
	turns.py expert.py regret.py activation_memory.py checkpoint.py incremental.py loader.py fit.py inference.py \
	inference_search.py inference_trained.py candidate_start.py cache_lines.py speculative.py

bench: $(VENV)/.tested            ## every benchmark in full: more than seven hours; read bench/README.md first
	@missed=; for benchmark in $(BENCHMARKS); do \
		echo "python bench/$$benchmark"; $(BIN)/python bench/$$benchmark || missed="$$missed $$benchmark,"; \
	done; if [ -n "$$missed" ]; then echo "missed a target, or failed:$${missed%,}"; exit 1; fi

docs: $(VENV)/.installed          ## the pages of techniques and findings, from their docstrings
	$(BIN)/python docs/generate.py

$(VENV)/.installed: pyproject.toml requirements/constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("saturate needs Python 3.11 or newer, and this is %s: name one, as in make test PYTHON=python3.12" % sys.version.split()[0])'
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

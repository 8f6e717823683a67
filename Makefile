PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := models/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL  ?= $(DEMO)
SLOTS  ?= 16
CTX    ?= 4096
HOST   ?= 127.0.0.1
PORT   ?= 8000
MINUTES ?= 20
ARGS   ?=

.PHONY: setup serve test lint bench soak clients clean

setup: $(VENV)/.installed $(DEMO)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(DEMO): | $(VENV)/.installed
	$(BIN)/python scripts/fetch_demo_model.py

serve: setup
	$(BIN)/ds4batch serve -m $(MODEL) --batched-session $(SLOTS) --ctx $(CTX) --host $(HOST) --port $(PORT) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

bench: setup
	$(BIN)/python -m bench.session_concurrency -m $(MODEL) --concurrency 1,16 --ctx 0,256 --bitwise --breakdown
	$(BIN)/python -m bench.with_server -m $(MODEL) --slots $(SLOTS) --ctx $(CTX) $(ARGS)

soak: setup
	$(BIN)/python -m bench.soak -m $(MODEL) --minutes $(MINUTES) $(ARGS)

clients: setup clients/node_modules/.installed clients/.venv/.installed
	$(BIN)/python -m clients.run $(ARGS)

clients/node_modules/.installed: clients/package.json
	npm install --prefix clients --no-package-lock --no-audit --no-fund
	touch $@

clients/.venv/.installed: clients/requirements.txt
	test -x clients/.venv/bin/python || $(PYTHON) -m venv clients/.venv
	clients/.venv/bin/python -m pip install --quiet --disable-pip-version-check -r clients/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) clients/.venv clients/node_modules build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

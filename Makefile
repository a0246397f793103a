# install · run · test · soak · bench · accuracy · screenshots
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: install run test soak bench accuracy screenshots clean

install: .venv/.installed

# constraints.txt pins versions known to work together. torch is pinned because an unpinned torch
# brings gigabytes of CUDA packages to machines without an NVIDIA GPU wherever a CPU build is at hand.
.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[all]'
	touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP) --editable '.[dev]'
	touch $@

run: install
	$(BIN)/memconsole

test: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -m "not slow" --numprocesses auto --dist loadfile --durations 25

soak: .venv/.installed-dev
	$(BIN)/python -m pytest -m slow --timeout 1800
	HYPOTHESIS_PROFILE=searching $(BIN)/python -m pytest tests/unit

accuracy: .venv/.installed-dev
	$(BIN)/python tests/accuracy/accuracy.py

bench: .venv/.installed-dev
	$(BIN)/python tests/bench/optimizations.py
	$(BIN)/python tests/bench/agreement.py
	$(BIN)/python tests/bench/bitnet.py
	$(BIN)/python tests/pty/bar.py

screenshots: .venv/.installed-dev
	$(BIN)/python screenshots/make.py

clean:
	rm -rf .venv build dist *.egg-info

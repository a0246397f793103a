# install · run · check · test · test-slurm · soak · bench · bench-peers · accuracy · screenshots
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: install run lint check test test-slurm soak bench bench-peers accuracy screenshots clean

install: .venv/.installed

# constraints.txt pins versions known to work together. torch is pinned because an unpinned torch
# brings gigabytes of CUDA packages to machines without an NVIDIA GPU wherever a CPU build is at hand.
.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[all]'
	touch $@

# Without bytecode: pip would compile every module, and the tests import a third of them.
.venv/.installed-dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --no-compile --editable '.[dev]'
	touch .venv/.installed $@

# One process compiles what the tests import; otherwise each process of the gate would, at the same time.
.venv/.bytecode: .venv/.installed-dev
	-PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only -qq > /dev/null
	touch $@

run: install
	$(BIN)/memconsole

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# More processes than cores: many tests wait, for a screen to draw or a trainer to start. Bytecode is kept (an empty
# value unsets the variable), because the tests start hundreds of processes.
PROCESSES = $(shell $(PYTHON) -c 'import os; print(2 * (os.cpu_count() or 1) + 1)')
GATE = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "not slow and not machine" --numprocesses $(PROCESSES) --dist worksteal

# Files that take most of the time wait for `make test`.
COSTLY = tests/tui/draw/test_tui_screens.py tests/tui/plan/test_fit_key.py tests/tui/plan/test_tui_plan.py \
	tests/tui/test_pictures.py tests/unit/cli/test_cli_fit.py tests/unit/memory/test_solve.py

check:
	$(MAKE) --jobs 2 lint .venv/.bytecode
	$(GATE) --durations 10 tests/unit tests/tui $(addprefix --ignore ,$(COSTLY))

test:
	$(MAKE) --jobs 2 lint .venv/.bytecode
	$(GATE) --durations 25

# Needs Debian's slurmctld, slurmd, slurm-client and munge: it starts a cluster of its own.
test-slurm: .venv/.installed-dev
	MEMCONSOLE_TEST_SLURM=1 $(BIN)/python -m pytest tests/slurm

# XLA_FLAGS without a value: programs are optimized as those of a run are, not compiled quickly.
soak: .venv/.installed-dev
	XLA_FLAGS= $(BIN)/python -m pytest -m "slow and not machine" --timeout 1800
	XLA_FLAGS= $(BIN)/python -m pytest -m "not slow and not machine" --timeout 1800 tests/training
	HYPOTHESIS_PROFILE=searching $(BIN)/python -m pytest -m "not slow and not machine" tests/unit

accuracy: .venv/.installed-dev
	XLA_FLAGS= $(BIN)/python -m pytest -m machine --timeout 1800
	$(BIN)/python tests/accuracy/accuracy.py

bench: .venv/.installed-dev
	$(BIN)/python tests/bench/optimizations.py
	$(BIN)/python tests/bench/agreement.py
	$(BIN)/python tests/bench/bitnet.py
	$(BIN)/python tests/bench/hybrid.py
	$(BIN)/python tests/bench/presets.py
	$(BIN)/python tests/bench/preferences.py --write
	$(BIN)/python tests/bench/window_reading.py
	$(BIN)/python tests/bench/tokenizing.py
	$(BIN)/python tests/bench/resuming.py
	$(BIN)/python tests/bench/waiting.py
	$(BIN)/python tests/bench/scanned.py
	$(BIN)/python tests/bench/starting.py
	$(BIN)/python tests/bench/step_parts.py
	$(BIN)/python tests/bench/eight_bit.py
	$(BIN)/python tests/bench/fine_tuning.py $(if $(MEMCONSOLE_TRANSFORMERS),--write)
	$(BIN)/python tests/pty/bar.py

# NANOGPT_DIR names a checkout of nanoGPT; transformers and accelerate are peers where installed.
bench-peers: .venv/.installed-dev
	$(BIN)/python tests/bench/peers.py $(if $(QUICK),--quick)

screenshots: .venv/.installed-dev
	$(BIN)/python screenshots/make.py

clean:
	rm -rf .venv build dist *.egg-info

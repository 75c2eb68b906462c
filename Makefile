# `make demo` and `make test` do all set-up in a fresh clone; they need Python >= 3.11 with pip, and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKDIR ?= workdir/lifecycle
# Processes among which `make test` divides the test files: one for each core, from two to four. Each takes two to four GB of memory. WORKERS=0 runs them in one.
WORKERS ?= $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 2 ? 2 : cores > 4 ? 4 : cores)))
# After a crash the run ends: a worker that takes a dead one's place may be handed a finished file and wait for ever.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --max-worker-restart=0 --dist loadfile --no-loadscope-reorder

# Python writes its bytecode even where the environment forbids it: every process would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test parity accessibility compilers docs lint format bench lock licences faults clean

demo: $(VENV)/.run
	$(BIN)/python -m launch.lifecycle --config configs/lifecycle_digits.py --workdir $(WORKDIR)

# Lint, types, and every test that is not marked slow: what one runs all day, in a minute on two cores.
check: $(VENV)/.test
	$(PYTEST) -m "not slow" --durations=5

test: $(VENV)/.test
	$(PYTEST) --durations=25

# Torch, transformers and timm are large: they have an environment of their own.
parity: .venv-parity/.parity
	.venv-parity/bin/python -m tests.parity --output docs/results/parity.md

# Checks the pages in a browser. Chromium or Chrome must be on PATH.
accessibility: .venv-accessibility/.accessibility
	.venv-accessibility/bin/python -m tests.accessibility --output docs/results/accessibility.md

# Asks the compilers of machines that are not there. CASES are parts of names, with semicolons. All of them take hours.
CASES ?= noise;MLP
TARGETS ?= v5e h100
compilers: .venv-compilers/.compilers
	@set -e; for target in $(TARGETS); do \
		.venv-compilers/bin/python -m benchmarks.compiled --target $$target --cases "$(CASES)" $(FLAGS); \
	done

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.run
	@set -e; for script in benchmarks/bench_*.py; do \
		name=$$(basename $$script .py); \
		echo "== $$name"; $(BIN)/python -m benchmarks run $${name#bench_}; \
	done

# After a change of pyproject.toml. No index is named, so that the file holds PyPI's own addresses.
lock: $(VENV)/.test
	env -u UV_INDEX_URL -u UV_DEFAULT_INDEX -u UV_EXTRA_INDEX_URL $(BIN)/python -m uv lock

# Fails on a licence that [tool.pip-licenses] in pyproject.toml does not allow.
licences: .venv-licences/.licences
	.venv-licences/bin/pip-licenses

# Hours: kills of every launcher, and damaged ledgers and files by the thousand.
faults: $(VENV)/.test
	$(BIN)/python -m tests.faults --output docs/design/faults.md

# The stamps record which set of dependencies is installed; they are renewed when pyproject.toml changes.
$(VENV)/.run: pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "$(PYTHON) is older than Python 3.11; choose another with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable ".[studies]"
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --group test
	@touch $@

$(VENV)/.docs: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --group docs
	@touch $@

.venv-parity/.parity: pyproject.toml
	$(MAKE) VENV=.venv-parity .venv-parity/.run
	.venv-parity/bin/python -m pip install --quiet --group test --group parity
	@touch $@

.venv-accessibility/.accessibility: pyproject.toml
	$(MAKE) VENV=.venv-accessibility .venv-accessibility/.run
	.venv-accessibility/bin/python -m pip install --quiet --group accessibility
	@touch $@

.venv-licences/.licences: pyproject.toml
	$(MAKE) VENV=.venv-licences .venv-licences/.run
	.venv-licences/bin/python -m pip install --quiet --group licences
	@touch $@

.venv-compilers/.compilers: pyproject.toml
	$(MAKE) VENV=.venv-compilers .venv-compilers/.run
	.venv-compilers/bin/python -m pip install --quiet --editable ".[compilers]"
	@touch $@

clean:
	rm -rf $(VENV) .venv-parity .venv-accessibility .venv-compilers .venv-licences build dist site .jax_cache .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

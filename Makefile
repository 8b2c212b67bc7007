# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# one OpenMP thread a process: a second one makes small models many times slower on a busy machine
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
# or each of the processes that tests start would compile the package again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-all demo-language test test-deployment test-all test-wheel lint types unit unit-half unit-rest install bench \
	bench-peers catalog docs docs-serve clean

PIP = $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt
# what a command needs is installed when it is first called: the package alone, what tests need, or everything
CORE := $(VENV)/.core
TEST := $(VENV)/.test
install: $(VENV)/.installed

$(CORE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fedlowrank needs Python 3.11 or newer; set PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing fedlowrank in $(VENV), one or two minutes ..."
	@$(PIP) -e .
	@touch $@

$(TEST): $(CORE)
	@$(PIP) -e '.[test]'
	@touch $@

$(VENV)/.installed: $(TEST)
	@$(PIP) -e '.[dev]'
	@touch $@

# 60 clients in four groups: four methods, three seeds, a table and a report in about a minute
demo: $(CORE)
	@$(BIN)/fedlowrank compare experiments/demo/floral.toml --force
	@$(BIN)/python examples/other_ideas.py

# what each of the four ideas is for, run here
demo-all: $(CORE)
	@for idea in floral pfedlora fedslr fedhl; do \
		$(BIN)/fedlowrank compare experiments/demo/$$idea.toml --force || exit 1; \
	done
	$(BIN)/fedlowrank report $(addprefix runs/demo-,floral pfedlora fedslr fedhl) -o runs/demo-all.html
	@$(BIN)/python examples/demo_summary.py runs
	@echo
	@echo "Open runs/demo-all.html in a browser."

demo-language: install
	OMP_NUM_THREADS=1 $(BIN)/python examples/demo_language.py runs/demo-language $(DEMO)

test: lint types unit

lint: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TEST)
	$(BIN)/mypy

# two processes, each of which reads and imports half of the tests alone
HALF := $(addprefix tests/,engines methods network training trust)
REST := $(filter-out $(HALF),$(patsubst %/,%,$(filter-out %__pycache__/,$(wildcard tests/*/))))

unit: $(TEST)
	@$(MAKE) --no-print-directory --output-sync=line --jobs=2 --keep-going unit-half unit-rest

unit-half: $(TEST)
	$(BIN)/python -m pytest $(HALF)

unit-rest: $(TEST)
	$(BIN)/python -m pytest $(REST)

test-deployment: install
	$(BIN)/python -m pytest --full tests/network/deploy/test_flower.py tests/network/deploy/test_foreign_apps.py

# every row, with long tests, real processes, and tests of all extras
test-all: install lint types
	$(BIN)/python -m pytest -n 2 --dist worksteal --full

# the wheel as a user installs it: checked, in a fresh environment with dependencies of its own, down to a report
test-wheel: install
	rm -rf dist build/wheel-env
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/wheel-env
	build/wheel-env/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build && wheel-env/bin/fedlowrank compare ../experiments/demo/first.toml -o wheel-runs --force

# what `fedlowrank list` prints
catalog: install
	@mkdir -p build
	$(BIN)/python -m fedlowrank.cli.catalog > build/catalog.json
	mv build/catalog.json src/fedlowrank/cli/catalog.json

bench: install
	$(BIN)/python benchmarks/speed/rounds_against_pytorch.py -o docs/results/speed.md

# after `make bench`: adds pfl, Flower and FedJAX, where they are installed, to its page
bench-peers: install
	$(BIN)/python benchmarks/peers/round_against_simulators.py --page docs/results/speed.md

# the site: strict, into site/; MkDocs' and Material's notices about later versions are switched off
docs docs-serve: export NO_MKDOCS_2_WARNING := 1
docs docs-serve: export DISABLE_MKDOCS_2_WARNING := true
docs: install
	$(BIN)/mkdocs build
	@echo "Open site/index.html in a browser."

docs-serve: install
	$(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis

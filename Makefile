# Two commands bring the project to life on a machine with python3 (3.10 or newer) and make:
#   make demo    train a small transformer on two CPU ranks and check it against one process
#   make test    all tests
# Everything is installed into .venv; nothing outside this folder is touched.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
# Ranks wait for one another much of the time: two test files at once keep two cores busy.
PYTEST_ARGS ?= -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help venv test test-gpu demo lint format typecheck bench clean

help:
	@sed -n '1,4s/^# \{0,1\}//p' Makefile
	@echo "also: venv test-gpu lint format typecheck bench clean"

venv: $(STAMP)

# The stamp is older than its prerequisites only when they change, so a second make installs nothing.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "shardwise needs Python 3.10 or newer; try: make PYTHON=python3.12 venv" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,train]'
	@touch $@

test: $(STAMP)
	$(PY) -m pytest $(PYTEST_ARGS)

# With whatever torch the machine has: a GPU machine's own is not replaced.
test-gpu:
	PYTHONPATH=. $(PYTHON) benchmarks/gpu_tests.py

demo: $(STAMP)
	@$(PY) examples/demo.py

lint: $(STAMP)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

format: $(STAMP)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

typecheck: $(STAMP)
	$(PY) -m mypy

bench: $(STAMP)
	$(PY) benchmarks/host_overhead.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

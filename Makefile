# Two commands bring the project to life on a machine with python3 (3.10 or newer) and make:
#   make demo    train a small model on two CPU ranks, resume it, check it against one process, export it
#   make test    the tests, as this machine computes
# Everything is installed into .venv; nothing outside this folder is touched.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
# Ranks wait for one another much of the time: two test files at once keep two cores busy. In the order of their names,
# which has the short ones last, so that both end at the same time.
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help venv dev test test-all test-slow test-like-torch test-arithmetic test-ecosystem test-ecosystem-short ecosystem-venv test-gpu fuzz demo lint format typecheck bench bench-gpu reference docs shape dist clean

help:
	@sed -n '1,4s/^# \{0,1\}//p' Makefile
	@echo "also: venv dev test-all test-slow test-like-torch test-arithmetic test-ecosystem test-gpu fuzz lint format typecheck bench bench-gpu reference docs shape dist clean"

venv: $(STAMP)

dev: $(DEV)

# What `shardwise train` needs, and no more. The stamp is older than its prerequisites only when they change, so a second
# make installs nothing.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "shardwise needs Python 3.10 or newer; try: make PYTHON=python3.12 venv" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), once: torch, numpy, rich, matplotlib, safetensors, what they need, and shardwise itself"
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train]'
	@touch $@

# Tests, linters and types, in the same environment.
$(DEV): $(STAMP)
	@echo "installing into $(VENV), once, what development needs: pytest, hypothesis, ruff, mypy, pre-commit"
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,train]'
	@touch $@

test: $(DEV)
	$(PY) -m pytest -m "not slow" $(PYTEST_ARGS)

# Programs with ours and with torch's FSDP side by side: on 2 and 4 ranks with gloo and, where there is a GPU, on 2 with NCCL.
LIKE_TORCH := tests/ranks/test_like_torch.py tests/ranks/test_wrapper_like_torch.py \
	tests/ranks/test_wrapper_state_peer.py tests/ranks/test_beside_torch.py \
	tests/ranks/test_like_torch_four_ranks.py tests/gpu/test_like_torch_gpu.py
test-like-torch: $(DEV)
	$(PY) -m pytest $(LIKE_TORCH) $(PYTEST_ARGS)

# The long tail: combinations, long runs and whole programs, of which `make test` has each behaviour by itself.
test-slow: $(DEV)
	$(PY) -m pytest -m slow $(PYTEST_ARGS)

# Bits that depend on the processor, with the instructions of smaller ones and with more threads.
test-arithmetic: $(DEV)
	$(PY) -m tests.arithmetic

# What continuous integration runs. Try it with make -k, so that one failure does not hide the next.
test-all: test test-slow test-arithmetic

# Other people's libraries on ours and on torch's own, in an environment of their own: the library needs none of them.
ECOSYSTEM       := .venv-ecosystem
ECOSYSTEM_STAMP := $(ECOSYSTEM)/.installed
$(ECOSYSTEM_STAMP): pyproject.toml constraints.txt
	@test -x $(ECOSYSTEM)/bin/python || $(PYTHON) -m venv $(ECOSYSTEM)
	$(ECOSYSTEM)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ecosystem]'
	@touch $@

ecosystem-venv: $(ECOSYSTEM_STAMP)

# All of them; what they found goes into a results file.
test-ecosystem: $(ECOSYSTEM_STAMP)
	ECOSYSTEM_RESULTS=benchmarks/results/ecosystem.json $(ECOSYSTEM)/bin/python -m pytest tests/ecosystem

# A few of each library: what continuous integration runs.
test-ecosystem-short: $(ECOSYSTEM_STAMP)
	$(ECOSYSTEM)/bin/python -m pytest tests/ecosystem -m "not slow"

# With whatever torch the machine has: a GPU machine's own is not replaced.
test-gpu:
	PYTHONPATH=. $(PYTHON) benchmarks/gpu_tests.py

# Random programs, sharded beside plain: make fuzz SECONDS=600 SEED=1000
SECONDS ?= 60
SEED    ?= 0
fuzz: $(DEV)
	$(PY) -m tests.fuzz.run --seconds $(SECONDS) --seed $(SEED)

demo: $(STAMP)
	@$(PY) examples/demo.py

lint: $(DEV)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

format: $(DEV)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

typecheck: $(DEV)
	$(PY) -m mypy

BENCH     = PYTHONPATH=. $(PY) benchmarks
BENCH_GPU = PYTHONPATH=. $(PYTHON) benchmarks

# Alone on the machine, or the figures mean nothing.
bench: $(STAMP)
	$(BENCH)/host_overhead.py
	$(BENCH)/host_overhead.py --face wrapper
	$(BENCH)/host_profile.py
	$(BENCH)/host_profile.py --face wrapper
	$(BENCH)/optimizer_step.py
	$(BENCH)/clip.py
	$(BENCH)/small_models.py
	$(BENCH)/small_models.py --orig
	$(BENCH)/small_models.py --ranks 4
	$(BENCH)/gloo_step.py
	$(BENCH)/whole_step.py
	$(BENCH)/report.py

# With whatever torch the machine has.
bench-gpu:
	$(BENCH_GPU)/host_overhead.py --device cuda
	$(BENCH_GPU)/host_overhead.py --device cuda --face wrapper
	$(BENCH_GPU)/host_profile.py --device cuda
	$(BENCH_GPU)/host_profile.py --device cuda --face wrapper
	$(BENCH_GPU)/optimizer_step.py --device cuda
	$(BENCH_GPU)/clip.py --device cuda
	$(BENCH_GPU)/captured_step.py --model tiny
	$(BENCH_GPU)/captured_step.py --model tiny --backend nccl
	$(BENCH_GPU)/captured_step.py --model tiny --backend nccl --world-size 2
	$(BENCH_GPU)/captured_step.py --model 1b
	for model in tiny 1b 8b; do for compiled in "" --compile; do \
		$(BENCH_GPU)/step_time.py --device cuda --model $$model $$compiled || exit 1; done; done
	for world in 8 64; do \
		$(BENCH_GPU)/step_time.py --device cuda --model 8b --memory --world-size $$world || exit 1; done
	$(BENCH_GPU)/backward_memory.py
	for step in 1b 8b "tiny --captured" "1b --captured"; do $(BENCH_GPU)/step_profile.py --model $$step || exit 1; done
	$(BENCH_GPU)/offload_step.py --device cuda --model 1b
	$(BENCH_GPU)/auto_plan.py --device cuda
	for model in 1b 8b; do $(BENCH_GPU)/whole_step.py --backend fake --ranks 8 --device cuda --model $$model || exit 1; done
	$(BENCH_GPU)/whole_step.py --backend nccl --ranks 2 --device cuda --model 1b
	$(BENCH_GPU)/report.py

# docs/reference.md, from the docstrings, docs/torch_surface.md, and the table of libraries.
reference: $(STAMP)
	$(PY) docs/make_reference.py
	$(PY) docs/torch_surface.py
	$(PY) docs/make_libraries.py

# The documentation as a site in build/site, from the same files; a broken link ends it with an error.
$(VENV)/.docs: $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# Not --quiet: that hides the warnings from --strict, too.
docs: reference $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "build/site/index.html"

# The size of the package in numbers; ARGS=--details shows what was counted.
shape: $(STAMP)
	PYTHONPATH=. $(PY) benchmarks/shape.py $(ARGS)

# A wheel and a source distribution, in dist.
dist: $(STAMP)
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(PY) -c "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"

clean:
	rm -rf $(VENV) $(ECOSYSTEM) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

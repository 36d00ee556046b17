# SPDX-License-Identifier: Apache-2.0
# The same commands for people and for CI. All of them work in a fresh clone: .venv is made when it is needed.

# Python 3.11 or 3.12: flydsl has wheels for these. One that imports torch shares it with .venv.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
# Asked of pip only where no torch is installed. This is the CPU build where pip's index has one; elsewhere say
# TORCH="torch==2.13.0 --index-url …" with torch's own CPU or ROCm index.
TORCH ?= torch==2.13.0
# pytest's worker processes, and what it looks at
WORKERS ?= 2
TESTS ?= tests
BENCH ?= all_reduce
# gpu-test's results, and (with .tar.gz behind it) the archive of all that a report needs
REPORT ?= gpu-report

PY := .venv/bin/python
INSTALLED := .venv/.installed
QUICK := not full and not gpu and not rocm

.PHONY: help install demo test test-full gpu-test lint format bench docs clean
.DEFAULT_GOAL := install

install: $(INSTALLED)  ## make .venv with flycomm in it

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

$(INSTALLED): pyproject.toml tools/setup_venv.py $(wildcard csrc_shim/*)
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or 3.12 found: install one, or set PYTHON" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make: flycomm needs Python 3.11 or later: set PYTHON")'
	@$(PYTHON) tools/setup_venv.py --torch "$(TORCH)" --extras bench dev mpi
	@touch $@

# Virtual ranks want torch's kernels loaded before one of them waits (docs/facts.md); read when CUDA starts.
demo bench gpu-test: export CUDA_MODULE_LOADING ?= EAGER

demo: $(INSTALLED)  ## two ranks on the best target found: a checked all-reduce and a latency table
	$(PY) examples/01_all_reduce.py
	$(PY) -m flycomm bench all_reduce --world 2 --bytes 2KiB,8KiB,32KiB,128KiB

test: $(INSTALLED)  ## the quick set, on the host target (10 minutes at most on two cores)
	$(PY) -m pytest -m "$(QUICK)" -n $(WORKERS) $(TESTS)

test-full: $(INSTALLED)  ## all that needs no GPU
	$(PY) -m pytest -m "not gpu and not rocm" -n $(WORKERS) $(TESTS)

gpu-test: $(INSTALLED)  ## on a GPU: doctor, litmus, the tests, a short benchmark; one archive, also of failures
	@mkdir -p $(REPORT) && rm -f $(REPORT).tar.gz $(addprefix $(REPORT)/,litmus.json tests.xml bench.jsonl)
	@unset FLYCOMM_TARGET; $(PY) -m flycomm doctor; status=0; \
	$(PY) -m flycomm litmus --json $(REPORT)/litmus.json || status=$$?; \
	$(PY) -m pytest --target auto -p no:xdist -m "not host_only" --junitxml $(REPORT)/tests.xml \
	  $(wildcard tests/gpu) tests/host || status=$$?; \
	$(PY) -m flycomm bench all_reduce --bytes 8KiB,1MiB --repeats 20 --json $(REPORT)/bench.jsonl || status=$$((status ? status : 1)); \
	$(PY) -m flycomm doctor --json --archive $(REPORT).tar.gz --add $(REPORT) >/dev/null \
	  && echo "to send with a report: $(REPORT).tar.gz"; exit $$status

lint: $(INSTALLED)  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(INSTALLED)  ## let ruff rewrite what lint would refuse
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(INSTALLED)  ## measure: make bench BENCH="all_reduce --world 4 --dtype bf16"
	$(PY) -m flycomm bench $(BENCH)

docs: .venv/.docs  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

.venv/.docs: $(INSTALLED)
	@$(PY) tools/setup_venv.py --extras docs
	@touch $@

clean:  ## back to a fresh clone, .venv included
	rm -rf .venv build dist site gpu-report gpu-report.tar.gz .pytest_cache .mypy_cache .ruff_cache .hypothesis flycomm/libflycomm_shim.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

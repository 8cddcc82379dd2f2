# make train      train a small GPT with Megatron and sparse attention on this machine (options below)
# make test       the tests (minutes)          make test-full   the exhaustive matrix (hours)
# make test-gpu   the tests that need a GPU    make check       ruff, mypy, docstrings, format
# make docs       the documentation, build/docs  make format     what make check can put right by itself
# make setup      .venv with everything needed; the other commands do it first where it is missing
# make cuda       build the CUDA library into the source tree (make setup does it where there is a GPU and nvcc)
# make clean      remove what make made, but data/ and runs/ (make clean-all: these too)
#
# Options of make train, each with a default, taken from make's command line only (not from the environment):
#   NAME=run folder under runs/ (default: ATTENTION)        ATTENTION=mtraining|dense
#   SEQ=sequence length (8192)                              STEPS=training steps (80)
#   NPROC=processes (the GPUs found; 4 on the CPU)          INNER=ranks of a node (half of 4 or more processes)
#   TOP_P=share of attention kept (0.9)                     DATA=your text, a folder or a file
#   RESUME=1 to go on from the last checkpoint of NAME      EXTRA="more Megatron options"
# Other options: CUDA=AUTO|ON|OFF whether the set-up builds the CUDA library (AUTO: where there is a GPU and nvcc),
#   PYTHON=a Python 3.12 for the set-up, PYTEST_ARGS="more pytest options" for the tests.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
CUDA ?= AUTO
PYTEST_ARGS ?=
CXX_FILES := git ls-files 'csrc/*.h' 'csrc/*.cuh' 'csrc/*.cu' 'csrc/*.cpp'
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# The option --$2 with the variable $1, if make's command line sets it: the environment has a NAME of its own on some
# systems. Make exports such variables, so that the shell reads the value and never parses it.
given = $(if $(and $(filter command,$(origin $1)),$(value $1)),--$2="$$$1")
export PYTHON

.PHONY: help setup cuda train test test-full test-gpu check docs format clean clean-all
help:
	@sed -n 's/^# \{0,1\}//p;/^SHELL/q' Makefile

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt tools/build_backend.py tools/setup_env.py
	@python="$$(sh tools/find_python.sh)" && "$$python" tools/setup_env.py $(VENV) --cuda "$(CUDA)"

cuda:
	PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B build/cuda -G Ninja -DMTRAINING_CUDA=ON \
	    -DPython_EXECUTABLE="$(abspath $(BIN))/python" -DMTRAINING_VERSION="$(VERSION)"
	PATH="$(abspath $(BIN)):$$PATH" cmake --build build/cuda
	PATH="$(abspath $(BIN)):$$PATH" cmake --install build/cuda --prefix .

# A misspelt option would count for nothing, without a word.
ifneq ($(filter train,$(MAKECMDGOALS)),)
VALID := NAME ATTENTION SEQ STEPS NPROC INNER TOP_P DATA RESUME EXTRA
SET_UP := CUDA PYTHON PYTEST_ARGS VENV SHELL MAKEFLAGS
given_names := $(foreach v,$(filter-out -%,$(.VARIABLES)),$(if $(filter command,$(origin $v)),$v))
unknown := $(filter-out $(VALID) $(SET_UP),$(given_names))
$(if $(unknown),$(error make train: $(unknown): no such option; valid: $(VALID)))
endif

train: $(VENV)/installed
	@$(BIN)/python examples/train.py $(call given,NAME,name) $(call given,ATTENTION,attention) \
	    $(call given,SEQ,seq) $(call given,STEPS,steps) $(call given,NPROC,nproc) $(call given,INNER,inner) \
	    $(call given,TOP_P,top-p) $(call given,DATA,data) $(call given,RESUME,resume) $(call given,EXTRA,extra)

test: $(VENV)/installed
	$(BIN)/python -m pytest -m "not full" $(PYTEST_ARGS)

test-full: $(VENV)/installed
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-gpu: $(VENV)/installed
	$(BIN)/python -m pytest -m "gpu" $(PYTEST_ARGS)
	@if ! command -v compute-sanitizer >/dev/null; then echo "compute-sanitizer not found: its checks were not run"; \
	else PYTHON="$(abspath $(BIN))/python" OUT=build tools/gpu.sh sanitize; fi

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(CXX_FILES) | xargs -r $(BIN)/clang-format --dry-run --Werror

# Python's warnings are Megatron's about packages that are not installed; those of Sphinx are errors.
docs: $(VENV)/installed
	PYTHONWARNINGS=ignore $(BIN)/python -m sphinx -q -E -a -W --keep-going -c docs . build/docs
	@echo "build/docs/index.html"

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(CXX_FILES) | xargs -r $(BIN)/clang-format -i

clean:
	rm -rf $(VENV) build dist megatron_mtraining/lib .pytest_cache .hypothesis .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

clean-all: clean
	rm -rf data runs

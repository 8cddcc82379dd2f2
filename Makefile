# make train      train a small GPT with Megatron and sparse attention on this machine (options below)
# make test       the tests (minutes)          make test-full   the exhaustive matrix (hours)
# make test-gpu   the tests that need a GPU    make check       ruff, mypy, docstrings, format
#                                              make format      what of it can be put right by itself
# make cuda       build the CUDA library into the source tree (make setup does it where there is a GPU and nvcc)
# make clean      remove what make made, but data/ and runs/ (make clean-all: these too)
#
# Options of make train, each with a default: NAME=run folder under runs/, ATTENTION=mtraining|dense, SEQ=sequence length,
# STEPS=training steps, NPROC=processes, INNER=ranks of a node, TOP_P=share of attention kept, DATA=your text (folder or
# file), RESUME=1 to go on from the last checkpoint of NAME, EXTRA="more Megatron options".
# Set-up: PYTHON=a Python 3.12, CUDA=AUTO|ON|OFF whether to build the CUDA library (AUTO: where there is a GPU and nvcc).
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
CUDA ?= AUTO
PYTEST_ARGS ?=
CXX_FILES := git ls-files 'csrc/*.h' 'csrc/*.cuh' 'csrc/*.cu' 'csrc/*.cpp'
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
export PYTHON

.PHONY: help setup cuda train test test-full test-gpu check format clean clean-all
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

train: $(VENV)/installed
	@$(BIN)/python examples/train.py $(if $(NAME),--name "$(NAME)") $(if $(ATTENTION),--attention "$(ATTENTION)") \
	    $(if $(SEQ),--seq "$(SEQ)") $(if $(STEPS),--steps "$(STEPS)") $(if $(NPROC),--nproc "$(NPROC)") \
	    $(if $(INNER),--inner "$(INNER)") $(if $(TOP_P),--top-p "$(TOP_P)") $(if $(DATA),--data "$(DATA)") \
	    $(if $(filter-out 0,$(RESUME)),--resume) $(if $(EXTRA),--extra "$(EXTRA)")

test: $(VENV)/installed
	$(BIN)/python -m pytest -m "not full" $(PYTEST_ARGS)

test-full: $(VENV)/installed
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-gpu: $(VENV)/installed
	$(BIN)/python -m pytest -m "gpu" $(PYTEST_ARGS)

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(CXX_FILES) | xargs -r $(BIN)/clang-format --dry-run --Werror

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(CXX_FILES) | xargs -r $(BIN)/clang-format -i

clean:
	rm -rf $(VENV) build dist megatron_mtraining/lib .pytest_cache .hypothesis .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

clean-all: clean
	rm -rf data runs

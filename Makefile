# `make demo` and `make test` need Python 3.11+, make and gcc; everything else is installed into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: help env demo test test-cluster test-te test-h100 soak lint format docs bench clean

help:
	@echo "make demo    text -> tokenizer -> tokens -> a trained CARD model -> an export -> text, on this CPU"
	@echo "make test    the whole test suite"
	@echo "make test-cluster    all tests on a real SLURM that they start themselves; make test runs most of them"
	@echo "make test-te   Transformer Engine's layers without a GPU: builds CUDA torch and TE first (8 GB, 15 minutes)"
	@echo "make test-h100 the tests that need an H100, with a report in build/h100.md"
	@echo "make soak    20 kills of real runs at random moments, each restarted: nothing may be lost"
	@echo "make env     only create $(VENV) with everything a CPU user needs"
	@echo "make lint    ruff, ruff format --check, mypy"
	@echo "make bench   the benchmarks, each against its bar"
	@echo "make docs    rewrite docs/configuration.md, the README's figure and examples/slurm/*.sbatch"

env: $(VENV)/installed

# torch first and pinned: a later package's range could otherwise pull the newest one with gigabytes of CUDA
$(VENV)/installed: pyproject.toml setup.py constraints.txt card_megatron/version.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[hf,data,eval,plot,mpi,dev]"
	# apart, for tests/unit/test_fp8_emulation.py alone: transformers would load it in every command, with warnings
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt --target $(VENV)/torchao torchao
	@touch $@

demo: env
	$(BIN)/python examples/demo/demo.py

test: env
	$(BIN)/python -m pytest

test-cluster: env
	$(BIN)/python -m pytest tests/cluster --cluster-rest

test-te:
	PYTHON=$(PYTHON) tools/te_venv.sh build/te-venv
	build/te-venv/bin/python -m pytest tests/te

# in the environment that has the GPU's libraries (docs/installation.md): make test-h100 BIN=/usr/bin
test-h100:
	mkdir -p build
	$(BIN)/python -m pytest tests/gpu -m h100 --junitxml=build/h100.xml; status=$$?; \
	$(BIN)/python -m tests.gpu.report build/h100.xml > build/h100.md; cat build/h100.md; exit $$status

soak: env
	rm -rf build/soak
	$(BIN)/python -m tests.faults --kills 20 --seed 0 --folder build/soak

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: env
	$(BIN)/python -m card_megatron.config.document > docs/configuration.md
	$(BIN)/python docs/figure.py docs/card.svg
	$(BIN)/python examples/slurm/render.py

bench: env
	$(BIN)/python benchmarks/noise_cost.py --check
	$(BIN)/python benchmarks/step_cost.py --check
	$(BIN)/python benchmarks/instruments_cost.py --check
	$(BIN)/python benchmarks/objectives.py --check
	$(BIN)/python benchmarks/checkpoint_cost.py --check
	$(BIN)/python benchmarks/preprocess.py --check
	$(BIN)/python benchmarks/convert.py --check
	$(BIN)/python benchmarks/decoding.py --check
	$(BIN)/python benchmarks/evaluation.py --check
	$(BIN)/python benchmarks/fp8_gap.py --check

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The targets make .venv when it is missing and use it; tools/environment.sh says how to choose another.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
environment := source tools/environment.sh
# Half of them run tests that wait half of the time (tests/conftest.py).
jobs ?= $(shell echo $$((2 * $$(nproc))))
reruns ?= 1
lessons := allgather_check mnist_ddp resnet50_ascend resnet50_gpu parallel_modes own_model checkpoints several_machines

help:
	@echo 'make demo    2 processes train on real handwritten digits; prints their losses and the accuracy'
	@echo 'make doctor  what this machine has and lacks for the lessons; needs only python3'
	@echo 'make test    the whole test suite'
	@echo 'make lint    ruff, shellcheck, declared copies'
	@echo 'make bench   the lessons against the tutorials and PyTorch, side by side (about half an hour; installs PyTorch)'
	@echo 'make clean   remove what the targets made: data sets, runs, caches, .venv'

demo:
	@$(environment)
	[[ -d data/mnist ]] || python tools/make_datasets.py mnist data/mnist
	mkdir -p runs/demo
	root="$$PWD"; cd runs/demo
	echo '+ cd runs/demo; bash ../../mnist_ddp/run.sh ../../data/mnist 2 -- --lr 0.1'
	bash "$$root/mnist_ddp/run.sh" "$$root/data/mnist" 2 -- --lr 0.1

test:
	@$(environment)
	python -m pytest -q -n $(jobs) --dist worksteal --reruns $(reruns) -o tmp_path_retention_policy=failed tests

doctor:
	@venv="$$(realpath -m -- "$${VENV:-.venv}")"
	[[ -n "$${VIRTUAL_ENV:-}" || ! -x "$$venv/bin/python3" ]] || PATH="$$venv/bin:$$PATH"
	python3 tools/doctor.py

lint:
	@$(environment)
	ruff check .
	ruff check --line-length 100 $(lessons)
	git ls-files -z '*.sh' .ci/run | xargs -0 shellcheck -x
	python tools/copies.py

bench:
	@$(environment)
	python -c 'import torch' 2>/dev/null || python -m pip install --quiet -r requirements-bench.txt
	[[ -d data/mnist ]] || python tools/make_datasets.py mnist data/mnist
	[[ -d data/cifar10 ]] || python tools/make_datasets.py cifar10 data/cifar10
	python benchmarks/speed.py --output runs/speed

clean:
	rm -rf data runs .venv .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.ONESHELL:
.PHONY: help demo doctor test lint bench clean

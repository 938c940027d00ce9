PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# Training needs less than the tests and the linters; an environment that has everything will do.
FOR_TRAINING := $(or $(wildcard $(INSTALLED)),.venv/.installed-for-training)

.DEFAULT_GOAL := help
.PHONY: help setup train test test-slow test-gpu wheel-check docs-check lint

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
		printf '%-16s %s\n' "$$name" "$$text"; done

setup: $(INSTALLED)  ## Create .venv and install everything into it

train: $(FOR_TRAINING)  ## Train on the built-in corpus; ARGS="key=value ..." for more
	@$(BIN)/python train.py $(ARGS)

# The tests start many processes, which all import the same modules: keep what Python compiled of them.
test test-slow: export PYTHONDONTWRITEBYTECODE =

test: $(INSTALLED)  ## Run the fast tests
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal

test-slow: $(INSTALLED)  ## Run the slow tests
	@$(BIN)/python -m pytest -q -n 2 -m slow

test-gpu: $(INSTALLED)  ## Run the tests that need a CUDA device
	@$(BIN)/python -m pytest -q -m gpu

wheel-check: $(INSTALLED)  ## Build the wheel and use it in a clean environment
	@$(BIN)/python -m pytest -q -m slow tests/test_wheel.py

docs-check: $(INSTALLED)  ## Run or compose every command of README.md, docs/, conf/ and the Docker files
	@$(BIN)/python -m pytest -q -n 2 -m 'not gpu' tests/test_readme.py tests/test_results.py tests/test_recipes.py tests/config/test_configs.py tests/test_docker.py tests/export

lint: $(INSTALLED)  ## Check style, types and the Dockerfile
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/hadolint Dockerfile

$(INSTALLED): EXTRAS := plots,dev
.venv/.installed-for-training: EXTRAS := plots

$(INSTALLED) .venv/.installed-for-training: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Python 3.11 or newer is needed; name one with: make PYTHON=/path/to/python3.11'; exit 1; }
	@$(PYTHON) -m venv .venv || \
		{ echo 'The venv module of $(PYTHON) does not work; on Debian and Ubuntu: apt install python3-venv'; exit 1; }
	@echo 'Installing into .venv (once; PyTorch is large)'
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

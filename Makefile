# make train | test | check | check-cuda | docs | format | coverage | clean | distclean
#
#   make train ARGS="trainer.max_steps=20"         options of the command line
#   make test ARGS="-k router"                     options of pytest: one call over all tests
#   make train TORCH="torch==2.13.0 --index-url …" another build of PyTorch (CPU only, another CUDA)

VENV ?= .venv
# Of check-cuda: 5 GB, with the CUDA build of PyTorch.
CUDA_VENV ?= .venv-cuda
PYTHON ?= python3
# The tested release, installed first and by itself: what follows accepts it and leaves it alone.
TORCH ?= torch==2.13.0
ARGS ?=
# Processes of the unit tests; 0 is this one. Each further one costs an `import torch`.
WORKERS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install
PYTEST := $(BIN)/python -m pytest
SERIAL := distributed or golden or e2e or parity
GATED := lightning_moe/ops/*,lightning_moe/nn/*,lightning_moe/config/*,lightning_moe/optim/*,lightning_moe/step/*

.PHONY: train test check check-cuda docs serve-docs format coverage sizes clean distclean
.PHONY: check-format check-lint check-spelling check-layers check-types check-style

train: $(VENV)/.installed
	$(BIN)/lightning-moe train experiment=tiny_cpu $(ARGS)

# Ranks share the cores, so only the unit tests may run in parallel. pytest exits with 5 where it finds no test: a failure.
test: $(VENV)/.installed-dev
ifeq ($(strip $(ARGS)),)
	$(PYTEST) -n $(WORKERS) -m "not (gpu or cuda or $(SERIAL))"
	$(PYTEST) -m "not (gpu or cuda) and ($(SERIAL))"
else
	$(PYTEST) -m "not (gpu or cuda)" $(ARGS)
endif

check: check-format check-lint check-spelling check-layers check-types check-style docs sizes

check-format: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .

check-lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .

check-spelling: $(VENV)/.installed-dev
	$(BIN)/codespell

check-layers: $(VENV)/.installed-dev
	$(BIN)/lint-imports

check-types: $(VENV)/.installed-dev
	$(BIN)/mypy

check-style: $(VENV)/.installed-dev
	$(PYTEST) tests/style

# What needs torch's CUDA build and no GPU; see docs/cuda.md. Shapes are checked by `make test`.
check-cuda: $(CUDA_VENV)/.installed
	$(CUDA_VENV)/bin/python -m tests.cuda.run -m pytest -o addopts="--strict-markers --strict-config" tests/cuda $(ARGS)

# Lines of every floor of the package, and files that have grown long.
sizes: $(VENV)/.installed-dev
	$(BIN)/python -m tests.style.sizes

# The theme would warn of MkDocs 2, which pyproject.toml keeps away. Not --quiet, which would let warnings pass --strict.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

serve-docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

coverage: $(VENV)/.installed-dev
	$(PYTEST) -m "not (gpu or cuda or $(SERIAL))" --cov --cov-report=
	$(BIN)/coverage report --include="$(GATED)" --fail-under=95

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage htmlcov
	find . -name '.venv*' -prune -o -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(CUDA_VENV)

# A stamp is older than pyproject.toml after a change there, and newer after an install: a second call does nothing.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) lacks the venv module (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable ".[dev,docs,peers]"
	@touch $@

# `===` and not `==`, which a CPU build of that version (2.13.0+cpu) that the machine offers would satisfy as well.
$(CUDA_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install torch===2.13.0
	$(CUDA_VENV)/bin/python -c 'import torch; assert torch.version.cuda, torch.__version__ + " has no CUDA"'
	$(CUDA_VENV)/bin/python -m pip install --editable ".[dev]"
	@touch $@

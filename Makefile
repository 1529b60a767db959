# The commands of a working day. Everything happens in .venv and build/; `make clean` removes both.

PYTHON ?= python3
VENV ?= .venv
BUILD := build/dev
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# The pinned one once there is a venv, so that a machine without CMake can run the sanitizers too.
CMAKE = $(firstword $(wildcard $(VENV)/bin/cmake) cmake)

NATIVE := $(shell find csrc tests/native cmake -type f 2>/dev/null)
CPP := $(shell find csrc tests/native -name '*.cpp' -o -name '*.h' 2>/dev/null)

# Our own builds hold all variants, emulated where this CPU lacks one; the demo's those that this CPU would choose.
# Warnings end asan, tsan and x86, not the build of somebody whose compiler is newer than ours.
DEFINES := -C cmake.define.KT_TESTS=ON -C cmake.define.KT_EMULATE=ON
DEMO_DEFINES := -C cmake.define.KT_NATIVE=ON

# Times a part of the work that follows, and prints the parts that began since this make did.
TIME = $(PYTHON) scripts/clock.py time
STARTED := $(shell date +%s)
SHOW_CLOCK = $(PYTHON) scripts/clock.py show $(STARTED)

# All variants run under the sanitizers; with OFF those of this CPU.
EMULATE ?= ON
CXX_LIBRARY = $(shell $(CXX) -print-file-name=$(1))
# Python itself has no sanitizer, so its runtime is loaded first; the interpreter's own allocations are never all freed.
ASAN_PYTHON = LD_PRELOAD="$(call CXX_LIBRARY,libasan.so) $(call CXX_LIBRARY,libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0 KT_CORE=$$(ls build/asan/_core*.so) PYTHONPATH=src OMP_NUM_THREADS=1

# Stop a test run that hangs in native code with the traces of all threads.
export PYTHONFAULTHANDLER := 1

.DEFAULT_GOAL := help
.PHONY: help build check native format test test-slow test-llamafactory test-sglang test-agents test-ray soak bench demo wheel test-wheel asan tsan x86 aarch64 clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

$(PY):
	$(TIME) venv -- $(PYTHON) -m venv $(VENV)

SOURCES := pyproject.toml CMakeLists.txt src/ktransformers/__init__.py $(NATIVE)
INSTALL_PACKAGES := constraints.txt scripts/install_packages.py

$(VENV)/.installed: $(INSTALL_PACKAGES) | $(PY)
	$(TIME) packages -- $(PY) scripts/install_packages.py
	@touch $@

$(VENV)/.built: $(VENV)/.installed $(SOURCES)
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(TIME) build -- \
	  $(PIP) --no-build-isolation --no-deps -C build-dir=$(BUILD) $(DEFINES) -e .
	@touch $@

# The demo has less to install and to build, unless `make build` has already made more.
$(VENV)/.demo-installed: $(INSTALL_PACKAGES) | $(PY)
	$(TIME) packages -- $(PY) scripts/install_packages.py --demo
	@touch $@

$(VENV)/.demo-built: $(VENV)/.demo-installed $(SOURCES)
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(TIME) build -- \
	  $(PIP) --no-build-isolation --no-deps -C build-dir=build/demo $(DEMO_DEFINES) -e .
	@touch $@

build: $(VENV)/.built  ## venv, pinned packages, the extension with all variants (editable install)

check: build  ## ruff, mypy, clang-format, the layer rule
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP)
	$(PY) -m pytest -q tests/test_layers.py

format: $(VENV)/.installed  ## rewrite the sources as `make check` wants them
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

native: build  ## the native tests
	$(BUILD)/kt_tests

test: build  ## check beside the native tests, then everything but the slow tests of Python
	$(TIME) "checks, native tests" -- $(MAKE) --no-print-directory -j2 check native
	$(TIME) "Python tests" -- $(PY) scripts/run_tests.py
	@$(SHOW_CLOCK)

test-slow: build  ## the tests marked slow
	$(PY) -m pytest -q -m slow

# pip leaves a package alone that is installed.
test-ray: build  ## several nodes on a Ray cluster of three raylets, whose processes are killed under load
	$(PIP) "ray[train]>=2.60"
	$(PY) -m pytest -q -m ray tests/serve tests/train

# Stock LLaMA-Factory in venvs of its own, because it wants older packages: the last release with transformers 5.6, and
# in `next` the one to come, as it is published under another name, with 5.8; `next` sees the other's packages behind its
# own. transformers 5.7 and PEFT 0.19 lie apart. An empty torchaudio stands where LLaMA-Factory imports one that no text needs.
FACTORY := build/llamafactory
FACTORY_PY := $(FACTORY)/bin/python
FACTORY_PIP := $(FACTORY_PY) -m pip install --quiet --disable-pip-version-check
NEXT_PY := $(FACTORY)/next/bin/python
SITE = $$($(1) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

$(FACTORY)/.installed: constraints.txt tests/llamafactory/requirements.txt $(wildcard requirements/*.txt)
	test -x $(FACTORY_PY) || $(PYTHON) -m venv $(FACTORY)
	$(FACTORY_PIP) "$$(grep '^torch==' constraints.txt)"
	$(FACTORY_PIP) -r requirements/ktransformers-0.9.5.txt -r tests/llamafactory/requirements.txt
	$(FACTORY_PIP) --no-deps llamafactory==0.9.5
	mkdir -p $(FACTORY)/site && touch $(FACTORY)/site/torchaudio.py
	echo "$(CURDIR)/$(FACTORY)/site" > "$(call SITE,$(FACTORY_PY))/torchaudio.pth"
	test -x $(NEXT_PY) || $(PYTHON) -m venv $(FACTORY)/next
	$(NEXT_PY) -m pip install --quiet --disable-pip-version-check --no-deps \
	  "$$(grep '^transformers==' requirements/ktransformers.txt)" llamafactory-kt==0.9.6.dev0
	echo "import site; site.addsitedir('$(call SITE,$(FACTORY_PY))')" > "$(call SITE,$(NEXT_PY))/a_packages.pth"
	$(FACTORY_PIP) --no-deps --upgrade --target $(FACTORY)/transformers-5.7 transformers==5.7.0
	$(FACTORY_PIP) --no-deps --upgrade --target $(FACTORY)/peft-0.19 peft==0.19.1
	@touch $@

$(FACTORY)/.built: $(FACTORY)/.installed pyproject.toml CMakeLists.txt src/ktransformers/__init__.py $(NATIVE)
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(FACTORY_PIP) --no-build-isolation --no-deps -C build-dir=$(FACTORY)/native -e .
	@touch $@

# Files of SGLang releases are taken from their wheels when the tests run. SGLang itself is not installed: it needs CUDA.
test-sglang: build  ## stock SGLang's and sglang-kt's own wrapper around our kt_kernel, and the plugin
	$(PY) tests/sglang/fetch.py build/sglang
	KT_SGLANG_FILES=$(CURDIR)/build/sglang $(PY) -m pytest -q tests/sglang

# Clients of npm and libraries in folders of their own. They run where only the loopback interface is; what the clients
# send is kept in record/, of which tests/agents/transcripts.py makes the transcripts of `make test`.
AGENTS := build/agents
NPM := npm install --no-audit --no-fund --silent

$(AGENTS)/.installed: tests/agents/package.json tests/agents/requirements.txt
	mkdir -p $(AGENTS)/npm $(AGENTS)/record
	cp tests/agents/package.json $(AGENTS)/npm/
	cd $(AGENTS)/npm && $(NPM)
	test -x $(AGENTS)/venv/bin/python || $(PYTHON) -m venv $(AGENTS)/venv
	$(AGENTS)/venv/bin/python -m pip install --quiet --disable-pip-version-check -r tests/agents/requirements.txt
	@touch $@

test-agents: build $(AGENTS)/.installed  ## coding agents of npm and libraries do tasks on a scripted model, offline
	KT_AGENTS=$(CURDIR)/$(AGENTS) PATH="$(CURDIR)/$(AGENTS)/npm/node_modules/.bin:$$PATH" \
	  unshare -rn sh -c 'ip link set lo up && exec $(PY) -m pytest -q tests/agents'

test-llamafactory: build $(FACTORY)/.built  ## stock LLaMA-Factory with use_kt on packed experts, in venvs of its own
	$(FACTORY_PY) -m pytest -q tests/llamafactory

soak: build  ## the tests marked soak
	$(PY) -m pytest -q -m soak

bench: build  ## speed against the roof of this machine
	$(PY) bench/moe.py

# make demo WORDS="train.keys.max_steps=30 eval.limit=8" for a shorter one
demo: $(if $(wildcard $(VENV)/.built),$(VENV)/.built,$(VENV)/.demo-built)
demo:  ## a small MoE made, tuned, proven, served and judged, with a table at the end
	$(VENV)/bin/kt loop examples/demo.yaml $(WORDS)
	@$(SHOW_CLOCK) --loop runs/demo

# MACHINE=aarch64 or x86_64 builds for that one alone; without it for both if there is a cross compiler. The tools are in
# venvs of their own, one for each Python.
wheel:  ## manylinux wheels with all variants for each Python found, and the names kt-kernel and kt-kernel-cuda, in dist/
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PYTHON) scripts/build_wheels.py --out dist $(MACHINE:%=--machine %)
	$(PYTHON) scripts/metadata_wheels.py --out dist

# OFFLINE=1 downloads nothing: the packages are those of each Python.
test-wheel:  ## the wheels in dist/ in bare venvs without a compiler: a tiny model trained, served and proven
	$(PYTHON) scripts/test_wheel.py $(OFFLINE:%=--offline)

# The native tests under a sanitizer, all variants; asan also runs the test of all bindings, with a module of its own.
asan tsan: sanitizer = $(if $(filter asan,$@),address,thread)
asan: python = -DSKBUILD=2 -DPython_EXECUTABLE=$(abspath $(PY))
asan: $(VENV)/.installed
asan:  ## native tests and all bindings under Address and UndefinedBehavior sanitizers
tsan:  ## native tests under ThreadSanitizer
asan tsan:
	$(CMAKE) -S . -B build/$@ -DCMAKE_BUILD_TYPE=Debug -DKT_SANITIZE=$(sanitizer) -DKT_TESTS=ON -DKT_EMULATE=$(EMULATE) \
	  -DKT_WERROR=ON $(python)
	$(CMAKE) --build build/$@ --parallel $(JOBS) --target kt_tests $(if $(python),_core)
	build/$@/kt_tests
	$(if $(python),$(ASAN_PYTHON) $(PY) -m pytest -q --noconftest -p no:cacheprovider tests/kernels/test_bindings.py)

# The x86-64 kernels from another architecture: a cross compiler, and an emulator that knows AVX2.
x86: CROSS ?= x86_64-linux-gnu-
x86: EMULATOR ?= qemu-x86_64 -cpu max -L /usr/x86_64-linux-gnu
x86:  ## cross-compile all variants for x86-64 and run the native tests that an emulator can
	$(CMAKE) -S . -B build/$@ -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=x86_64 -DCMAKE_CXX_COMPILER=$(CROSS)g++ \
	  -DCMAKE_NM=$$(command -v $(CROSS)nm) -DCMAKE_BUILD_TYPE=Release -DKT_TESTS=ON -DKT_WERROR=ON
	$(CMAKE) --build build/$@ --parallel $(JOBS) --target kt_tests
	$(EMULATOR) build/$@/kt_tests moe route plan backward lora formats bytes linear norm adapt attention

# The aarch64 kernels with bf16 and int8 matrix products, in an emulator that knows them; on x86-64 with a cross compiler.
aarch64: CROSS ?= $(if $(filter aarch64,$(shell uname -m)),,aarch64-linux-gnu-)
aarch64: EMULATOR ?= qemu-aarch64 -cpu max $(if $(CROSS),-L /usr/aarch64-linux-gnu)
aarch64:  ## compile all variants for aarch64 and run the native tests in an emulator
	$(CMAKE) -S . -B build/$@ $(if $(CROSS),-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64) \
	  -DCMAKE_CXX_COMPILER=$(CROSS)g++ -DCMAKE_NM=$$(command -v $(CROSS)nm) -DCMAKE_BUILD_TYPE=Release -DKT_TESTS=ON \
	  -DKT_WERROR=ON
	$(CMAKE) --build build/$@ --parallel $(JOBS) --target kt_tests
	KT_THREADS=1 $(EMULATOR) build/$@/kt_tests cpu dispatch moe route plan backward lora formats bytes linear norm adapt \
	  attention w8a8 packed_gemv

clean:  ## remove .venv, build/ and dist/
	rm -rf $(VENV) build dist

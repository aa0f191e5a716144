# make demo      sets everything up and trains a model on a sharded sequence
# make finetune  SFT and DPO by TRL's trainers on one process and on two ranks, compared at every step
# make test      sets everything up and runs the tests, but for those marked slow
# make test-all  runs all tests but for the nightly ones: what .ci/run does
# make nightly   the soak, two machines, every architecture of the zoo, other numbers of ranks, TSan
# make docs      the pages of docs/ and the API reference, into build/docs; checks links and anchors
# make lint      ruff and clang-format
# make sanitize  kernels (CUDA's, too, run on the CPU), layouts, the buffer pool and shared memory
#                under ASan and UBSan; under TSan in make nightly
# make cuda-check    compiles every .cu without a GPU, where there is an nvcc
# make gpu-test  on a machine with a GPU: builds against its torch and tests there
# make dist      sdist and wheel, into dist/; checks them, and runs the wheel in a new environment
# make bench     the exchange against its floor
# make overlap   what the layer hides, on a link of a set speed (root, iproute2)
# make bench-gather  weights cast before they are gathered, and the training step (root, iproute2)
# make bench-compile models sharded by the compile pass, next to DeepSpeed's AutoSP
# make bench-collectives  collectives along a dimension, and the schedule's training step
# make bench-experts  experts dealt out over the ranks, next to experts on every rank (root, iproute2: on a link)
# make bench-memory  memory and time over the compile pass's memory_budget
# make simulate  a training step on up to 1024 GPUs, simulated: docs/scale.md
# make zoo       some 320 tiny models against one process, in 40 minutes: docs/architectures.md
# make bench-train   the demo's training step over the length of the sequence, on 1, 2 and 4 ranks

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest
# A file at a time, whose tests share the processes of their ranks.
SIDE_BY_SIDE = -n 2 --dist loadfile
TORCH := 2.13.0
NVCC ?= $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
CUDA_INCLUDE = $(shell $(NVCC) --dryrun x.cu 2>&1 | sed -n 's/^\#$$ TOP=//p')/include
ARCHS := 80 90 100
COMMA := ,
CPP := $(shell find csrc -name '*.cpp' -o -name '*.h')
CPP_TESTS := $(wildcard tests/cpp/*.cpp tests/cpp/*.h)
CU := $(wildcard csrc/kernels/*.cu)
CUDA_HOSTS := $(shell grep -lE "DEEPSP_(CUDA|KERNELS)" -r csrc --include=*.cpp)

.PHONY: demo finetune test test-all nightly docs lint format sanitize sanitize-threads cuda-check gpu-test bench overlap bench-gather bench-compile bench-memory bench-collectives bench-experts bench-train simulate zoo dist clean

EXTRAS = $(BIN)/python -c 'import sys, tomllib; \
	extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	print(*sorted({x for e in sys.argv[1:] for x in extras[e]}))'

# torch first, and by version: any other way of asking may bring a larger one.
$(VENV)/torch: Makefile
	@echo "== torch $(TORCH) and build tools, into $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q torch==$(TORCH)
	$(BIN)/pip install -q "setuptools>=64" wheel ninja
	@touch $@

$(VENV)/demo: $(VENV)/torch pyproject.toml
	@echo "== what the demo needs"
	$(BIN)/pip install -q --no-build-isolation $$($(EXTRAS) demo)
	@touch $@

# DeepSpeed's setup imports torch, and needs telling that no ops are to be built.
$(VENV)/ready: $(VENV)/demo
	@echo "== what tests and linters need"
	DS_BUILD_OPS=0 $(BIN)/pip install -q --no-build-isolation $$($(EXTRAS) test lint)
	@touch $@

$(VENV)/built: $(VENV)/torch pyproject.toml setup.py $(CPP)
	@echo "== the C++ extension: about three minutes on two cores"
	$(BIN)/pip install -q --no-build-isolation --no-deps -e .
	@touch $@

demo: $(VENV)/demo $(VENV)/built
	@echo "== training on two ranks, next to one process"
	$(BIN)/python examples/train.py

finetune: $(VENV)/torch $(VENV)/built
	@echo "== what the example needs"
	$(BIN)/pip install -q --no-build-isolation $$($(EXTRAS) finetune)
	$(BIN)/python examples/finetune.py

test: $(VENV)/ready $(VENV)/built
	$(PYTEST) $(SIDE_BY_SIDE) -m "not (slow or nightly)"

# Ranks of one machine share memory, so only the last run tests messages.
test-all: $(VENV)/ready $(VENV)/built
	$(PYTEST) $(SIDE_BY_SIDE) -m "not nightly"
	DEEPSP_TRANSPORT=messages $(PYTEST) -m "messages and not nightly"

nightly: $(VENV)/ready $(VENV)/built sanitize-threads
	$(PYTEST) -m nightly

bench: $(VENV)/ready $(VENV)/built
	$(BIN)/python benchmarks/exchange.py

overlap: $(VENV)/ready $(VENV)/built
	$(BIN)/python benchmarks/overlap.py

bench-gather: $(VENV)/ready $(VENV)/built
	$(BIN)/python benchmarks/gather_cast.py

bench-compile: $(VENV)/ready $(VENV)/built
	$(BIN)/python benchmarks/compile.py

bench-memory: $(VENV)/ready $(VENV)/built
	$(BIN)/python benchmarks/memory_budget.py

bench-collectives: $(VENV)/ready $(VENV)/built
	$(BIN)/python benchmarks/collectives.py

bench-experts: $(VENV)/ready $(VENV)/built
	$(BIN)/python benchmarks/experts.py

bench-train: $(VENV)/ready $(VENV)/built
	$(BIN)/python benchmarks/train.py

simulate: $(VENV)/demo
	$(BIN)/python benchmarks/simulate.py --results benchmarks/results --figure docs/scale.png

# Beside the packages that tests see: torchvision changes what transformers imports. Without
# dependencies, which would bring another torch.
$(VENV)/zoo: $(VENV)/ready
	@echo "== packages with models for the zoo"
	rm -rf $@
	$(BIN)/pip install -q --no-deps --target $@ $$($(EXTRAS) zoo)

zoo: $(VENV)/zoo $(VENV)/built
	PYTHONPATH=$(VENV)/zoo $(BIN)/python benchmarks/architectures.py --write docs/architectures.md

$(VENV)/docs: $(VENV)/ready
	@echo "== what the docs need"
	$(BIN)/pip install -q $$($(EXTRAS) docs)
	@touch $@

docs: $(VENV)/docs $(VENV)/built
	$(PYTEST) -q tests/test_docs.py -k "links or anchors or index or reference"
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "open build/docs/index.html"

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP) $(CPP_TESTS) $(CU)

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP) $(CPP_TESTS) $(CU)

$(VENV)/dist: $(VENV)/torch pyproject.toml
	@echo "== what checks a distribution"
	$(BIN)/pip install -q $$($(EXTRAS) dist)
	@touch $@

# The wheel is built from the unpacked sdist. auditwheel names it for the glibc that it needs, and
# leaves torch's libraries to torch.
dist: $(VENV)/dist
	rm -rf dist build/dist
	$(BIN)/python -m build --no-isolation --outdir build/dist
	$(BIN)/auditwheel show build/dist/*.whl
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
		--exclude 'libcud*' --wheel-dir dist build/dist/*.whl
	cp build/dist/*.tar.gz dist
	$(BIN)/abi3audit --strict --verbose dist/*.whl
	$(PYTHON) tests/lib/installed.py dist/*.whl torch==$(TORCH)

# Each program once with ASan and UBSan, and, nightly, once with TSan. Only the pool's needs torch, which isn't
# instrumented itself. The CUDA kernels run on the CPU, where the headers of CUDA are.
sanitized = $(addprefix build/sanitize/,$(addsuffix -$(1),kernels pool mailbox $(if $(NVCC),stages)))
SANITIZED := $(call sanitized,address) $(if $(NVCC),build/sanitize/cuda-address)
SAN := -std=c++20 -O1 -g -fno-sanitize-recover=all -Wall -Wno-unknown-pragmas -pthread

sanitize: $(SANITIZED)
	@for program in $^; do echo $$program && $$program || exit 1; done

sanitize-threads: $(call sanitized,thread)
	@for program in $^; do echo $$program && $$program || exit 1; done

build/sanitize/kernels-%: tests/cpp/kernels.cpp tests/cpp/common.h $(wildcard csrc/kernels/*.cpp csrc/kernels/*.h csrc/layout/*)
	@mkdir -p build/sanitize
	$(CXX) $(SAN) -fsanitize=$*$(if $(filter address,$*),$(COMMA)undefined) $< csrc/kernels/*.cpp \
		csrc/layout/*.cpp -o $@

build/sanitize/mailbox-%: tests/cpp/mailbox.cpp tests/cpp/common.h $(wildcard csrc/transport/mailbox.* csrc/transport/shared_memory.*)
	@mkdir -p build/sanitize
	$(CXX) $(SAN) -fsanitize=$*$(if $(filter address,$*),$(COMMA)undefined) $< csrc/transport/mailbox.cpp \
		csrc/transport/shared_memory.cpp -o $@

build/sanitize/cuda-address: tests/cpp/cuda.cpp $(wildcard tests/cpp/*.h) $(CU) $(wildcard csrc/kernels/*)
	@mkdir -p build/sanitize
	$(CXX) $(SAN) -fsanitize=address,undefined -DDEEPSP_CUDA -I$(CUDA_INCLUDE) \
		-include tests/cpp/cuda_on_cpu.h -x c++ $< $(CU) csrc/kernels/*.cpp -o $@

build/sanitize/stages-%: tests/cpp/stages.cpp $(wildcard tests/cpp/*.h csrc/kernels/*.h) csrc/kernels/copy_cuda.cu csrc/kernels/signal_cuda.cu csrc/kernels/copy.cpp $(wildcard csrc/transport/stages.*)
	@mkdir -p build/sanitize
	$(CXX) $(SAN) -fsanitize=$*$(if $(filter address,$*),$(COMMA)undefined) -DDEEPSP_CUDA -I$(CUDA_INCLUDE) \
		-include tests/cpp/cuda_on_cpu.h -x c++ $(filter %.cpp %.cu,$^) -o $@

build/sanitize/pool-%: tests/cpp/pool.cpp tests/cpp/common.h $(wildcard csrc/transport/pool.* csrc/transport/attach.* csrc/transport/*.h) $(VENV)/ready
	@mkdir -p build/sanitize
	torch=$$($(BIN)/python -c 'import os, torch; print(os.path.dirname(torch.__file__))') && \
		$(CXX) $(SAN) -fsanitize=$*$(if $(filter address,$*),$(COMMA)undefined) $< -o $@ \
		-I$$torch/include -I$$torch/include/torch/csrc/api/include \
		-L$$torch/lib -Wl,-rpath,$$torch/lib -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10

# The vector kernels must move 16 bytes at a time: PTX shows it.
cuda-check: $(VENV)/ready
ifeq ($(NVCC),)
	@echo "cuda-check: skipped, there is no nvcc"
else
	@mkdir -p build/cuda-check
	@for cu in $(CU); do for arch in $(ARCHS); do \
		echo "nvcc sm_$$arch $$cu" && \
		$(NVCC) -std=c++17 -O3 -DDEEPSP_CUDA -Werror all-warnings \
			-gencode arch=compute_$$arch,code=sm_$$arch -c $$cu -o build/cuda-check/out.o || exit 1; \
	done; done
	@for cu in copy_cuda cast_cuda sum_cuda; do \
		$(NVCC) -std=c++17 -O3 -DDEEPSP_CUDA -arch=compute_90 -ptx csrc/kernels/$$cu.cu \
			-o build/cuda-check/out.ptx || exit 1; \
		grep -q 'ld.global.*v4' build/cuda-check/out.ptx && \
			grep -q 'st.global.*v4' build/cuda-check/out.ptx && \
			echo "$$cu.cu: 16-byte loads and stores" || \
			{ echo "$$cu.cu: no 16-byte accesses"; exit 1; }; \
	done
	@for cpp in $(CUDA_HOSTS); do echo "g++ with CUDA $$cpp" && \
		$(CXX) -std=c++20 -fsyntax-only -DAT_PER_OPERATOR_HEADERS -DDEEPSP_CUDA -DC10_CUDA_NO_CMAKE_CONFIGURE_FILE \
			$$($(BIN)/python -c 'from torch.utils.cpp_extension import include_paths as i; \
			import sysconfig; print(*["-I" + p for p in [*i(), sysconfig.get_path("include")]])') \
			-I$(CUDA_INCLUDE) $$cpp || exit 1; done
endif

# On a machine with a GPU: all of it, in commands of at most ten minutes each, which tests/gpu/first.sh
# runs one at a time, too. make gpu-test ONLY="along_dim dropout" runs some tests.
gpu-test:
ifeq ($(ONLY),)
	PYTHON=$(PYTHON) tests/gpu/first.sh all
else
	PYTHON=$(PYTHON) tests/gpu/first.sh 1
	PYTHONPATH=build/gpu/lib:tests/lib $(PYTHON) tests/gpu/run.py $(ONLY)
endif

clean:
	rm -rf build dist *.egg-info deepsp/*.so deepsp/_built_for.py $(VENV)/built

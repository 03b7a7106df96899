# For people: each target does all of its set-up on a machine that has python3 >= 3.10 and a C++ compiler.
#   make train   build, then train a GPT on the Python standard library's sources over two processes
#   make test    build, then run the tests, in one process more than there are cores; make test-full runs the grids whose cut stands among them
#   make cluster  build, then run the tests that start real launchers: mpirun, torchrun, Slurm from packages of apt; make cluster-full kills their
#                ranks, and runs the suite's tests of collectives, data parallelism and ZeRO over MPI
#   make bench   build, then run every bench and write rows to benchmarks/results/
#   make lint    ruff, mypy and clang-format
#   make docs    build, then make the site of docs/ and of all docstrings in build/docs/, and run the long programs of pages and examples
#   make wheel   build, then make a wheel in dist/ for this Python and for Linux like this one or newer
#   make rehearse  build, then run the tests that a GPU runs on a CUDA device that is not there: tests/pretend_cuda
#   make race    the CUDA kernels on the host under ThreadSanitizer, AddressSanitizer and UBSan, needs g++ alone: tests/cuda/race
#   make gpu     on a machine with CUDA torch, nvcc, cmake, ninja and pytest: build, test and bench on the GPU; installs nothing; PARTS= chooses: see benchmarks/gpu.sh
TORCH  ?= torch==2.13.0
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# pip makes byte code of one file after another; BYTE_CODE makes that of what pip installed on every core, but for the tests of other
# packages, most of transformers' models and packages that are imported in small part, more than half of all: of these Python makes
# what is imported.
PIP    := $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile
IN_PART := pip|setuptools|networkx|sklearn|fontTools|pygments|pydantic|werkzeug|grpc|torchgen|torch/(testing|onnx)|scipy/signal|sympy/(physics|stats|combinatorics|parsing|tensor)
BYTE_CODE = $(BIN)/python -m compileall -q -j 0 -x '/tests?/|/transformers/models/|/($(IN_PART))/' $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') >/dev/null 2>&1 || true
# Hundreds of processes of the tests import the same modules: their byte code is kept, whatever the caller's shell says.
export PYTHONDONTWRITEBYTECODE :=
# Prints the lines of pyproject.toml that name packages, of the dependencies and of extras; pip has tomli for Pythons without tomllib.
REQUIREMENTS := import sys; from pip._vendor import tomli; p = tomli.load(open("pyproject.toml", "rb"))["project"]; \
	p = {"dependencies": p["dependencies"], **p["optional-dependencies"]}; print(*(r for name in sys.argv[1:] for r in p[name]), sep="\n")
CONFIG ?= examples/gpt_small.toml
RANKS  ?= 2
TESTS  ?= tests
# One worker more than there are cores, since tests of lost ranks wait more than they compute; each has a pool of ranks of its own for
# each size of world: more than four workers are worth their memory on no machine.
WORKERS  ?= $(shell $(PYTHON) -c 'import os; print(min(4, (os.cpu_count() or 1) + 1))')
PARALLEL ?= -n $(WORKERS) --dist loadfile
SOURCES := setup.py build_backend.py CMakeLists.txt pyproject.toml pyops/__init__.py $(shell find csrc -type f)

.PHONY: train test test-full cluster cluster-full bench lint docs wheel rehearse race gpu clean
.DELETE_ON_ERROR:

train: $(VENV)/.built
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) -m pyops train $(CONFIG)

test: $(VENV)/.built
	$(BIN)/python -m tests.byte_code
	$(BIN)/python -m pytest tests $(PARALLEL) --durations 10

test-full: $(VENV)/.built
	$(BIN)/python -m tests.byte_code
	$(BIN)/python -m pytest tests -m "full and not cluster" $(PARALLEL)
	ARCHITECTURES=all PYTHON=$(BIN)/python bash .ci/compile_cuda.sh
	LAUNCHES=all PYTHON=$(BIN)/python bash .ci/triton_facts.sh

cluster: $(VENV)/.cluster
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest tests/cluster -m "cluster and not full"

# With mpirun's pools of ranks, whoever starts them: the tests of collectives, data parallelism, compression and ZeRO of the suite.
cluster-full: $(VENV)/.cluster
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest tests/cluster -m "cluster and full"
	PATH="$(abspath $(BIN)):$$PATH" PYOPS_TEST_WORLD=mpi $(BIN)/python -m pytest tests/comm tests/test_data_parallel.py \
		tests/test_data_parallel_codec.py tests/zero

bench: $(VENV)/.built
	$(BIN)/python -m pyops bench

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(filter csrc/%,$(SOURCES)) $(shell find tests -name '*.cpp' -o -name '*.h')

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	$(BIN)/python -m pytest -m full tests/project

# torch is no part of the wheel: its libraries are those of the torch that pip installs beside it. A wheel holds kernels for every
# torch from 2.11 on, and pyops/_native for one Python: call it once for each, make wheel VENV=.venv-3.12 PYTHON=python3.12.
wheel: $(VENV)/.lint
	rm -rf build/lib.* build/bdist.* build/wheel
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude 'libtorch*.so' --exclude 'libc10*.so' --wheel-dir dist build/wheel/*.whl

race:
	$(PYTHON) -m tests.cuda.race.check $(RACE)

rehearse: $(VENV)/.built
	$(BIN)/python -m tests.byte_code
	PYOPS_PRETEND_CUDA=$$($(BIN)/python tests/pretend_cuda/build.py) PYTHONPATH=tests/pretend_cuda PYOPS_TEST_DEVICE=cuda \
		$(BIN)/python -m pytest $(TESTS) $(PARALLEL)

gpu:
	bash benchmarks/gpu.sh

$(VENV)/.packages: pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit("pyops needs Python 3.10 or newer; call make PYTHON=python3.12, say" if sys.version_info < (3, 10) else 0)'
	@$(PYTHON) -m venv $(VENV) || (echo "python3 -m venv failed: install your system's python3-venv package" >&2; exit 1)
	$(PIP) "$(TORCH)"
	$(PIP) "setuptools>=77" wheel "pybind11>=2.13" "cmake>=3.24" ninja
	touch $@

# The compiler takes every core, and pip one of them for as long as it unpacks: side by side. What pyops depends on is the same either
# way, so that neither pip writes what the other does.
$(VENV)/.built: $(VENV)/.packages $(SOURCES)
	$(BIN)/python -c '$(REQUIREMENTS)' dependencies train test > $(VENV)/requirements.txt
	$(PIP) --no-build-isolation --no-deps -e . & kernels=$$!; \
		$(PIP) -r $(VENV)/requirements.txt; packages=$$?; wait $$kernels && exit $$packages
	$(BYTE_CODE)
	touch $@

# Of what is added to a built checkout, packages alone: it is not built once more.
$(VENV)/.lint: $(VENV)/.built
	$(BIN)/python -c '$(REQUIREMENTS)' lint wheel > $@.txt
	$(PIP) -r $@.txt
	$(BYTE_CODE)
	touch $@

$(VENV)/.docs: $(VENV)/.built
	$(BIN)/python -c '$(REQUIREMENTS)' docs > $@.txt
	$(PIP) -r $@.txt
	$(BYTE_CODE)
	touch $@

$(VENV)/.cluster: $(VENV)/.built
	$(BIN)/python -c '$(REQUIREMENTS)' mpi > $@.txt
	$(PIP) -r $@.txt mpich
	touch $@

clean:
	rm -rf build $(VENV) pyops/_C.so pyops/_native*.so pyops/_build.json

#!/usr/bin/env bash
# `make gpu`: on a machine that has CUDA torch, nvcc, cmake and pytest, builds for its GPU, runs the test suite there, looks for
# bad memory accesses and races, and runs the benches. Installs and downloads nothing. Under ten minutes a call: what does not fit
# in one is left out, so give the parts to several calls, such as PARTS="kernels others" and then PARTS="sanitize bench".
#
#   OUT      where rows, log and summary go   (benchmarks/results/gpu)
#   PYTHON   the Python that has torch        (python3)
#   DEVICE   cuda; cpu rehearses the script on a machine without a GPU
#   BUDGET   seconds for all of it            (565)
#   PARTS    which of these, always in this order: kernels others sanitize bench   (all; building comes first in any case)
#
# Each part has its own time limit and never takes the others down; the summary comes last. A part that is stopped is interrupted
# as by Ctrl-C, so that pytest names what had failed until then. Rows of benches are kept as they come, in OUT/rows.jsonl.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results/gpu}
DEVICE=${DEVICE:-cuda}
BUDGET=${BUDGET:-565}
PARTS=${PARTS:-kernels others sanitize bench}
for word in $PARTS; do
  [[ " kernels others sanitize bench " == *" $word "* ]] ||
    { echo "PARTS has no part '$word'; there are kernels, others, sanitize and bench" >&2; exit 2; }
done
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
LOG=$OUT/log.txt SUMMARY=$OUT/summary.txt
: >"$LOG"
: >"$SUMMARY"
export PATH=$PATH:/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer
export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8}  # torch reads it once, at the first product
export PYOPS_BENCH_ROWS=$OUT/rows.jsonl
: >"$PYOPS_BENCH_ROWS"
export PYTHONUNBUFFERED=1 PYOPS_TEST_DEVICE=$DEVICE PYTHON DEVICE
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
say() { echo "$*" | tee -a "$LOG" >>"$SUMMARY"; }

part() {  # seconds name command...: its output goes to the log, its outcome to the summary
  local limit=$1 name=$2 start=$SECONDS left=$((BUDGET - SECONDS)) status outcome
  shift 2
  : >"$OUT/part.txt"
  ((left > 10)) || { say "$(printf '%-34s left out: no time left' "$name")"; return 1; }
  ((limit < left)) || limit=$left
  echo "== $name: $*" | tee -a "$LOG"
  timeout --signal=INT --kill-after=10 "$limit" "$@" >"$OUT/part.txt" 2>&1
  status=$?
  cat "$OUT/part.txt" >>"$LOG"
  case $status in
    0) outcome="passed" ;;
    124 | 137) outcome="STOPPED after its $limit s" ;;
    *) outcome="FAILED ($status)" ;;
  esac
  say "$(printf '%-34s %-24s %4d s' "$name" "$outcome" $((SECONDS - start)))"
  return $status
}
wants() { [[ " $PARTS " == *" $1 "* ]]; }
last() { grep -E "$1" "$OUT/part.txt" | tail -"${2:-1}" | sed 's/^/    /' | tee -a "$SUMMARY"; }

machine() {
  "$PYTHON" - <<'PY'
import importlib, importlib.util, os, platform, sys
import torch
if os.environ["DEVICE"] == "cpu":
    sys.exit(print(f"machine: a rehearsal on the CPU, torch {torch.__version__}, python {platform.python_version()}"))
if not torch.cuda.is_available():
    sys.exit("this torch sees no CUDA device (DEVICE=cpu rehearses without one)")
p = torch.cuda.get_device_properties(0)
triton = importlib.util.find_spec("triton") is not None and importlib.import_module("triton").__version__
print(f"machine: {p.name}, sm_{p.major}{p.minor}, {p.multi_processor_count} multiprocessors, {p.total_memory / 2**30:.0f} GiB, "
      f"torch {torch.__version__}, triton {triton or 'is missing: the ops between layers have no kernel'}, "
      f"python {platform.python_version()}")
PY
}

build() {  # through setup.py's own functions: needs no setuptools that can read pyproject.toml, and no pybind11 but torch's
  PYOPS_CUDA=ON CMAKE_CUDA_ARCHITECTURES=${CMAKE_CUDA_ARCHITECTURES:-$ARCHITECTURE} "$PYTHON" - <<'PY'
import importlib.util, pathlib, sys
import setuptools
setuptools.setup = lambda **_: None
import setup
build = setup.ROOT / "build" / "cmake-gpu"
build.mkdir(parents=True, exist_ok=True)
if importlib.util.find_spec("pybind11") is None:
    stand_in = build / "of_torch" / "pybind11"
    stand_in.mkdir(parents=True, exist_ok=True)
    if not (stand_in / "include").exists():
        (stand_in / "include").symlink_to(setup.find_torch()[0] / "include")
    sys.path.append(str(stand_in.parent))
setup.run_cmake(build)
for name in setup.ARTEFACTS:
    setup.place(build / name, setup.ROOT / "pyops" / name)
PY
}

# Without torch's cache each tensor is an allocation of its own, whose ends the tool knows. Then no graph can be captured, and freeing
# waits for the device: tests of both are left out. torch asks the driver what it may refuse to answer: that is no error of ours.
sanitize() {
  local options=(--tool "$1" --error-exitcode 9)
  [ "$1" = memcheck ] && options+=(--report-api-errors no)
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer "${options[@]}" "$PYTHON" -m pytest -p tests.optional_packages \
    tests/cuda/test_small.py -k "not graph and not waits and not stream and not one_launch"
}

bench() {
  "$PYTHON" -m benchmarks "$1" --device "$DEVICE" --rounds 7
}

export -f machine build sanitize bench

part 120 "machine" bash -c machine || { cat "$OUT/part.txt" "$SUMMARY"; exit 1; }
last '^machine'
ARCHITECTURE=90-real
[ "$DEVICE" = cpu ] || ARCHITECTURE=$("$PYTHON" -c 'import torch; print("%d%d-real" % torch.cuda.get_device_capability())')
export ARCHITECTURE
part 240 "build" bash -c build || { tail -40 "$OUT/part.txt"; cat "$SUMMARY"; exit 1; }
# The kernels first: on a GPU the same tests run them there. Triton's, which are compiled as they are met, come after those in C++,
# and on several processes where pytest can. What Triton's interpreter and its compiler can prove without a GPU is left out.
pytest=("$PYTHON" -m pytest -p tests.optional_packages -rfE)
triton=() others=() spread=() tests=0
for stem in activation cross_entropy dropout norm rotary tracing; do
  triton+=("tests/ops/test_$stem.py") others+=("--ignore=tests/ops/test_$stem.py")
done
[ "$DEVICE" != cpu ] && "$PYTHON" -c 'import xdist' 2>/dev/null && spread=(-n 8)
tested() {  # the status of the part before
  tests=$((tests + $1))
  last '^(FAILED|ERROR)' 40
  last '(passed|failed|error|Interrupt)'
}
if wants kernels; then
  part 120 "C++ kernels on $DEVICE" "${pytest[@]}" tests/cuda tests/ops "${others[@]}"
  tested $?
  part 240 "Triton kernels on $DEVICE" "${pytest[@]}" "${spread[@]}" "${triton[@]}"
  tested $?
fi
if wants others; then
  part 180 "other tests on $DEVICE" "${pytest[@]}" tests --ignore tests/ops --ignore tests/cuda
  tested $?
fi
if wants sanitize; then
  if command -v compute-sanitizer >/dev/null && [ "$DEVICE" != cpu ]; then
    for tool in memcheck racecheck; do
      part 100 "compute-sanitizer $tool" bash -c "sanitize $tool"
      tests=$((tests + $?))
      last 'ERROR SUMMARY|RACECHECK SUMMARY|passed|failed'
    done
  else
    say "compute-sanitizer is not here: skipped"
  fi
fi
# Those that time a GPU; the others time processes on CPUs whatever the device is. The last four need a GPU for each rank.
if wants bench; then
  for name in kernels optim codec layerwise norm activation cross_entropy collectives data_parallel tensor_parallel zero; do
    part 90 "bench $name" bash -c "bench $name"
    tests=$((tests + $?))
    sed 's/^/    /' "$OUT/part.txt" | cut -c1-200 >>"$SUMMARY"
  done
fi
rm -f "$OUT/part.txt"
say "$(wc -l <"$OUT/rows.jsonl") rows in rows.jsonl; the whole log is in log.txt; $SECONDS s in all"
echo
cat "$SUMMARY"
exit $((tests > 0))

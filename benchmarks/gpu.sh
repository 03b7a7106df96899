#!/usr/bin/env bash
# `make gpu`: on a machine that has CUDA torch, nvcc, cmake and pytest, builds for its GPU, runs the test suite there, looks for
# bad memory accesses and races, and runs every bench. Installs and downloads nothing. Under ten minutes.
#
#   OUT      where rows, log and summary go   (benchmarks/results/gpu)
#   PYTHON   the Python that has torch        (python3)
#   DEVICE   cuda; cpu rehearses the script on a machine without a GPU
#   BUDGET   seconds for all of it            (580)
#
# Each part has its own time limit and never takes the others down; the summary comes last.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results/gpu}
DEVICE=${DEVICE:-cuda}
BUDGET=${BUDGET:-580}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
LOG=$OUT/log.txt SUMMARY=$OUT/summary.txt
: >"$LOG"
: >"$SUMMARY"
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
  timeout --kill-after=10 "$limit" "$@" >"$OUT/part.txt" 2>&1
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

sanitize() { PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 9 "$PYTHON" -m pytest -p tests.optional_packages -x tests/cuda/test_small.py; }

bench() {
  "$PYTHON" -m benchmarks "$1" --device "$DEVICE" --rounds 7
}

export -f machine build sanitize bench

part 60 "machine" bash -c machine || { cat "$OUT/part.txt" "$SUMMARY"; exit 1; }
last '^machine'
ARCHITECTURE=90-real
[ "$DEVICE" = cpu ] || ARCHITECTURE=$("$PYTHON" -c 'import torch; print("%d%d-real" % torch.cuda.get_device_capability())')
export ARCHITECTURE
part 150 "build" bash -c build || { tail -40 "$OUT/part.txt"; cat "$SUMMARY"; exit 1; }
# The kernels first, C++ and Triton alike: on a GPU the same tests run them there. What Triton's interpreter and its compiler can
# prove without a GPU is left out.
part 170 "kernels on $DEVICE" "$PYTHON" -m pytest -p tests.optional_packages -rfE tests/ops tests/cuda
kernels=$?
last '^(FAILED|ERROR)' 40
last '(passed|failed|error)'
part 150 "other tests on $DEVICE" "$PYTHON" -m pytest -p tests.optional_packages -rfE tests --ignore tests/ops --ignore tests/cuda
tests=$((kernels + $?))
last '^(FAILED|ERROR)' 40
last '(passed|failed|error)'
if command -v compute-sanitizer >/dev/null && [ "$DEVICE" != cpu ]; then
  for tool in memcheck racecheck; do
    part 50 "compute-sanitizer $tool" bash -c "sanitize $tool"
    last 'ERROR SUMMARY|RACECHECK SUMMARY|passed|failed'
  done
else
  say "compute-sanitizer is not here: skipped"
fi
before=$(cat benchmarks/results/*.jsonl 2>/dev/null | wc -l)
first="kernels optim norm activation cross_entropy"
names=$(cd benchmarks && ls bench_*.py | sed 's/^bench_//; s/[.]py$//' | grep -vxF "$(tr ' ' '\n' <<<"$first")")
for name in $first $names; do
  part 90 "bench $name" bash -c "bench $name"
  sed 's/^/    /' "$OUT/part.txt" | cut -c1-200 >>"$SUMMARY"
done
rm -f "$OUT/part.txt"
cat benchmarks/results/*.jsonl 2>/dev/null | tail -n "+$((before + 1))" >"$OUT/rows.jsonl"
say "$(wc -l <"$OUT/rows.jsonl") rows in rows.jsonl; the whole log is in log.txt; $SECONDS s in all"
echo
cat "$SUMMARY"
exit "$tests"

#!/usr/bin/env bash
# `make gpu`: on a machine that has CUDA torch, nvcc, cmake and pytest, builds for its GPU, runs the test suite there, looks for
# bad memory accesses and races, runs the benches, and profiles a training step. Installs and downloads nothing. Under ten minutes a
# call: what does not fit in one is left out, so give the parts to several calls, in this order. The first decides most, in six
# minutes; each fits with its limits below added up, but for the build, which the first alone has:
#
#   PARTS=kernels
#   PARTS=bench BENCHES="kernels layerwise norm activation cross_entropy"
#   PARTS="sanitize bench" BENCHES="codec optim"
#   PARTS=train
#   PARTS=others
#   PARTS=profile
#
# What was built is kept in OUT/built. A later call on a fresh machine builds nothing if these files are put back into pyops/ and the
# sources, torch and the GPU's architecture are still the same. Any machine with nvcc and the same Python and torch can build them.
#
#   OUT      where rows, log and summary go   (benchmarks/results/gpu)
#   PYTHON   the Python that has torch        (python3)
#   DEVICE   cuda; cpu rehearses the script on a machine without a GPU
#   BUDGET   seconds for all of it            (555)
#   PARTS    which of these, always in this order: kernels others sanitize bench train profile   (all; building comes first)
#   BENCHES  which benches part bench runs    (those of one GPU's kernels; with more GPUs also those of ranks)
#   ONLY     only cases of benches whose name contains this
#   PYOPS_COMMIT  what rows name as their commit where the sources are a copy outside of git
#
# Each part has its own time limit and never takes the others down; the summary comes last. A part that is stopped is interrupted
# as by Ctrl-C, so that pytest names what had failed until then. Rows of benches are kept as they come, in OUT/rows.jsonl; the summary
# ends with the targets they miss. To keep rows: append them to the machine's file in benchmarks/results, python -m benchmarks.instruments.report.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results/gpu}
DEVICE=${DEVICE:-cuda}
BUDGET=${BUDGET:-555}
ALL_PARTS="kernels others sanitize bench train profile"
PARTS=${PARTS:-$ALL_PARTS}
ONLY=${ONLY:-}
for word in $PARTS; do
  [[ " $ALL_PARTS " == *" $word "* ]] || { echo "PARTS has no part '$word'; there are: $ALL_PARTS" >&2; exit 2; }
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
export PYTHONUNBUFFERED=1 PYOPS_TEST_DEVICE=$DEVICE PYTHON DEVICE ONLY OUT
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
import hashlib, importlib.util, json, os, pathlib, shutil, sys
import setuptools
setuptools.setup = lambda **_: None
import setup
sources = sorted([*(setup.ROOT / "csrc").rglob("*.*"), setup.ROOT / "CMakeLists.txt"])
digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
digest.update(f"{setup.torch_to_build_against()[1]} {os.environ['CMAKE_CUDA_ARCHITECTURES']} {sys.version_info[:2]}".encode())
there = [setup.ROOT / "pyops" / name for name in setup.ARTEFACTS]
described = there[-1]  # _build.json
if all(path.exists() for path in there) and json.loads(described.read_text()).get("made_of") == digest.hexdigest():
    sys.exit(print("nothing to build: pyops/ has what these sources give"))
build = setup.ROOT / "build" / "cmake-gpu"
build.mkdir(parents=True, exist_ok=True)
if importlib.util.find_spec("pybind11") is None:
    stand_in = build / "of_torch" / "pybind11"
    stand_in.mkdir(parents=True, exist_ok=True)
    if not (stand_in / "include").exists():
        (stand_in / "include").symlink_to(setup.torch_to_build_against()[0] / "include")
    sys.path.append(str(stand_in.parent))
setup.run_cmake(build)
for name, path in zip(setup.ARTEFACTS, there):
    setup.place(build / name, path)
described.write_text(json.dumps({**json.loads(described.read_text()), "made_of": digest.hexdigest()}) + "\n")
kept = pathlib.Path(os.environ["OUT"]) / "built"
kept.mkdir(exist_ok=True)
for path in there:
    shutil.copy2(path, kept)
PY
}

# Without torch's cache each tensor is an allocation of its own, whose ends the tool knows. Then no graph can be captured, and freeing
# waits for the device: tests of both are left out. Each op of the library is called once, in C++ or Triton. torch asks the driver what it may refuse to answer: that is no error of ours.
sanitize() {
  local options=(--tool "$1" --error-exitcode 9)
  [ "$1" = memcheck ] && options+=(--report-api-errors no)
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer "${options[@]}" "$PYTHON" -m pytest -p tests.optional_packages \
    tests/cuda/device/test_small.py tests/cuda/device/test_small_layers.py tests/ops/test_library.py \
    -k "not graph and not waits and not stream and not one_launch and not opcheck"
}

bench() {  # a rehearsal keeps its rows in OUT alone
  local options=(--device "$DEVICE" --rounds 7)
  [ "$DEVICE" = cpu ] && options=(--device cpu --rounds 1 --no-save)
  [ -n "$ONLY" ] && options+=(--only "$ONLY")
  "$PYTHON" -m benchmarks "$1" "${options[@]}"
}

profile_step() { "$PYTHON" -m benchmarks.training.profile_step --device "$DEVICE"; }

resources() {  # a line for each kernel in C++: registers, stack, shared and local memory, name
  "$CUOBJDUMP" --dump-resource-usage pyops/_C.so 2>&1 | awk '/Function/ { name = $2; sub(/:$/, "", name) } /REG:/ { print $1, $2, $3, $4, name }' |
    { c++filt 2>/dev/null || cat; } | sort -u
}

counters() {  # few enough to be taken in one pass, since a second would have to bring memory back as it was
  local metrics=gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,launch__registers_per_thread
  metrics+=,dram__throughput.avg.pct_of_peak_sustained_elapsed,sm__warps_active.avg.pct_of_peak_sustained_active
  # The clocks are left as they are: the machine may be lent.
  ncu --clock-control none --profile-from-start off --metrics "$metrics" "$PYTHON" -m benchmarks.ops.machine_code.profile_kernels
}

export -f machine build sanitize bench profile_step resources counters

part 120 "machine" bash -c machine || { cat "$OUT/part.txt" "$SUMMARY"; exit 1; }
last '^machine'
ARCHITECTURE=90-real
[ "$DEVICE" = cpu ] || ARCHITECTURE=$("$PYTHON" -c 'import torch; print("%d%d-real" % torch.cuda.get_device_capability())')
export ARCHITECTURE
part 240 "build" bash -c build || { tail -40 "$OUT/part.txt"; cat "$SUMMARY"; exit 1; }
# The kernels first: on a GPU the same tests run them there. Triton's, which are compiled as they are met, come after those in C++,
# and on several processes where pytest can. What Triton's interpreter and its compiler can prove without a GPU is left out.
gpus=$([ "$DEVICE" = cpu ] && echo 0 || "$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
((gpus > 1)) || say "NCCL is not tested: it takes a GPU for each rank, and $gpus are here"
export PYOPS_FAILURES=$OUT/failures.txt  # each as it comes, for a part that is stopped
: >"$PYOPS_FAILURES"
pytest=("$PYTHON" -m pytest -p tests.optional_packages -p tests.failures_at_once -rfE)
triton=(tests/ops/layers tests/ops/test_tracing.py) spread=() fewer=() tests=0
others=("${triton[@]/#/--ignore=}")
[ "$DEVICE" != cpu ] && "$PYTHON" -c 'import xdist' 2>/dev/null && spread=(-n 8) fewer=(-n 6)  # fewer: each has ranks of its own, each with a context of half a GiB
steps=(tests/cuda/device/test_training.py tests/cuda/device/test_ranks.py tests/cuda/device/test_host.py)
tested() {  # the status of the part before
  tests=$((tests + $1))
  last '^(FAILED|ERROR)' 40
  last '(passed|failed|error|Interrupt)'
}
if wants kernels; then
  part 120 "C++ kernels on $DEVICE" "${pytest[@]}" tests/cuda tests/ops "${others[@]}" "${steps[@]/#/--ignore=}"
  tested $?
  part 240 "Triton kernels on $DEVICE" "${pytest[@]}" "${spread[@]}" "${triton[@]}"
  tested $?
fi
if wants others; then
  part 200 "steps, ranks, host on $DEVICE" "${pytest[@]}" "${steps[@]}"
  tested $?
  part 330 "other tests on $DEVICE" "${pytest[@]}" "${fewer[@]}" tests --ignore tests/ops --ignore tests/cuda
  tested $?
fi
if wants sanitize; then
  if command -v compute-sanitizer >/dev/null && [ "$DEVICE" != cpu ]; then
    for tool in memcheck racecheck; do
      part 170 "compute-sanitizer $tool" bash -c "sanitize $tool"
      tests=$((tests + $?))
      last 'ERROR SUMMARY|RACECHECK SUMMARY|passed|failed'
    done
  else
    say "compute-sanitizer is not here: skipped"
  fi
fi
timed() {  # seconds, bench: its rows go to the summary
  part "$1" "bench $2" bash -c "bench $2"
  tests=$((tests + $?))
  sed 's/^/    /' "$OUT/part.txt" | cut -c1-400 >>"$SUMMARY"
}
# Those that time one device, with what torch.compile takes for its shapes; then those that need a GPU for each rank. The rest time
# processes on CPUs whatever the device is.
if wants bench; then
  declare -A limits=([kernels]=60 [optim]=100 [layerwise]=40 [codec]=70 [norm]=110 [activation]=120 [cross_entropy]=100)
  benches="kernels layerwise norm activation cross_entropy codec optim"  # what no GPU has timed yet comes first
  { [ "$DEVICE" = cpu ] || ((gpus > 1)); } && benches+=" collectives data_parallel tensor_parallel zero"
  for name in ${BENCHES:-$benches}; do
    timed "${limits[$name]:-90}" "$name"
  done
fi
if wants train; then
  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True timed 280 gpt  # the larger one fills most of 78 GiB
  timed 130 offload
fi
profiled() {  # seconds, name, function, lines for the summary: all of it goes to profile.txt
  part "$1" "$2" bash -c "$3"
  { echo "== $2"; cat "$OUT/part.txt"; } >>"$OUT/profile.txt"
  head -"$4" "$OUT/part.txt" | sed 's/^/    /' | cut -c1-160 >>"$SUMMARY"
}
if wants profile; then
  : >"$OUT/profile.txt"
  profiled 100 "profile of a GPT step" profile_step 24
  CUOBJDUMP=$(command -v cuobjdump || "$PYTHON" -c 'import glob, triton; print(glob.glob(triton.__path__[0] + "/**/cuobjdump", recursive=True)[0])')
  export CUOBJDUMP
  if [ "$DEVICE" = cpu ] || [ -z "$CUOBJDUMP" ]; then
    say "cuobjdump is not here, or no GPU: no registers"
  else
    profiled 30 "registers of kernels" resources 0
    say "    $(grep -c '^REG:' "$OUT/part.txt") kernels, $(grep -cE '^REG:.*(STACK|LOCAL):[1-9]' "$OUT/part.txt") of them with a stack or local memory; see profile.txt"
  fi
  if [ "$DEVICE" = cpu ] || ! command -v ncu >/dev/null; then
    say "ncu is not here, or no GPU: no counters"
  else
    profiled 90 "ncu" counters 0
    last 'Context|gpu__time|dram__(bytes|throughput)' 120
  fi
fi
if [ -s "$PYOPS_BENCH_ROWS" ] && [ -z "${PYOPS_COMMIT:-}" ] && ! git rev-parse HEAD >/dev/null 2>&1; then
  say "the rows name no commit, for the sources are outside of git: give PYOPS_COMMIT"
fi
[ -s "$PYOPS_BENCH_ROWS" ] && "$PYTHON" -m benchmarks.instruments.verdicts "$PYOPS_BENCH_ROWS" 2>&1 | tee -a "$LOG" >>"$SUMMARY"
rm -f "$OUT/part.txt"
say "$(wc -l <"$OUT/rows.jsonl") rows in rows.jsonl; the whole log is in log.txt; $SECONDS s in all"
echo
cat "$SUMMARY"
exit $((tests > 0))

#!/usr/bin/env bash
# Compiles every CUDA source for sm_90 with warnings as errors, and fails on a spill or a stack frame in any kernel, or on a name that
# two sources define; for sm_80 as well those sources of which the text depends on the architecture, and with ARCHITECTURES=all, as
# in make test-full, every source. Needs nvcc and torch's headers, no GPU. Prints one line.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
NVCC=${NVCC:-$(command -v nvcc || true)}
[ -n "$NVCC" ] || { echo "CUDA sources: no nvcc on this machine: skipped"; exit 0; }

torch=$("$PYTHON" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])') ||
  { echo "CUDA sources: $PYTHON has no torch, whose headers they need (PYTHON=... names another)" >&2; exit 1; }
export NVCC INCLUDE="$torch/include" FOLDER
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT

# Source -> "" or -fmad=false, as CMakeLists.txt has it.
contraction() { grep -q "$1 .*-fmad=false" CMakeLists.txt && echo -fmad=false || true; }

# Whether a source has, itself or in a header, a condition on the architecture.
depends_on_architecture() {
  local include
  grep -qE '__CUDA_ARCH__ *[<>=]' "$1" && return
  for include in $(sed -n 's/^#include "\(.*\)"/\1/p' "$1"); do
    depends_on_architecture "$(dirname "$1")/$include" && return
  done
  return 1
}

# torch's headers are a third of what a source compiles, so that several are compiled as one: those that contract in one group, the
# others in two that take about the same time.
together="optim lion adagrad frozen_adam sgd symmetric_step"
newest="-gencode arch=compute_90,code=sm_90" oldest="-gencode arch=compute_80,code=sm_80"
chosen="$newest"
[ "${ARCHITECTURES:-}" != all ] || chosen="$newest $oldest"
add() { echo "#include \"$PWD/$2\"" >>"$FOLDER/$1.cu"; echo "$3" >"$FOLDER/$1.flags"; }
for source in $(find csrc/cuda -name "*.cu" | sort); do
  flag=$(contraction "$source")
  if [ -z "$flag" ]; then
    add contracted "$source" "$chosen"
  elif [[ " $together " == *" $(basename "$source" .cu) "* ]]; then
    add optimizers "$source" "$flag $chosen"
  else
    add others "$source" "$flag $chosen"
  fi
  if [ "$chosen" = "$newest" ] && depends_on_architecture "$source"; then
    add "sm_80_$(basename "$source" .cu)" "$source" "$flag $oldest"
  fi
done

compile() {  # group -> its log, object and number of kernels
  local log="$FOLDER/$1.log"
  "$NVCC" -std=c++17 -O3 $(cat "$FOLDER/$1.flags") -Werror all-warnings -Xptxas -v -Xcompiler -Wall,-Werror,-fPIC,-O0 \
    -DTORCH_TARGET_VERSION=0x020a000000000000 -DUSE_CUDA=1 -isystem "$INCLUDE" \
    -c "$FOLDER/$1.cu" -o "$FOLDER/$1.o" >"$log" 2>&1 || { echo "== $1 do not compile:"; cat "$log"; return 1; }
  if grep -E -B1 '[1-9][0-9]* bytes (stack frame|spill stores|spill loads)' "$log"; then
    echo "== $1 use local memory"
    return 1
  fi
  awk -v name="$1" '/Compiling entry function/ { ++seen[/sm_90/ ? "sm_90" : "sm_80"] }
    /Used [0-9]+ registers/ { for (i = 1; i < NF; ++i) if ($i == "Used" && $(i+1) > most) most = $(i+1) }
    END { if (length(seen) > 1 && seen["sm_80"] != seen["sm_90"]) { print name ": other kernels for sm_80 than for sm_90"; exit 1 }
      for (each in seen) kernels = seen[each]
      print name, kernels "/" most + 0 }' "$log" >"$FOLDER/$1.kernels" || { cat "$FOLDER/$1.kernels"; return 1; }
}
export -f compile
printf '%s\n' optimizers others $(cd "$FOLDER" && ls *.cu | sed 's/.cu$//' | grep -vx -e optimizers -e others) |
  xargs -P 2 -L 1 bash -c 'compile "$0"'
rm -f "$FOLDER"/sm_80_*.o  # whose names another object has
ld -r -o "$FOLDER/all" "$FOLDER"/*.o || { echo "CUDA sources: the objects do not link"; exit 1; }
echo "CUDA sources compile, nothing in local memory; kernels and most registers:" $(cat "$FOLDER"/*.kernels | paste -sd ,)

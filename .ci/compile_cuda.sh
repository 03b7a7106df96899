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
export NVCC INCLUDE="$torch/include" LOGS
LOGS=$(mktemp -d)
trap 'rm -rf "$LOGS"' EXIT

# Sources that have, themselves or in a header, a condition on the architecture.
depends_on_architecture() {
  local include
  grep -qE '__CUDA_ARCH__ *[<>=]' "$1" && return
  for include in $(sed -n 's/^#include "\(.*\)"/\1/p' "$1"); do
    depends_on_architecture "$(dirname "$1")/$include" && return
  done
  return 1
}

compile() {  # source -> log; all architectures in one call, which compiles the host's part once
  local stem fmad=() log architectures=(-gencode arch=compute_90,code=sm_90)
  stem=$(basename "$1" .cu)
  log="$LOGS/$stem"
  grep -q "csrc/cuda/$stem.cu .*-fmad=false" CMakeLists.txt && fmad=(-fmad=false)
  if [ "${ARCHITECTURES:-}" = all ] || depends_on_architecture "$1"; then
    architectures+=(-gencode arch=compute_80,code=sm_80)
    echo >"$log.also"
  fi
  # The host's part, of calls alone, is not optimised: nobody runs it here.
  "$NVCC" -std=c++17 -O3 "${fmad[@]}" -Werror all-warnings -Xptxas -v -Xcompiler -Wall,-Werror,-fPIC,-O0 \
    -DTORCH_TARGET_VERSION=0x020a000000000000 -DUSE_CUDA=1 -isystem "$INCLUDE" \
    "${architectures[@]}" -c "$1" -o "$log.o" >"$log" 2>&1 || { echo "== $1 does not compile:"; cat "$log"; return 1; }
  if grep -E '[1-9][0-9]* bytes (stack frame|spill stores|spill loads)' "$log" >"$log.bad"; then
    echo "== $1 uses local memory:"
    grep -E -B1 '[1-9][0-9]* bytes (stack frame|spill stores|spill loads)' "$log"
    return 1
  fi
  awk '/Compiling entry function/ { here = /sm_90/; seen += here; other += !here }
    here && /Used [0-9]+ registers/ { for (i = 1; i < NF; ++i) if ($i == "Used" && $(i+1) > most) most = $(i+1) }
    END { if (other && seen != other) { print "sm_80 has " other " kernels, sm_90 " seen; exit 1 }; print seen, most + 0 }' \
    "$log" >"$log.registers" || { echo "== $1:"; cat "$log.registers"; return 1; }
}
export -f compile depends_on_architecture
# The longest first, so that none is left to compile alone at the end.
ls -S csrc/cuda/*.cu | xargs -P 2 -L 1 bash -c 'compile "$0"'
ld -r -o "$LOGS/all" "$LOGS"/*.o || { echo "CUDA sources: the objects do not link"; exit 1; }
both=$(cat "$LOGS"/*.also 2>/dev/null | wc -l || true)
summary="CUDA sources compile for sm_90, $both of them for sm_80 too, nothing in local memory; kernels and most registers:"
for log in "$LOGS"/*.registers; do summary+=" $(basename "$log" .registers) $(tr ' ' '/' <"$log"),"; done
echo "${summary%,}"

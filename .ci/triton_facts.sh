#!/usr/bin/env bash
# What the compiler makes of every Triton kernel, under the Triton that is installed and under the one that the oldest supported
# torch brings: registers, spills and instructions within bounds, and as fast under both as far as that can be read from them
# (benchmarks/ops/machine_code/triton_facts.py). Every kernel compiles under the older one too. With LAUNCHES=all, as in make
# test-full, for every launch of that file and of tests/ops/triton/test_ahead.py. Fetches the older Triton once, into build/.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
VERSION=${VERSION:-3.6.0}
folder=build/triton-$VERSION
[ -d "$folder/triton" ] || "$PYTHON" -m pip install -q --disable-pip-version-check --no-deps --target "$folder" "triton==$VERSION"
PYTHONPATH="$folder:." "$PYTHON" - <<END
import triton
assert triton.__version__ == "$VERSION", triton.__version__
END
export TRITON_DEFAULT_FP_FUSION=1  # as it has been; the newest Triton warns that it will not be
every=() launches=()
[ "${LAUNCHES:-}" != all ] || every=(--every) launches=(-m full)
PYTHONPATH="$folder:." TRITON_CACHE_DIR="$folder/cache" "$PYTHON" -m benchmarks.ops.machine_code.triton_facts "${every[@]}" "$folder/facts.json" &
older=$!
PYTHONPATH=. TRITON_CACHE_DIR=build/triton-cache "$PYTHON" -m benchmarks.ops.machine_code.triton_facts "${every[@]}" build/triton-facts.json
wait "$older"
PYTHONPATH="$folder:." TRITON_CACHE_DIR="$folder/cache" "$PYTHON" -m pytest -q -p no:cacheprovider -n 2 "${launches[@]}" tests/ops/triton/test_ahead.py
PYTHONPATH=. "$PYTHON" -m benchmarks.ops.machine_code.triton_facts "$folder/facts.json" build/triton-facts.json

#!/usr/bin/env bash
# The bounds on registers and instructions of tests/ops/triton/test_facts.py under the Triton that the oldest supported torch
# brings. `make test` has run them under the newest. Fetches that Triton once, into build/.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
VERSION=${VERSION:-3.6.0}
folder=build/triton-$VERSION
[ -d "$folder/triton" ] || "$PYTHON" -m pip install -q --disable-pip-version-check --no-deps --target "$folder" "triton==$VERSION"
PYTHONPATH="$folder:." TRITON_CACHE_DIR="$folder/cache" "$PYTHON" - <<END
import triton
assert triton.__version__ == "$VERSION", triton.__version__
END
PYTHONPATH="$folder:." TRITON_CACHE_DIR="$folder/cache" "$PYTHON" -m pytest -q -n0 -p no:cacheprovider tests/ops/triton/test_facts.py

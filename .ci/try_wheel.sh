#!/usr/bin/env bash
# Installs the newest wheel of dist/ for PYTHON, and TORCH, into an empty environment, and there, far from the checkout, asks for a
# kernel and takes a step with it. Prints one line. `make wheel` makes the wheel.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-$(sed -n 's/^TORCH *?= *//p' Makefile)}
tag=$("$PYTHON" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
wheel=$(ls -t dist/pyops_train-*-"$tag"-*.whl | head -1)
wheel=$PWD/$wheel
empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT
"$PYTHON" -m venv "$empty/venv"
cd "$empty"
unset PYTHONPATH PYOPS_NO_EXT
export PIP_DISABLE_PIP_VERSION_CHECK=1
venv/bin/python -m pip install -q --no-compile "$TORCH" "$wheel"
venv/bin/python - "$empty" "$wheel" <<'END'
import sys, warnings
import torch
import pyops
from pyops.ops import library

assert pyops.__file__.startswith(sys.argv[1]), pyops.__file__
assert pyops.has_kernel("adam_", "cpu"), "no kernel"
assert library.native().Mailbox, "no _native"
model = torch.nn.Linear(3, 2)
before = [p.detach().clone() for p in model.parameters()]
optimizer = pyops.optim.AdamW(model.parameters(), lr=0.1)
model(torch.ones(4, 3)).square().sum().backward()
optimizer.step()
assert all(0.05 < (a - b).abs().max() < 0.2 for a, b in zip(before, model.parameters())), "no step"
print(f"{sys.argv[2].rpartition('/')[2]}: a step with its kernels ({library.isa()}) in an empty environment, torch {torch.__version__}")
END

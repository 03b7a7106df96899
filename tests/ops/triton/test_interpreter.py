"""Runs the files interpret_*.py beside this one under Triton's interpreter, chosen before triton is
imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.grids import full

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent.parent


@pytest.mark.cpu_only
@pytest.mark.parametrize("chosen", ["not full", full("full")])
def test_kernels_under_the_interpreter(chosen: str):
    files = sorted(FOLDER.glob("interpret_*.py"))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.ops.triton.interpreter_plugin",
        "-m",
        chosen,
        *map(str, files),
    ]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": path,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # Hypothesis alone takes seconds
        },
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None, run.stdout
    assert chosen == "full" or int(passed.group(1)) >= len(files)

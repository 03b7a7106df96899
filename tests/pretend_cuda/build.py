"""Compiles `device.cpp` into build/_pretend_cuda.so, unless that is newer than its sources, and
prints its path.

export PYOPS_PRETEND_CUDA=$(python tests/pretend_cuda/build.py) PYTHONPATH=tests/pretend_cuda
PYOPS_TEST_DEVICE=cuda python -m pytest tests
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parent.parent / "build" / "_pretend_cuda.so"


def build() -> Path:
    """The library, built against the torch of this Python. CalledProcessError when the compiler
    refuses."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations
    torch = Path(spec.submodule_search_locations[0])
    sources = [*HERE.glob("*.cpp"), *HERE.glob("*.h"), torch / "version.py", Path(__file__)]
    if OUT.exists() and OUT.stat().st_mtime > max(source.stat().st_mtime for source in sources):
        return OUT
    OUT.parent.mkdir(exist_ok=True)
    include = [
        torch / "include",
        torch / "include/torch/csrc/api/include",
        Path(sysconfig.get_paths()["include"]),
    ]
    subprocess.run(
        [
            os.environ.get("CXX", "c++"),
            "-std=c++20",
            "-O1",
            "-fPIC",
            "-shared",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-DTORCH_EXTENSION_NAME=_pretend_cuda",
            *(f"-isystem{folder}" for folder in include),
            str(HERE / "device.cpp"),
            "-o",
            str(OUT),
            f"-L{torch / 'lib'}",
            f"-Wl,-rpath,{torch / 'lib'}",
            *("-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"),
        ],
        check=True,
    )
    return OUT


if __name__ == "__main__":
    print(build())

"""The kernels over symmetric memory compiled for the host, once for the whole test run."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

EMULATION = Path(__file__).resolve().parent / "emulation"
# Not unique in the process: tests/cuda/emulation has variables of the same names.
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fno-gnu-unique", "-ffp-contract=off"]
FLAGS += ["-Wall", "-Wno-unknown-pragmas"]
RUNTIME = EMULATION.parents[1] / "emulation"
INCLUDES = [f"-I{RUNTIME}", "-DPYOPS_AT_ONCE"]


def compile_with(*arguments: object) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    subprocess.run([compiler, *FLAGS, *INCLUDES, *map(str, arguments)], check=True)


@pytest.fixture(scope="session")
def symmetric(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the folder that all workers' folders are in
        folder = folder.parent
    library = folder / "symmetric.so"
    with open(folder / "symmetric.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            sources = [EMULATION / "symmetric.cpp", RUNTIME / "runtime.cpp"]
            made = folder / f"symmetric.{os.getpid()}"
            compile_with("-Werror", "-shared", *sources, "-o", made, "-lpthread")
            made.rename(library)
    return ctypes.CDLL(str(library))

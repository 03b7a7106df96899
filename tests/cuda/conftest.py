"""The CUDA kernels compiled for the host, once for the whole test run, whatever its processes."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

EMULATION = Path(__file__).resolve().parent / "emulation"


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    """emulated(stem): the library of emulation/<stem>.cpp, compiled when it is first asked for."""
    folder, found = tmp_path_factory.getbasetemp(), dict[str, ctypes.CDLL]()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the folder that all workers' folders are in
        folder = folder.parent

    def get(stem: str) -> ctypes.CDLL:
        if stem not in found:
            compiler = shutil.which("g++")
            if compiler is None:
                pytest.skip("no g++")
            source, library = EMULATION / f"{stem}.cpp", folder / f"{stem}.so"
            flags = [
                "-std=c++17",
                "-O1",
                "-fPIC",
                "-fno-gnu-unique",  # each library has the variables of its own kernels
                "-shared",
                "-ffp-contract=off",
                "-Wall",
                "-Wno-unknown-pragmas",
                "-Werror",
            ]
            with open(folder / f"{stem}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not library.exists():
                    made = folder / f"{stem}.{os.getpid()}"
                    sources = [source, EMULATION / "runtime.cpp"]
                    command = [compiler, *flags, f"-I{EMULATION}", *sources, "-o", made]
                    subprocess.run(command, check=True)
                    made.rename(library)
            found[stem] = ctypes.CDLL(str(library))
        return found[stem]

    return get


@pytest.fixture
def kernels(emulated: Callable[[str], ctypes.CDLL]) -> ctypes.CDLL:
    return emulated("kernels")

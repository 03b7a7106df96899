"""The CUDA kernels compiled for the host, once for the whole test run."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

EMULATION = Path(__file__).resolve().parent / "emulation"


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    """emulated(stem): the library of emulation/<stem>.cpp, compiled when it is first asked for."""
    folder, found = tmp_path_factory.mktemp("emulation"), dict[str, ctypes.CDLL]()

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
                "-shared",
                "-ffp-contract=off",
                "-Wall",
                "-Wno-unknown-pragmas",
                "-Werror",
            ]
            subprocess.run([compiler, *flags, f"-I{EMULATION}", source, "-o", library], check=True)
            found[stem] = ctypes.CDLL(str(library))
        return found[stem]

    return get


@pytest.fixture
def kernels(emulated: Callable[[str], ctypes.CDLL]) -> ctypes.CDLL:
    return emulated("kernels")

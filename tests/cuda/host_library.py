"""CUDA kernels compiled for the host. A library stays in build/ for as long as neither its sources
nor the compiler change, so that several test runs of one checkout compile it once."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EMULATION = ROOT / "tests" / "cuda" / "emulation"
OUT = ROOT / "build" / "emulation"
# All that a library may include.
FOLDERS = ("csrc/cuda", "csrc/host", "csrc/math", "tests/cuda/emulation")
FOLDERS += ("tests/cuda/symmetric/emulation",)
# Not unique in the process: each library has the variables of its own kernels.
FLAGS = ("-std=c++17", "-fPIC", "-fno-gnu-unique", "-ffp-contract=off", "-Wall")
FLAGS += ("-Wno-unknown-pragmas",)
# Optimized, a library takes longer to compile than its tests then take less to run.
LIBRARY_FLAGS = ("-O0", "-Werror", "-shared")

__all__ = ["EMULATION", "ROOT", "compile_with", "load"]


def compile_with(*arguments: object) -> None:
    """Run g++ with FLAGS, the headers of the emulation and `arguments`; skips the test where there
    is no g++."""
    command = [_compiler(), *FLAGS, f"-I{EMULATION}", *map(str, arguments)]
    subprocess.run(command, check=True)


def load(sources: Sequence[Path], *flags: str, out: Path = OUT) -> ctypes.CDLL:
    """The library of `sources` and the emulation's runtime, compiled unless `out` has it. Processes
    that ask for it at the same time wait for the one that compiles.

    Args:
        sources: The first of them names the library.
        flags: For the compiler, beside FLAGS.
        out: The folder that keeps libraries.
    """
    stem = sources[0].stem
    library = out / f"{stem}-{_fingerprint(flags)}.so"
    out.mkdir(parents=True, exist_ok=True)
    with open(out / f"{stem}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            made = library.with_suffix(".made")
            inputs = [*sources, EMULATION / "runtime.cpp"]
            compile_with(*flags, *LIBRARY_FLAGS, *inputs, "-o", made, "-lpthread")
            for older in out.glob(f"{stem}-*.so"):
                older.unlink()
            made.rename(library)
        return ctypes.CDLL(str(library))


def _compiler() -> str:
    found = shutil.which("g++")
    if found is None:
        pytest.skip("no g++")
    return found


def _fingerprint(flags: Sequence[str]) -> str:
    """Of all that decides what the compiler makes: the sources' text, the flags and itself."""
    version = subprocess.run([_compiler(), "--version"], capture_output=True, check=True).stdout
    text = hashlib.sha256(version + repr((FLAGS, LIBRARY_FLAGS, flags)).encode())
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file():
                text.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return text.hexdigest()[:16]

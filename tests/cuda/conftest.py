"""The CUDA kernels compiled for the host, once for the whole test run, whatever its processes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import pytest

from tests.cuda.host_library import EMULATION, load


@pytest.fixture(scope="session")
def emulated() -> Callable[[str], ctypes.CDLL]:
    """emulated(stem): the library of emulation/<stem>.cpp, compiled when it is first asked for."""
    return functools.cache(lambda stem: load([EMULATION / f"{stem}.cpp"]))


@pytest.fixture
def kernels(emulated: Callable[[str], ctypes.CDLL]) -> ctypes.CDLL:
    return emulated("kernels")

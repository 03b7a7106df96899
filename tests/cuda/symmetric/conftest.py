"""The kernels over symmetric memory compiled for the host, once for the whole test run."""

from __future__ import annotations

import ctypes

import pytest

from tests.cuda.host_library import ROOT, load

EMULATION = ROOT / "tests" / "cuda" / "symmetric" / "emulation"
AT_ONCE = "-DPYOPS_AT_ONCE"  # the CTAs of a launch run side by side


@pytest.fixture(scope="session")
def symmetric() -> ctypes.CDLL:
    return load([EMULATION / "symmetric.cpp"], AT_ONCE)

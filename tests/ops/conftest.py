"""Ops are tested at every instruction set that this build and this machine have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyops.ops import library
from tests.conftest import DEVICE

ISAS = library.isas() if DEVICE == "cpu" and library.isas() else ["one"]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "one":  # CUDA, or plain torch without kernels
        yield request.param
        return
    with library.use_isa(request.param):
        assert library.isa() == request.param
        yield request.param

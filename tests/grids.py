"""Cases of a grid: those that stand in the suite, and those that run under `-m full`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["ALL_CASES", "cut", "full"]

# Whether a run may want what is marked full: tests/conftest.py says so before it collects. What is
# left out anyway is not made, since each case of some thousands takes every worker some time.
ALL_CASES = {"made": True}


def full(*case: Any, id: str | None = None) -> Any:
    """A case that runs under `-m full` alone."""
    return pytest.param(*case, marks=pytest.mark.full, id=id)


def cut(cases: Iterable[tuple[Any, ...]], *, keep: Collection[tuple[Any, ...]]) -> list[Any]:
    """All cases of a grid: the suite runs those of `keep`, and `-m full` the others."""
    cases = list(cases)
    missing = [case for case in keep if case not in cases]
    assert not missing, f"not in the grid: {missing}"
    if not ALL_CASES["made"]:
        cases = [case for case in cases if case in keep]
    return [pytest.param(*case) if case in keep else full(*case) for case in cases]

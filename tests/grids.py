"""Cases of a grid: those that stand in the suite, and those that run under `-m full`.

full, cut       name them by hand
cut_to_pairs    of tests of three parameters or more: the cases that hold every pair of values
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import pytest

__all__ = ["ALL_CASES", "cut", "cut_to_pairs", "full", "pairwise"]

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


def pairwise(cases: Sequence[Sequence[Hashable]]) -> set[int]:
    """Which cases of a grid hold each pair of values of two parameters that any case holds.

    A fault of a kernel or a layout is almost always that of one value or of two together; pairwise
    testing finds it in far fewer cases than the product of all parameters. Cases are taken
    greedily: each time the one that holds most pairs that none before it holds.

    Args:
        cases: The values of each case, in the same order of parameters.
    """
    pairs = [set(itertools.combinations(enumerate(case), 2)) for case in cases]
    missing, kept = set().union(*pairs), set()
    while missing:
        best = max(range(len(cases)), key=lambda index: (len(pairs[index] & missing), -index))
        kept.add(best)
        missing -= pairs[best]
    return kept


def cut_to_pairs(items: Iterable[pytest.Item]) -> None:
    """Mark as full what `pairwise` leaves of each test of three parameters or more.

    Arguments that one `parametrize` names together are one parameter, since somebody chose its
    cases. A test marked `whole_grid` keeps all of its cases.
    """
    of_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        kept = any(item.get_closest_marker(name) for name in ("full", "cluster", "whole_grid"))
        if hasattr(item, "callspec") and not kept:
            of_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in of_test.values():
        values = [_values_of(item) for item in cases]
        if len(values[0]) > 2:
            for index in set(range(len(cases))) - pairwise(values):
                cases[index].add_marker(pytest.mark.full)


def _values_of(item: Any) -> list[Hashable]:
    """The values of a collected case, one for each parameter."""
    left = dict(item.callspec.params)
    found: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        together = names.split(",") if isinstance(names, str) else names
        found.append(tuple(id(left.pop(name.strip())) for name in together))
    return [*found, *map(id, left.values())]

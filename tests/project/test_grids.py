"""What the suite keeps of a grid: each pair of values of two parameters, and all that somebody
chose by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests.grids import cut_to_pairs, pairwise

pytestmark = pytest.mark.cpu_only


@dataclass
class Case:
    """A collected case, with what the cut asks of it."""

    nodeid: str
    params: dict[str, Any]
    marks: list[Any] = field(default_factory=list)

    @property
    def callspec(self) -> Any:
        return SimpleNamespace(params=self.params)

    def iter_markers(self, name: str) -> Iterator[Any]:
        return (mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name: str) -> Any:
        return next(self.iter_markers(name), None)

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark.mark)


def collected(test: str, axes: dict[str, list[Any]], *marks: Any) -> list[Case]:
    """The cases of a test whose `parametrize` marks are the keys of `axes`."""
    parametrized = [pytest.mark.parametrize(names, values) for names, values in axes.items()]
    cases = []
    for number, values in enumerate(itertools.product(*axes.values())):
        params: dict[str, Any] = {}
        for names, value in zip(axes, values, strict=True):
            several = "," in names
            params |= dict(zip(names.split(","), value if several else [value], strict=True))
        own = [mark.mark for mark in (*parametrized, *marks)]
        cases.append(Case(f"{test}[{number}]", params, own))
    return cases


def left(cases: list[Case]) -> list[Case]:
    """Those that the suite runs."""
    cut_to_pairs(cases)  # type: ignore[arg-type]
    return [case for case in cases if case.get_closest_marker("full") is None]


def pairs(cases: list[tuple[Any, ...]]) -> set[Any]:
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


@pytest.mark.parametrize("sizes", [(3, 3, 3), (2, 5, 3), (4, 4, 4, 2), (1, 1, 6)], ids=str)
def test_each_pair_of_values_stays(sizes):
    cases = list(itertools.product(*map(range, sizes)))
    kept = [cases[index] for index in pairwise(cases)]
    assert pairs(kept) == pairs(cases)
    most = sorted(sizes)[-2:]
    assert most[0] * most[1] <= len(kept) <= 1.5 * most[0] * most[1]


def test_a_grid_of_three_parameters_is_cut_and_smaller_ones_are_whole():
    three = {"a": ["x", "y"], "b": [1.5, 2.5], "c": [None, "z"]}
    assert len(left(collected("test_three", three))) == 4
    assert len(left(collected("test_two", {"a": ["x", "y"], "b": [1.5, 2.5]}))) == 4


def test_cases_that_are_named_together_are_one_parameter():
    chosen = {"p,g,m": list(itertools.product("ab", "cd", "ef"))}
    assert len(left(collected("test_chosen", chosen))) == 8
    cases = left(collected("test_product", {**chosen, "isa": ["old", "new"], "odd": [True, False]}))
    assert {tuple(case.params[name] for name in "pgm") for case in cases} == set(chosen["p,g,m"])
    assert len(cases) == 16


def test_each_test_is_cut_for_itself_and_a_marked_one_is_whole():
    axes = {"a": [0, 1], "b": [2, 3], "c": [4, 5]}
    assert len(left(collected("test_one", axes) + collected("test_other", axes))) == 8
    assert len(left(collected("test_whole", axes, pytest.mark.whole_grid))) == 8


def test_what_is_full_already_holds_no_pair_for_the_suite():
    cases = collected("test_some", {"a": [0, 1], "b": [2, 3], "c": [4, 5]})
    for case in cases[:2]:
        case.add_marker(pytest.mark.full)
    kept = [tuple(case.params.values()) for case in left(cases)]
    assert pairs(kept) == pairs([tuple(case.params.values()) for case in cases[2:]])

"""Slow ranks are named after so many windows, and quiet ones never."""

from __future__ import annotations

import random

import pytest

from pyops.observe.stragglers import Stragglers

pytestmark = pytest.mark.cpu_only


def test_a_slow_rank_is_named_in_the_third_window_once():
    watch = Stragglers()
    windows = [[1.0, 1.2, 1.05]] * 5
    said = [watch.update(each, hosts=["a", "b", "c"]) for each in windows]
    assert [len(each) for each in said] == [0, 0, 1, 0, 0]
    assert said[2][0].startswith("rank 1 on b is slow: 1.2 s of its own work")


def test_a_rank_that_got_slower_is_told_from_one_that_always_was():
    watch = Stragglers()
    for _ in range(5):
        watch.update([1.0, 1.0])
    said = [watch.update([1.0, 1.5]) for _ in range(3)]
    assert said[2][0].endswith("it took 1 s before")
    always = Stragglers(windows=6)
    said = [always.update([1.0, 1.5]) for _ in range(6)]
    assert said[-1] == [] or "s before" not in said[-1][0]


def test_a_window_in_between_begins_anew():
    watch = Stragglers()
    slow, even = [1.0, 1.3], [1.0, 1.0]
    said = [watch.update(each) for each in (slow, slow, even, slow, slow, slow)]
    assert [len(each) for each in said] == [0, 0, 0, 0, 0, 1]


def test_none_is_named_in_quiet_runs():
    for seed in range(20):
        noise, watch = random.Random(seed), Stragglers()
        assert not any(
            watch.update([1 + noise.uniform(0, 0.08) for _ in range(8)]) for _ in range(50)
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [({"threshold": 1.0}, "threshold is 1.0"), ({"windows": 0}, "windows is 0")],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Stragglers(**options)

"""A permutation visits each number once, is the same everywhere, and looks like a random one."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyops.token_data import Permutation

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize("n", [*range(1, 130), 1_000, 65_536, 100_003])
def test_each_number_comes_once(n):
    found = Permutation(n, seed=3, name="p")(np.arange(n))
    assert np.array_equal(np.sort(found), np.arange(n))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 1 << 62), st.integers(0, 1 << 40), st.data())
def test_positions_and_numbers_are_inverse_at_any_size(n, seed, data):
    order = Permutation(n, seed=seed, name="p")
    places = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    numbers = order(places)
    assert ((numbers >= 0) & (numbers < n)).all()
    assert np.array_equal(order.positions_of(numbers), places)


def test_it_is_a_function_of_seed_and_name():
    places = np.arange(1000)
    one = Permutation(1000, seed=3, name="p")(places)
    assert np.array_equal(one, Permutation(1000, seed=3, name="p")(places))
    assert not np.array_equal(one, Permutation(1000, seed=4, name="p")(places))
    assert not np.array_equal(one, Permutation(1000, seed=3, name="q")(places))


def test_the_order_is_that_of_earlier_versions():
    """A changed order would shift the data of runs that are resumed."""
    order = Permutation(10**12, seed=7, name="data")
    assert order(np.array([0, 1, 2, 10**12 - 1])).tolist() == [
        147412760939,
        966144789617,
        768659470472,
        527407492771,
    ]


def test_every_order_of_few_numbers_is_equally_likely():
    """Chi-square over the 24 orders of 4 numbers: 23 degrees of freedom, 99.99 % below 58."""
    draws = 4800
    seen = Counter(
        tuple(Permutation(4, seed=seed, name="p")(np.arange(4)).tolist()) for seed in range(draws)
    )
    expected = draws / 24
    orders = itertools.permutations(range(4))
    assert sum((seen[each] - expected) ** 2 / expected for each in orders) < 58


def test_neighbors_and_places_tell_nothing():
    n = 20_011
    found = Permutation(n, seed=1, name="p")(np.arange(n)) / n
    for other in (np.arange(n) / n, np.roll(found, 1), np.roll(found, 141)):
        assert abs(np.corrcoef(found, other)[0, 1]) < 0.03  # 4 standard deviations
    assert abs((found == np.arange(n) / n).sum() - 1) < 6  # fixed points: 1 on average


def test_an_order_of_10_to_the_12_takes_no_memory():
    tracemalloc.start()
    order = Permutation(10**12, seed=0, name="p")
    order(np.arange(10**12 - 1024, 10**12))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 20


def test_what_is_out_of_range_is_refused():
    with pytest.raises(ValueError, match="n is 0; a permutation has 1 to"):
        Permutation(0, seed=0, name="p")
    with pytest.raises(IndexError, match="positions 0 to 9"):
        Permutation(10, seed=0, name="p")(np.array([3, 10]))

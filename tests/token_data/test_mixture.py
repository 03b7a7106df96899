"""A mixture keeps to its weights at every position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyops.token_data import Mixture

pytestmark = pytest.mark.cpu_only


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9))
def test_each_source_is_within_one_of_its_part_at_every_position(weights):
    mixture = Mixture(weights)
    positions = np.arange(2 * mixture.period)
    source, number = mixture(positions)
    for i, weight in enumerate(weights):
        taken = np.cumsum(source == i)
        wanted = weight / sum(weights) * (positions + 1)
        assert np.abs(taken - wanted).max() < 1
        assert number[source == i].tolist() == list(range(taken[-1]))


def test_a_position_needs_none_before_it():
    mixture = Mixture([0.7, 0.2, 0.1])
    assert mixture.period == 10
    assert mixture.counts.tolist() == [7, 2, 1]
    far = 10**12 + 7
    source, number = mixture(np.arange(far, far + 5))
    for i in range(5):
        assert [each.tolist() for each in mixture(np.array([far + i]))] == [
            [source[i]],
            [number[i]],
        ]
    assert number[source == 0][0] == pytest.approx(0.7 * far, abs=1)


def test_parts_that_no_small_period_has_are_rounded():
    weights = [np.pi, 1.0, 1e-9]
    mixture = Mixture(weights)
    assert mixture.period == 1 << 16
    assert mixture.counts[2] == 1
    assert mixture.counts[0] / mixture.period == pytest.approx(np.pi / (np.pi + 1), abs=1e-4)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(ValueError, match=r"weight 1 is .*; give a number above 0"):
        Mixture([1.0, weight])


def test_no_weights():
    with pytest.raises(ValueError, match="0 weights"):
        Mixture([])

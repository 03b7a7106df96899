"""DistBelief's findings on scikit-learn's digits: SGD fails with many replicas, and Adagrad with a
warm start does not."""

from __future__ import annotations

import pytest

from benchmarks.asynchronous.distbelief_digits import PUSHES, Downpour, Sandblaster
from tests.grids import cut
from tests.optional_packages import skip_module_without

skip_module_without("sklearn")
pytestmark = pytest.mark.cpu_only

SGD_RATE, RATE, WARM = 0.3, 0.005, 100
TABLE = [  # rule, rate, replicas, warm start, pushes, least accuracy, most
    ("SGD", SGD_RATE, 1, 0, 500, 0.95, 1.0),
    ("SGD", SGD_RATE, 32, 0, 400, 0.0, 0.5),
    ("Adagrad", RATE, 32, WARM, PUSHES, 0.96, 1.0),
    # the whole of it
    ("SGD", SGD_RATE, 1, 0, PUSHES, 0.965, 1.0),
    ("SGD", SGD_RATE, 8, 0, PUSHES, 0.0, 0.9),
    ("SGD", SGD_RATE, 32, 0, PUSHES, 0.0, 0.5),
    ("Adagrad", RATE, 1, 0, PUSHES, 0.96, 1.0),
    ("Adagrad", RATE, 8, 0, PUSHES, 0.96, 1.0),
    ("Adagrad", RATE, 8, WARM, PUSHES, 0.96, 1.0),
    ("Adagrad", RATE, 32, 0, PUSHES, 0.95, 1.0),
]


@pytest.mark.parametrize(
    ("rule", "rate", "replicas", "warm", "pushes", "least", "most"), cut(TABLE, keep=TABLE[:3])
)
def test_sgd_falls_with_replicas_and_adagrad_with_a_warm_start_does_not(
    rule: str, rate: float, replicas: int, warm: int, pushes: int, least: float, most: float
):
    found = Downpour(rule, rate, replicas, warm_start=warm, pushes=pushes).run()
    assert least < found.accuracy <= most, found
    assert found.warm == (warm if replicas > 1 else pushes)
    late = pushes - warm
    assert found.staleness == pytest.approx((replicas - 1) * late / pushes, rel=0.05)


@pytest.mark.full
def test_a_warm_start_carries_a_rate_that_is_too_high_without_it():
    cold, warm = (Downpour("Adagrad", 8 * RATE, 32, warm_start=n).run() for n in (0, WARM))
    assert warm.accuracy > cold.accuracy + 0.02, (cold, warm)


@pytest.mark.full
def test_sandblaster_takes_little_more_than_one_pass_an_iteration():
    found, slow = Sandblaster(32).run(), Sandblaster(32, slow=50.0).run()
    assert found.accuracy > 0.95
    assert found.evaluations < 1.3
    assert slow.accuracy == found.accuracy
    assert slow.curve[-1][0] < 1.3 * found.curve[-1][0]

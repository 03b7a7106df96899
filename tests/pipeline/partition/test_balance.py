"""The partition is the best there is, found by trying all of them."""

from __future__ import annotations

import itertools
import random

import pytest

from pyops.pipeline import balance

pytestmark = pytest.mark.cpu_only


def stage_costs(costs: list[float], bounds: list[int]) -> list[float]:
    return [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]


def brute_force(costs: list[float], k: int, *, together: list[tuple[int, int]]) -> float:
    best = float("inf")
    for cuts in itertools.combinations(range(1, len(costs)), k - 1):
        bounds = [0, *cuts, len(costs)]
        if any(low < cut <= high for cut in cuts for low, high in together):
            continue
        best = min(best, max(stage_costs(costs, bounds)))
    return best


def test_a_partition_by_hand():
    assert balance([4, 1, 1, 6, 5, 5, 2, 9, 3], num_stages=3) == [0, 4, 7, 9]
    assert balance([1, 1, 1, 1], num_stages=4) == [0, 1, 2, 3, 4]
    assert balance([5], num_stages=1) == [0, 1]


@pytest.mark.parametrize("k", range(1, 7))
def test_equals_brute_force(k: int):
    draw = random.Random(k)
    for _ in range(60):
        n = draw.randint(k, 12)
        costs = [
            draw.choice([draw.random(), draw.randint(0, 9), draw.lognormvariate(0, 1.5)])
            for _ in range(n)
        ]
        together = (
            [tuple(sorted(draw.sample(range(n), 2)))] if n - k > 4 and draw.random() < 0.4 else []
        )
        together = [(low, min(high, low + 2)) for low, high in together]
        bounds = balance(costs, num_stages=k, together=together)
        assert bounds[0] == 0
        assert bounds[-1] == n
        assert all(a < b for a, b in itertools.pairwise(bounds)), "never an empty stage"
        assert not any(low < cut <= high for cut in bounds for low, high in together)
        assert max(stage_costs(costs, bounds)) == pytest.approx(
            brute_force(costs, k, together=together), rel=1e-12
        )


def test_neither_scale_nor_a_common_cost_misleads():
    draw = random.Random(0)
    costs = [1 + 0.02 * draw.random() for _ in range(24)]
    bounds = balance(costs, num_stages=8)
    assert bounds == list(range(0, 25, 3))
    assert balance([1000 * c for c in costs], num_stages=8) == bounds
    worst = [max(stage_costs(costs, balance(costs, num_stages=k))) for k in range(1, 25)]
    assert worst == sorted(worst, reverse=True)


def test_the_evenest_of_the_cheapest():
    assert balance([6, 1, 1, 1, 1], num_stages=3) == [0, 1, 3, 5]


def test_shared_weights_keep_their_layers_on_one_stage():
    assert balance([1, 1, 1, 1, 1, 1], num_stages=2, same_stage=[(0, 4)]) == [0, 5, 6]


@pytest.mark.parametrize(
    ("costs", "options", "message"),
    [
        ([1, 2], {"num_stages": 3}, "2 layers can't fill 3 stages; take 2 stages or fewer"),
        (
            [1, 2, 3],
            {"num_stages": 2, "together": [(0, 2)]},
            "3 layers, 2 of which must stay with the one before",
        ),
        ([1, -2], {"num_stages": 1}, "the cost of layer 1 is -2"),
        ([1, float("nan")], {"num_stages": 1}, "the cost of layer 1 is nan"),
        ([1], {"num_stages": 0}, "num_stages is 0"),
        ([1, 1], {"num_stages": 1, "together": [(0, 2)]}, "layers 0 and 2 shall be on one stage"),
    ],
)
def test_what_cannot_be_is_refused(costs: list[float], options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        balance(costs, **options)  # type: ignore[arg-type]

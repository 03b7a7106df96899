"""The bench, the picture and the table of the grids say what the cost functions say."""

from __future__ import annotations

import pytest

from benchmarks.parallel.grids import bench_grids, grids_picture
from benchmarks.parallel.grids.grids_ranks import METHODS
from benchmarks.parallel.grids.published_grids import CLAIMS, PAGE, Claim, fill, received, share
from pyops.tensor_parallel.grids.costs import best_with_zero, cost_1d, cost_grid

pytestmark = pytest.mark.cpu_only

ONE, PUBLISHED, FEW = METHODS


def result(seconds: dict[str, float], case: tuple[int, int, int]) -> dict:
    """A rank's, of one round."""
    _, width, tokens = case
    costs = bench_grids.costs(tokens, width)
    found = {
        name: {"seconds": [value], "sent": [1], "received_bytes": round(4 * costs[name].step)}
        for name, value in seconds.items()
    }
    return {**found, "compute": [0.01], "latency": 1e-4}


def test_the_two_shapes_have_different_winners():
    few, many = (
        bench_grids.predicted(tokens, width, mbit=mbit, compute=0.1, latency=1e-3)
        for mbit, width, tokens in bench_grids.CASES
    )
    assert min(few, key=few.__getitem__) == ONE
    assert min(many, key=many.__getitem__) == FEW
    assert few[ONE] < 0.7 * few[FEW]
    assert many[FEW] < 0.7 * many[ONE]


def test_a_row_says_whether_the_faster_is_the_one_that_is_named():
    case = bench_grids.CASES[0]
    fast, slow = ({ONE: 0.1 if right else 0.9, FEW: 0.3, PUBLISHED: 0.4} for right in (True, False))
    rows = [bench_grids._row(*case, [result(each, case)] * 4) for each in (fast, slow)]
    assert [row["same_order"] for row in rows] == [True, False]
    assert rows[0]["order"] == [ONE, FEW, PUBLISHED]
    assert rows[0]["counted_bytes"][FEW] == rows[0]["formula_bytes"][FEW]


@pytest.mark.full
def test_the_picture_has_the_costs_of_every_layout(tmp_path):
    found = {name: dict(points) for name, points in grids_picture.series(2).items()}
    assert tuple(found) == grids_picture.NAMES
    h, tokens = grids_picture.WIDTH, 2 * grids_picture.WIDTH
    assert found["1d"][64] == cost_1d(tokens, h, ranks=64, sequence_parallel=False).step / h**2
    assert found["1d x ZeRO 3"][16] == best_with_zero(tokens, h, ranks=16)[2].step / h**2
    assert found["3d"] == {
        ranks: cost_grid(tokens, h, ranks=ranks, mode="3d").step / h**2 for ranks in (8, 27, 64)
    }
    assert not {4, 9, 49} & set(found["2.5d"])  # of one layer: grids in two dimensions
    grids_picture.draw(tmp_path / "grids.png")
    assert (tmp_path / "grids.png").stat().st_size > 10_000


def test_the_page_has_the_table_of_what_was_published():
    page = PAGE.read_text()
    assert fill(page) == page, "run python -m benchmarks.parallel.grids.published_grids"
    assert "Optimus, arXiv:2104.05343 | 2d over 1d, training | 1.48x" in page


def test_what_was_published_is_possible_somewhere():
    """At some batch of 1 to 64 widths the bytes allow every figure, and never without them."""
    for claim in CLAIMS:
        parts = [share(claim, ratio) for ratio in (1, 4, 16, 64)]
        assert any(part is not None for part in parts), claim
        assert all(part is None or 0 < part <= 1 for part in parts)
    twice = Claim("", "", 1.5, "1d", "2d")
    most = received(twice, 4)
    assert 1 / (1 - share(twice, 4) * (1 - 1 / most)) == pytest.approx(1.5)

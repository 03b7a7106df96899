"""Who holds what on a grid, and which grids there are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyops.data_parallel import DataParallel
from pyops.flat.shard import whole_of_boxes
from pyops.mesh import ALONE
from pyops.tensor_parallel.grids import GridLinear
from pyops.tensor_parallel.grids.grid import Grid, grid_shape
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.tensor_parallel.grids.virtual_grids import LARGE, SMALL, numbers, on_grid

pytestmark = pytest.mark.cpu_only


def test_two_dimensions_by_hand():
    """Rank 2 i + j has block (i, j), of the activations and of a weight [in, out] alike."""
    x = torch.arange(16.0).view(4, 4)
    blocks = on_grid("2d", (2, 2), lambda grid: grid.take(x))
    assert [block.tolist() for block in blocks] == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
        [[8, 9], [12, 13]],
        [[10, 11], [14, 15]],
    ]
    weights = on_grid("2d", (2, 2), lambda grid: grid.weight_place(4, 4, grid.cuts).take(x.t()))
    assert [w.t().tolist() for w in weights] == [block.tolist() for block in blocks]


def test_three_dimensions_by_hand():
    """Rows by (w, i), columns by o; behind a layer rows by (w, o), columns by i."""
    # Row block a, column block b of two columns: 2 a + b.
    x = torch.arange(8.0).view(4, 2).repeat_interleave(2, dim=1)
    blocks = on_grid("3d", (2, 2, 2), lambda grid: grid.take(x)[0, 0].item())
    #   w i o:           000 001 010 011 100 101 110 111
    assert blocks == [0, 1, 2, 3, 4, 5, 6, 7]
    behind = on_grid(
        "3d", (2, 2, 2), lambda grid: grid.take(x, grid.behind(grid.cuts))[0, 0].item()
    )
    assert behind == [0, 2, 1, 3, 4, 6, 5, 7]


def test_depth_has_other_rows_and_the_same_weights():
    x = torch.arange(4.0).view(4, 1)
    rows = on_grid("2.5d", (2, 2, 2), lambda grid: grid.rows(4))
    assert [start for start, *_ in rows] == [0, 0, 1, 1, 2, 2, 3, 3]
    places = on_grid("2.5d", (2, 2, 2), lambda grid: grid.weight_place(4, 4, grid.cuts))
    assert [place.index for place in places] == [0, 2, 1, 3] * 2
    assert [place.first for place in places] == [True] * 4 + [False] * 4
    assert {place.copies for place in places} == {2}
    assert len(x) == 4


@pytest.mark.parametrize(("mode", "shape"), SMALL + LARGE)
def test_the_parts_of_a_parameter_are_the_whole_once(mode, shape):
    whole, bias = numbers(11, 10), numbers(11)

    def body(grid: Grid) -> list[tuple[object, ...]]:
        found = []
        for cuts in (grid.cuts, grid.behind(grid.cuts)):
            place = grid.weight_place(11, 10, cuts)
            width = grid.width_place(11, cuts)
            found.append((place, place.take(whole), width, width.take(bias)))
        return found

    for each in zip(*on_grid(mode, shape, body), strict=True):
        for first in (0, 2):
            held = [(rank[first], rank[first + 1]) for rank in each]
            boxes = [(place.box, place.part(part)) for place, part in held if place.first]
            expected = whole if first == 0 else bias
            assert torch.equal(whole_of_boxes(boxes, expected.shape), expected)


@pytest.mark.parametrize(("mode", "shape"), SMALL + LARGE)
def test_blocks_together_are_the_whole(mode, shape):
    x = numbers(7, 3, 10)
    for cuts in ("cuts", "behind"):

        def body(grid: Grid, cuts: str = cuts) -> torch.Tensor:
            where = grid.cuts if cuts == "cuts" else grid.behind(grid.cuts)
            return grid.whole(grid.take(x, where), batch=7, width=10, cuts=where)

        assert all(torch.equal(found, x) for found in on_grid(mode, shape, body))


def test_the_usual_shapes():
    assert [grid_shape(n, "2d") for n in (1, 4, 9, 16, 64)] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
        (8, 8),
    ]
    assert [grid_shape(n, "2.5d") for n in (1, 4, 8, 18, 32)] == [
        (1, 1, 1),
        (1, 2, 2),
        (2, 2, 2),
        (2, 3, 3),
        (2, 4, 4),
    ]
    assert [grid_shape(n, "3d") for n in (1, 8, 27, 64)] == [
        (1, 1, 1),
        (2, 2, 2),
        (3, 3, 3),
        (4, 4, 4),
    ]


@pytest.mark.parametrize(
    ("ranks", "mode", "shape", "message"),
    [
        (6, "2d", None, r"6 ranks are no square.*nearest are 4 and 9; or give shape=\(2, 3\)"),
        (6, "2.5d", None, r"6 ranks are no d x q x q.*nearest are 4 and 8; or give shape=\(6,"),
        (2, "2.5d", None, r"2 ranks are no d x q x q.*nearest are 4 and 8; or give shape=\(2,"),
        (12, "3d", None, r"12 ranks are no cube.*2 x 2 x 2 = 8 and 3 x 3 x 3 = 27"),
        (4, "4d", None, "grid is '4d'; choose one of 2d, 2.5d, 3d"),
        (4, "2d", (2, 3), r"shape \(2, 3\) is a grid of 6 ranks, but there are 4"),
        (4, "2d", (4,), r"shape is \(4,\); a 2d grid has a size of 1 or more for each of row"),
        (4, "2d", (-2, -2), r"shape is \(-2, -2\); a 2d grid has a size of 1 or more"),
        (8, "3d", (4, 2, 1), "a 3d grid is l x l x l"),
        (8, "2.5d", (2, 4, 1), "the layers of a 2.5d grid are q x q"),
    ],
)
def test_grids_that_there_are_not(ranks, mode, shape, message):
    with pytest.raises(ValueError, match=message):
        grid_shape(ranks, mode, shape)


def disagree(rank: int, group: dist.ProcessGroup) -> list[str]:
    """What ranks are told that ask for other grids, and of a grid that there is not."""
    said = []
    for mode, shape in (("2d" if rank else "3d", None), ("2d", (1, 2 + rank)), ("3d", None)):
        with pytest.raises(ValueError) as error:
            Grid.of(group, mode=mode, shape=shape)
        said.append(str(error.value))
    grid = Grid.of(group, mode="2d", shape=(1, 2))
    assert grid.ranks.group is group
    found = grid.whole(grid.take(torch.arange(8.0).view(2, 4)), batch=2, width=4)
    assert torch.equal(found, torch.arange(8.0).view(2, 4))
    return said


def test_ranks_that_disagree_are_all_told(world):
    first, second = world(2).run(disagree)
    assert first == second
    assert first[0] == ("Grid.of: mode is 3d on rank 0, but 2d on rank 1; give all ranks the same")
    assert "shape is (1, 2) on rank 0, but (1, 3) on rank 1" in first[1]
    assert "2 ranks are no cube" in first[2]


def train_over_depth(rank: int, group: dist.ProcessGroup) -> list[str]:
    """What strategies of data parallelism say of the layers of a grid as their ranks."""
    grid = Grid.of(group, mode="2.5d", shape=(2, 1, 1))
    model = nn.Sequential(GridLinear(4, 4, grid=grid))
    DataParallel(model, group=ALONE).close()
    said = []
    for strategy in (
        lambda: DataParallel(model, group=group),
        lambda: ZeroOptimizer(model, torch.optim.AdamW, ZeroConfig(stage=1), group=group),
    ):
        with pytest.raises(ValueError) as error:
            strategy()
        said.append(str(error.value))
    return said


def test_ranks_of_one_grid_are_no_data_parallel_ranks(world):
    first, second = world(2).run(train_over_depth)
    assert first == second
    for who, said in zip(("DataParallel", "ZeroOptimizer"), first, strict=True):
        assert said.startswith(f"{who}: ranks [0, 1] of the group are on one grid, that of 0 (2.5d")

"""The bias of attention by the offset of two pixels: where it stands, its gradient, and the table
of another size."""

from __future__ import annotations

import pytest
import torch

from pyops.mesh import ALONE
from pyops.models.coatnet.relative_bias import RelativeBias2d, offset_sums, resized
from pyops.models.model_layout import ModelLayout
from pyops.tensor_parallel import Ranks

pytestmark = pytest.mark.cpu_only

GRIDS = [(1, 1), (2, 3), (4, 1)]


def bias_of(grid: tuple[int, int], *, heads: int = 2) -> RelativeBias2d:
    layout = ModelLayout(Ranks.of(ALONE), dtype=torch.float64)
    made = RelativeBias2d(heads, grid, layout=layout)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        made.table.copy_(torch.randn(made.table.shape, generator=generator))
    return made


def row_of(i: int, j: int, grid: tuple[int, int]) -> int:
    """The row of the table for query i and key j, by the paper's formula."""
    height, width = grid
    down, right = i // width - j // width, i % width - j % width
    return (down + height - 1) * (2 * width - 1) + right + width - 1


@pytest.mark.parametrize("grid", GRIDS)
def test_each_pair_has_the_number_of_its_offset_and_the_table_the_sum_of_its_pairs(grid):
    module = bias_of(grid)
    found = module()
    tokens = grid[0] * grid[1]
    assert found.shape == (1, 2, tokens, tokens)
    dy = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    wanted = torch.zeros_like(module.table)
    for i in range(tokens):
        for j in range(tokens):
            row = row_of(i, j, grid)
            assert torch.equal(found[0, :, i, j], module.table[row])
            wanted[row] += dy[0, :, i, j]
    found.backward(dy)
    torch.testing.assert_close(module.table.grad, wanted, rtol=0, atol=1e-13)
    assert torch.autograd.gradcheck(lambda table: _bias(table, grid), module.table)


def _bias(table: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    module = bias_of(grid)
    module.table = torch.nn.Parameter(torch.empty(0, dtype=torch.float64))
    del module.table
    module.table = table  # type: ignore[assignment]
    return module()


def test_an_image_moved_by_a_pixel_has_the_scores_of_the_pixels_that_moved():
    module = bias_of((3, 4))
    scores = module()[0].view(2, 3, 4, 3, 4)
    assert torch.equal(scores[:, 1:, 1:, 1:, 1:], scores[:, :-1, :-1, :-1, :-1])
    assert not torch.equal(scores[:, 0, 0, 0, 1], scores[:, 0, 1, 0, 0]), "i - j is not j - i"


def test_the_gradient_has_the_same_bits_for_any_number_of_threads():
    x = torch.randn(6, 14, 14, generator=torch.Generator().manual_seed(3)).repeat(40, 1, 1)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(offset_sums(x))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert found[0][0, 0] == x[0, 0, 13]
    assert found[0][0, -1] == x[0, 13, 0]


def test_a_table_of_another_size_keeps_centre_corners_and_lines():
    table = torch.arange(7 * 5.0).view(7, 5, 1) + torch.tensor([0.0, 100.0])
    table = table.flatten(0, 1)
    assert torch.equal(resized(table, (4, 3), (4, 3)), table)
    found = resized(table, (4, 3), (7, 5)).view(13, 9, 2)
    old = table.view(7, 5, 2)
    for there, here in (((6, 4), (3, 2)), ((0, 0), (0, 0)), ((12, 8), (6, 4)), ((0, 8), (0, 4))):
        torch.testing.assert_close(found[there], old[here])
    torch.testing.assert_close(found[::2, ::2], old)
    torch.testing.assert_close(found[1::2], (found[:-1:2] + found[2::2]) / 2)

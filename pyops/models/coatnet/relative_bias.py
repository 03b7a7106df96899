"""RelativeBias2d: a learned number for each head and each offset of two pixels, which is added to
the scores of attention.

    bias[head, i, j] = table[(i_h - j_h + H - 1) (2 W - 1) + i_w - j_w + W - 1, head]

for a query at pixel i = (i_h, i_w) and a key at pixel j of H x W pixels (Dai et al., 2021, section
2.1). The table's gradient sums the pairs of one offset in one order, whatever the number of
threads: each axis is sheared, so that pairs of one offset stand in a column, and summed.

    rows i, columns j reversed          sheared by i                  sums of columns
    a02 a01 a00                         a02 a01 a00  .   .            offset -2 ... 2
    a12 a11 a10                          .  a12 a11 a10  .
    a22 a21 a20                          .   .  a22 a21 a20
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.flat import Placement
from pyops.models.model_layout import ModelLayout

__all__ = ["RelativeBias2d", "offset_sums", "resized"]

Grid = tuple[int, int]


class RelativeBias2d(nn.Module):
    """forward() -> the bias [1, own heads, H W, H W] of all pairs of pixels.

    table: [(2 H - 1)(2 W - 1), heads / ranks], cut and padded as the heads are.

    Args:
        num_heads: number of heads of the whole attention.
        grid: H and W.
        layout: how the model lies on its ranks.
    """

    def __init__(self, num_heads: int, grid: Grid, *, layout: ModelLayout) -> None:
        super().__init__()
        self.grid, self.num_heads, self.layout = grid, num_heads, layout
        self._place()
        self.table = layout.parameter(*self.placements["table"].local_shape)

    def _place(self) -> None:
        ranks = self.layout.ranks
        shape = (num_offsets(self.grid), self.num_heads)
        self.placements = {"table": Placement.cut(shape, dim=1, rank=ranks.rank, ranks=ranks.size)}

    def forward(self) -> Tensor:
        found: Tensor = _Bias.apply(self.table, *self.grid)  # type: ignore[no-untyped-call]
        return found

    @torch.no_grad()
    def resize_(self, grid: Grid) -> None:
        """Make the table one of another grid, by interpolation; a new parameter, so that an
        optimizer is to be made after."""
        if grid == self.grid:
            return
        table = resized(self.table, self.grid, grid)
        self.grid = grid
        self._place()
        self.table = nn.Parameter(table, requires_grad=self.table.requires_grad)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, grid={self.grid}"


def num_offsets(grid: Grid) -> int:
    """Of two pixels of the grid."""
    return (2 * grid[0] - 1) * (2 * grid[1] - 1)


def resized(table: Tensor, grid: Grid, new: Grid) -> Tensor:
    """The table [offsets of `grid`, heads] for the grid `new`: bilinear, with the largest offsets
    onto the largest and 0 onto 0 (the paper's appendix does not say which corners).

    Args:
        table: Of `grid`.
        grid: H and W.
        new: Those wanted.
    """
    if new == grid:
        return table.clone()
    heads = table.shape[1]
    image = table.t().view(1, heads, 2 * grid[0] - 1, 2 * grid[1] - 1)
    wide = image if image.dtype == torch.float64 else image.float()
    size = (2 * new[0] - 1, 2 * new[1] - 1)
    found = functional.interpolate(wide, size, mode="bilinear", align_corners=True)
    return found.view(heads, -1).t().to(table.dtype).contiguous()


def offset_sums(x: Tensor) -> Tensor:
    """[..., n (i), n (j)] -> [..., 2 n - 1], the sums of what has i - j = 1 - n ... n - 1."""
    n = x.shape[-1]
    flat = functional.pad(x.flip(-1), (0, n)).flatten(-2)
    found: Tensor = flat[..., : n * (2 * n - 1)].unflatten(-1, (n, 2 * n - 1)).sum(-2)
    return found


def _index(height: int, width: int, device: torch.device) -> Tensor:
    """int64 [T T]: the row of the table for each pair."""
    rows, columns = (torch.arange(n, device=device) for n in (height, width))
    down = rows[:, None] - rows + height - 1
    right = columns[:, None] - columns + width - 1
    return (down[:, None, :, None] * (2 * width - 1) + right[None, :, None, :]).flatten()


class _Bias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, height: int, width: int) -> Tensor:
        ctx.grid = (height, width)
        tokens = height * width
        index = _index(height, width, table.device)
        return table.t().contiguous().index_select(1, index).view(1, -1, tokens, tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        height, width = ctx.grid
        wide = dy if dy.dtype == torch.float64 else dy.float()
        pairs = wide.view(-1, height, width, height, width)
        across = offset_sums(pairs.transpose(2, 3))  # [heads, H, H, 2 W - 1]
        both = offset_sums(across.permute(0, 3, 1, 2))  # [heads, 2 W - 1, 2 H - 1]
        return both.permute(2, 1, 0).flatten(0, 1).to(dy.dtype), None, None

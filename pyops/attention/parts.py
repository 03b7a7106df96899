"""What patterns are put together from: ranges of columns for each row, whole columns and rows, and
random columns. Each part is a list of rectangles of blocks, int64 [n, 5] of (head, query block, its
end, key block, its end); ends are one behind the last block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyops import random
from pyops.attention.extent import Extent
from pyops.ops.attention.block_tables import rectangles_of

__all__ = [
    "check_random",
    "check_width",
    "column_ranges",
    "for_each_head",
    "global_blocks",
    "random_columns",
    "sliding_window",
]

# A stream has room for so many rows, so that what a row draws does not depend on the length.
_ROWS = 1 << 24


def check_width(name: str, width: int) -> None:
    """Refuse a window that has no middle.

    Raises:
        ValueError: When `width` is even, or less than 1.
    """
    if width < 1 or width % 2 == 0:
        odd = (width - 1, width + 1) if width > 1 else (1, 3)
        raise ValueError(
            f"{name} is {width}; a window is the block itself and as many on each side, so it must "
            f"be odd, such as {odd[0]} or {odd[1]}"
        )


def check_random(count: int, num_blocks: int) -> None:
    """Refuse more random columns than there are.

    Raises:
        ValueError: When `count` is more than `num_blocks`, of which there are some.
    """
    if count > num_blocks > 0:
        raise ValueError(
            f"num_random_blocks is {count}, but the length has {num_blocks} blocks; draw at most "
            "so many, or use a smaller block"
        )


def column_ranges(first: Tensor, end: Tensor, *, head: int = 0) -> Tensor:
    """Row i sees columns first[i] to end[i] - 1.

    Args:
        first, end: int64 [rows].
        head: The head of all of them.

    Returns:
        The rectangles, one for each row.
    """
    row = torch.arange(first.numel(), device="cpu")
    return torch.stack([torch.full_like(row, head), row, row + 1, first, end], dim=1)


def sliding_window(rows: Tensor, width: int) -> Tensor:
    """Each row sees `width` columns, its own in the middle, as far as they exist."""
    half, size = width // 2, rows.numel()
    return column_ranges((rows - half).clamp(min=0), (rows + half + 1).clamp(max=size))


def global_blocks(
    blocks: Sequence[int], num_blocks: int, *, horizontal: bool, head: int = 0
) -> Tensor:
    """All rows see the columns `blocks`; with `horizontal` these rows also see all columns.

    Args:
        blocks: Numbers below `num_blocks`.
        num_blocks: Blocks of each side.
        horizontal: Whether rows are set, too.
        head: The head of all of them.
    """
    rectangles = [(head, 0, num_blocks, each, each + 1) for each in blocks]
    if horizontal:
        rectangles += [(head, each, each + 1, 0, num_blocks) for each in blocks]
    return torch.tensor(rectangles, dtype=torch.int64, device="cpu").view(-1, 5)


def random_columns(seed: int, name: str, *, count: int, extent: Extent) -> Tensor:
    """Each row sees `count` different columns, all sets of them equally likely.

    Row i of head j draws from the stream `name` under `seed` at the place (j, i) alone: a rank with
    some of the heads draws exactly its part, and a causal layout begins as a longer one does.

    Args:
        seed, name: The stream of `pyops.random`.
        count: Columns of a row; all that there are where these are fewer.
        extent: Heads and rows; where it is causal, row i draws from columns 0 to i.
    """
    num_heads, num_blocks = extent.num_heads, extent.num_blocks
    if not count or not num_blocks:
        return torch.zeros(0, 5, dtype=torch.int64, device="cpu")
    drawn = random.uniform(
        seed,
        name,
        (num_heads, num_blocks, count),
        offset=(extent.first_head, 0, 0),
        global_shape=(extent.first_head + num_heads, _ROWS, count),
        device="cpu",
    )
    rows = extent.rows
    available = rows + 1 if extent.causal else torch.full_like(rows, num_blocks)
    chosen = torch.empty(num_heads, num_blocks, 0, dtype=torch.int64, device="cpu")
    for number in range(count):
        left = available - number
        # The place among those that are left, and from it the column: past each smaller chosen one.
        column = (drawn[..., number].double() * left.clamp(min=1)).long()
        for taken in chosen.unbind(-1):
            column = column + (column >= taken)
        # Where none is left: behind all columns, and dropped below.
        column = torch.where(left < 1, num_blocks, column)
        chosen = torch.cat([chosen, column.unsqueeze(-1)], dim=-1).sort(dim=-1).values
    head, row, slot = (chosen < available[:, None]).nonzero().unbind(1)
    return rectangles_of(torch.stack([head, row, chosen[head, row, slot]], dim=1))


def for_each_head(rectangles: Tensor, num_heads: int) -> Tensor:
    """Rectangles of head 0, repeated for heads 0 to num_heads - 1."""
    repeated = rectangles.repeat(num_heads, 1)
    repeated[:, 0] = torch.arange(num_heads, device="cpu").repeat_interleave(len(rectangles))
    return repeated

"""Global blocks by their numbers, or by ranges of them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["check_named", "named_blocks"]


def check_named(first: Sequence[int], end: Sequence[int] | None) -> None:
    """Refuse numbers that no length has.

    Raises:
        ValueError: For a negative number, or ranges that are empty or not as many as their ends.
    """
    if any(index < 0 for index in first):
        raise ValueError(
            f"global_block_indices is {tuple(first)}; each must be 0 or more, counted from the "
            "first block"
        )
    if end is None:
        return
    if len(first) != len(end):
        raise ValueError(
            f"global_block_indices has {len(first)} numbers and global_block_end_indices "
            f"{len(end)}; give each range its end"
        )
    for start, stop in zip(first, end, strict=True):
        if stop <= start:
            raise ValueError(
                f"the range of global blocks from {start} to {stop} is empty; its end, which is "
                f"one behind its last block, must be {start + 1} or more"
            )


def named_blocks(
    first: Sequence[int], end: Sequence[int] | None, num_blocks: int, *, cut: bool = False
) -> list[int]:
    """The numbers of the global blocks, ascending.

    Args:
        first: The blocks, or the starts of their ranges.
        end: The ends of the ranges, one behind the last block; None: single blocks.
        num_blocks: Of the length at hand.
        cut: Whether blocks beyond the last one are left out, and no error.

    Raises:
        ValueError: When one is beyond the last block.
    """
    ends = [index + 1 for index in first] if end is None else list(end)
    if not cut and ends and num_blocks and max(ends) > num_blocks:
        raise ValueError(
            f"global block {max(ends) - 1} of a length with {num_blocks} blocks; name blocks below "
            f"{num_blocks}, or use a smaller block"
        )
    return sorted(
        {
            block
            for start, stop in zip(first, ends, strict=True)
            for block in range(start, min(stop, num_blocks))
        }
    )

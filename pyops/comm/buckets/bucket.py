"""Which slice of which flat buffer is reduced together: the plan of buckets, as data.

    flat buffer (backward order)  | head | block 3 | block 2 | block 1 | block 0 | embedding |
    buckets                       |------ 0 -------|------- 1 ---------|-- 2 ----|---- 3 ----|
                                    ready first                                    ready last

The last bucket is small, because no backward is left behind which its reduction could hide. A
bucket is a slice, so nothing is copied in or out. Buckets are reduced in the order of the list on
every rank, whichever becomes ready first, so that the ranks' collectives always match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyops.flat import FlatLayout

__all__ = ["LAST_BUCKET_BYTES", "Bucket", "plan_buckets"]

LAST_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True)
class Bucket:
    """A slice of a flat buffer whose gradients are reduced together."""

    buffer: int
    """The number of the buffer."""
    start: int
    """Its first element in the buffer."""
    stop: int
    """The element behind its last one, padding included."""
    parameters: tuple[int, ...]
    """The numbers of its parameters within the buffer."""


def cut(sizes: Sequence[int], *, limit: int, last_limit: int) -> list[list[int]]:
    """Group consecutive items, so that the sizes in a group add up to at most `limit`.

    The sizes of the last group add up to at most `last_limit`, and it takes as many items as fit. A
    single item over the limit is a group of its own.
    """
    first_of_last, total = len(sizes), 0
    while first_of_last > 0 and (
        total + sizes[first_of_last - 1] <= last_limit or first_of_last == len(sizes)
    ):
        first_of_last -= 1
        total += sizes[first_of_last]
    groups: list[list[int]] = []
    filled = limit + 1  # so that the first item opens a group
    for item in range(first_of_last):
        if filled + sizes[item] > limit:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += sizes[item]
    return [*groups, list(range(first_of_last, len(sizes)))]


def plan_buckets(
    layouts: Sequence[FlatLayout],
    *,
    item_sizes: Sequence[int],
    bucket_bytes: int,
    positions: Sequence[Sequence[int]] | None = None,
) -> list[Bucket]:
    """Cut every buffer into buckets, sorted by when backward completes them.

    Args:
        layouts: The layouts of the buffers.
        item_sizes: The bytes per element of each buffer.
        bucket_bytes: The most that a bucket holds. A parameter is never cut: one that is larger is
            a bucket of its own.
        positions: positions[b][i] is when the gradient of parameter i of buffer b is expected, as a
            rank among all parameters; by default buffers come one after the other.

    Returns:
        The buckets; those of a buffer cover it without gap, padding included.

    Raises:
        ValueError: bucket_bytes is below 1.
    """
    if bucket_bytes < 1:
        raise ValueError(
            f"bucket_bytes is {bucket_bytes}; give the bytes of a bucket, such as 25 << 20"
        )
    found: list[tuple[int, Bucket]] = []
    for buffer, (layout, item_size) in enumerate(zip(layouts, item_sizes, strict=True)):
        edges = [*layout.offsets[1:], layout.numel]
        sizes = [
            (edge - offset) * item_size for offset, edge in zip(layout.offsets, edges, strict=True)
        ]
        for members in cut(
            sizes, limit=bucket_bytes, last_limit=min(bucket_bytes, LAST_BUCKET_BYTES)
        ):
            bucket = Bucket(buffer, layout.offsets[members[0]], edges[members[-1]], tuple(members))
            ready = max(positions[buffer][m] for m in members) if positions else len(found)
            found.append((ready, bucket))
    return [bucket for _, bucket in sorted(found, key=lambda pair: pair[0])]

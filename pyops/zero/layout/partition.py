"""Which rank owns which part of which parameter: pure arithmetic, the same on every rank.

    tensors, in the order in which backward reaches them
    buffer    | head      |pad| block 3.bias |pad| block 3.weight ..  |pad| embedding         |pad|
    buckets   |------------- 0 ----------------|---------- 1 ---------------|------- 2 -----------|
    owners    | rank 0    | rank 1   | rank 2  |   0    |   1    |    2     |  0   |   1   |   2  |
    rank 1's  | chunk of 0 | chunk of 1 | chunk of 2 |

    A bucket is a multiple of ranks * 64 elements, in equal chunks; a rank's chunks are 1 / ranks of
    the buffer.

A reduce-scatter of a bucket leaves each rank its chunk, an all-gather puts the chunks together
again: both in place. A tensor lies within one bucket, so a rank owns at most one stretch of it, a
piece. Bucket sizes change who owns what, never a value.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from pyops.comm.buckets.bucket import LAST_BUCKET_BYTES, cut
from pyops.flat import ALIGNMENT, FlatLayout

__all__ = ["Bucket", "Partition", "Piece"]


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of the buffer, which hold the tensors number `members` (and
    padding)."""

    start: int
    stop: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """What one rank owns of tensor number `index`: elements `of_tensor` of the flattened tensor,
    which are elements `of_chunk` of its chunk of bucket number `bucket`. Empty where it owns
    nothing."""

    index: int
    bucket: int
    of_tensor: builtins.slice
    of_chunk: builtins.slice

    @property
    def numel(self) -> int:
        return int(self.of_tensor.stop - self.of_tensor.start)


@dataclass(frozen=True)
class Partition:
    """A buffer cut into buckets, and each bucket into `ranks` chunks of one length.

    Attributes:
        layout: Where the tensors lie in the buffer. All starts and ends are multiples of ALIGNMENT,
            those of buckets of ranks * ALIGNMENT.
    """

    layout: FlatLayout
    buckets: tuple[Bucket, ...]
    ranks: int

    @classmethod
    def plan(
        cls,
        tensors: Sequence[tuple[str, Sequence[int]]],
        *,
        ranks: int,
        item_size: int,
        bucket_bytes: int | None,
    ) -> Partition:
        """Lay out the (name, shape) pairs in the order given, in buckets of at most `bucket_bytes`;
        None: one bucket.

        Args:
            item_size: Bytes of an element. A tensor larger than `bucket_bytes` is a bucket of its
                own.
        """
        if bucket_bytes is not None and bucket_bytes < 1:
            raise ValueError(
                f"bucket_bytes is {bucket_bytes}; give the bytes of a bucket, such as 25 << 20"
            )
        names = tuple(name for name, _ in tensors)
        shapes = tuple(tuple(int(n) for n in shape) for _, shape in tensors)
        sizes = [-(-prod(shape) // ALIGNMENT) * ALIGNMENT for shape in shapes]
        limit = sum(sizes) if bucket_bytes is None else max(1, bucket_bytes // item_size)
        last = limit if bucket_bytes is None else min(limit, LAST_BUCKET_BYTES // item_size)
        groups = cut(sizes, limit=limit, last_limit=last) if tensors else []
        offsets, buckets, end = [], [], 0
        for members in groups:
            start = end
            for member in members:
                offsets.append(end)
                end += sizes[member]
            end = start + -(-(end - start) // (ranks * ALIGNMENT)) * ranks * ALIGNMENT
            buckets.append(Bucket(start, end, tuple(members)))
        return cls(FlatLayout(names, shapes, tuple(offsets), end), tuple(buckets), ranks)

    def chunk(self, bucket: int, rank: int) -> builtins.slice:
        """Where in the buffer the rank's chunk of the bucket lies."""
        start, stop = self.buckets[bucket].start, self.buckets[bucket].stop
        each = (stop - start) // self.ranks
        return slice(start + rank * each, start + (rank + 1) * each)

    def owned(self, bucket: int) -> builtins.slice:
        """Where a rank's chunk of the bucket lies among all its chunks, one after the other."""
        return slice(
            self.buckets[bucket].start // self.ranks, self.buckets[bucket].stop // self.ranks
        )

    def pieces(self, rank: int) -> list[Piece]:
        """What the rank owns of each tensor, in the order of the tensors."""
        found = []
        for number, bucket in enumerate(self.buckets):
            chunk = self.chunk(number, rank)
            for index in bucket.members:
                whole = self.layout.slice_at(index)
                low = min(max(chunk.start, whole.start), chunk.stop)
                high = max(low, min(chunk.stop, whole.stop))
                if low == high:
                    found.append(Piece(index, number, slice(0, 0), slice(0, 0)))
                    continue
                of_tensor = slice(low - whole.start, high - whole.start)
                found.append(
                    Piece(index, number, of_tensor, slice(low - chunk.start, high - chunk.start))
                )
        return found

    def padding(self, bucket: int) -> list[builtins.slice]:
        """The parts of the bucket that belong to no tensor, from the bucket's start."""
        found, end, start = [], self.buckets[bucket].start, self.buckets[bucket].start
        for index in self.buckets[bucket].members:
            where = self.layout.slice_at(index)
            if where.start > end:
                found.append(slice(end - start, where.start - start))
            end = where.stop
        if end < self.buckets[bucket].stop:
            found.append(slice(end - start, self.buckets[bucket].stop - start))
        return found

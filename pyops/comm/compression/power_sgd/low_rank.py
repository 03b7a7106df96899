"""Matrices as products of two thin ones: what PowerSGD computes between its two collectives, the
same bits on every rank.

    U [n, m]   ~   P [n, r] Q^T [r, m]         r (n + m) numbers in place of n m

A matrix product is computed on its own rank and summed over the ranks afterwards, so its bits need
not be the same everywhere. What every rank computes for itself from equal sums (`orthonormal`,
`product`, `unit_columns`) is written in element-by-element operations, whose bits don't depend on
the number of threads, on a rank's memory or on a library's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from pyops.flat import FlatLayout
from pyops.random import normal

__all__ = [
    "Family",
    "Piece",
    "families",
    "fresh_basis",
    "orthonormal",
    "pieces",
    "product",
    "scale_of",
    "squared_lengths",
    "sum_last",
    "unit_columns",
    "whole_batches",
]

GAIN = 2.0  # a matrix must shrink at least by this factor; else it travels as it is
BAND = (
    1 << 16
    # elements that are worked on at a time, so that they stay in the cache from one operation to
    # the
    # next
)
# of its length is what a column keeps of rounding errors when the columns before it have taken all
# it had
DEAD = 1e-6


@dataclass(frozen=True)
class Family:
    """Matrices of one shape [rows, columns], worked on as one batch: tensors number `members` of a
    layout.

    Attributes:
        rank: Of P and Q.
    """

    rows: int
    columns: int
    rank: int
    members: tuple[int, ...]


def families(layout: FlatLayout, *, rank: int) -> tuple[list[Family], list[int]]:
    """(families of matrices that shrink, numbers of the tensors that travel as they are).

    A tensor of shape [n, ...] is the matrix [n, numel / n] (Vogels et al. 2019, section 3).
    """
    sorted_into: dict[tuple[int, int], list[int]] = {}
    whole: list[int] = []
    for index, shape in enumerate(layout.shapes):
        numel, rows = prod(shape), shape[0] if len(shape) > 1 else 0
        columns = numel // rows if rows else 0
        if numel and columns and GAIN * min(rank, rows, columns) * (rows + columns) <= numel:
            sorted_into.setdefault((rows, columns), []).append(index)
        else:
            whole.append(index)
    return [
        Family(n, m, min(rank, n, m), tuple(members)) for (n, m), members in sorted_into.items()
    ], whole


@dataclass(frozen=True)
class Piece:
    """Rows `row` to `row + rows` of `count` matrices of a family, from its member number `first`
    on.

    In a flat tensor they begin at `start` and lie `distance` elements apart, so that one strided
    view holds them all, and one operation takes them as a batch: no copy, and no call for each
    matrix.
    """

    family: Family
    first: int
    count: int
    row: int
    rows: int
    start: int
    distance: int

    @property
    def numel(self) -> int:
        return self.count * self.rows * self.family.columns

    def matrices(self, flat: Tensor) -> Tensor:
        """The view [count, rows, columns] of a flat tensor."""
        m = self.family.columns
        place = flat.storage_offset() + self.start + self.row * m
        return flat.as_strided((self.count, self.rows, m), (self.distance, m, 1), place)

    def left(self, p: Tensor) -> Tensor:
        """The part [count, r, rows] of the family's contiguous P [members, r, n]."""
        r, n = self.family.rank, self.family.rows
        place = p.storage_offset() + self.first * r * n + self.row
        return p.as_strided((self.count, r, self.rows), (r * n, n, 1), place)

    def right(self, q: Tensor) -> Tensor:
        """The part [count, r, m] of the family's contiguous Q [members, r, m]."""
        return q if self.count == len(q) else q.narrow(0, self.first, self.count)


def whole_batches(layout: FlatLayout, family: Family) -> list[Piece]:
    """The family's matrices in as few batches as there are stretches of even distances between
    them."""
    starts = [layout.slice_at(i).start for i in family.members]
    found: list[Piece] = []
    first = 0
    while first < len(starts):
        stop = first + 1
        distance = starts[stop] - starts[first] if stop < len(starts) else 0
        while stop < len(starts) and starts[stop] - starts[stop - 1] == distance:
            stop += 1
        found.append(Piece(family, first, stop - first, 0, family.rows, starts[first], distance))
        first = stop
    return found


def pieces(batch: Piece) -> list[Piece]:
    """A batch of whole matrices, cut into parts of about BAND elements: some matrices, or some rows
    of one."""
    n, m = batch.family.rows, batch.family.columns
    some, many = max(1, BAND // (n * m)), max(1, BAND // m)
    found: list[Piece] = []
    for i in range(0, batch.count, some):
        first, start, count = (
            batch.first + i,
            batch.start + i * batch.distance,
            min(some, batch.count - i),
        )
        bands = range(0, n, many if count == 1 else n)
        found += [
            Piece(batch.family, first, count, row, min(bands.step, n - row), start, batch.distance)
            for row in bands
        ]
    return found


def fresh_basis(family: Family, names: Sequence[str], *, seed: int) -> Tensor:
    """A first Q for each matrix, transposed [members, rank, columns]: normal numbers keyed by the
    tensor's name."""
    drawn = [
        normal(seed, f"PowerSGD/{names[i]}", (family.rank, family.columns)) for i in family.members
    ]
    return torch.stack(drawn)


def sum_last(x: Tensor) -> Tensor:
    """The sum over the last dimension, in an order that nothing but the length decides: one after
    the other on a CPU, where running sums are one operation; by halving elsewhere."""
    if x.device.type == "cpu":
        return x.cumsum(-1)[..., -1]
    while (length := x.shape[-1]) > 1:
        half = length // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        if length % 2:
            folded[..., 0] += x[..., -1]
        x = folded
    return x[..., 0]


def squared_lengths(columns: Tensor) -> Tensor:
    """[K, r] in float64, of columns [K, r, n]: no number in fp32 is too large or too small for its
    square."""
    return sum_last(columns.double().square())


def scale_of(squares: Tensor, *, least: Tensor | float = 0.0) -> Tensor:
    """What gives a column of this squared length the length 1; zero where the square is not above
    `least`."""
    return torch.where(squares > least, squares.rsqrt(), 0.0)


def orthonormal(columns: Tensor) -> Tensor:
    """Gram-Schmidt, modified, in float64: [K, r, n], the matrices' columns as rows; fp32.

    A column that depends on those before it becomes zero. One that is not finite, and those after
    it, become nan.
    """
    before = squared_lengths(columns)
    left = columns.to(torch.float64, copy=True)
    for i in range(left.shape[1]):
        column, rest = left[:, i], left[:, i + 1 :]
        length = before[:, i] if i == 0 else squared_lengths(column)
        column.mul_(scale_of(length, least=DEAD**2 * before[:, i])[:, None])
        if rest.shape[1]:
            rest.sub_(sum_last(column[:, None] * rest)[..., None] * column[:, None])
    return left.float()


def product(p: Tensor, q: Tensor, *, out: Tensor | None = None) -> Tensor:
    """P Q^T, [..., n, m], of the columns [..., r, n] and [..., r, m]; the sum over r in its order.

    Args:
        out: Where to put it.
    """
    out = torch.mul(p[..., 0, :, None], q[..., 0, None, :], out=out)
    for k in range(1, p.shape[-2]):
        out.addcmul_(p[..., k, :, None], q[..., k, None, :])
    return out


def unit_columns(q: Tensor, *, fresh: Tensor, squares: Tensor | None = None) -> Tensor:
    """q [K, r, m] with columns of length 1; one of length zero is taken from `fresh`, or it would
    stay zero for ever.

    Args:
        squares: Q's `squared_lengths`, where they are known.
    """
    squares = (squared_lengths(q) if squares is None else squares)[..., None]
    return torch.where(squares > 0, (q.double() * scale_of(squares)).float(), fresh)

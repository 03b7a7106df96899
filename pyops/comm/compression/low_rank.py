"""Matrices as products of two thin ones: what PowerSGD computes between its two collectives, the same bits on every rank.

    U [n, m]   ~   P [n, r] Q^T [r, m]         r (n + m) numbers in place of n m

A matrix product is computed on its own rank and summed over the ranks afterwards, so its bits need not be the same everywhere.
What every rank computes for itself from equal sums (`orthonormal`, `product`, `unit_columns`) is written in element-by-element
operations, whose bits don't depend on the number of threads, on a rank's memory or on a library's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from pyops.flat import FlatLayout
from pyops.random import normal

__all__ = ["Family", "families", "fresh_basis", "orthonormal", "product", "sum_last", "unit_columns"]

GAIN = 2.0  # a matrix must shrink at least by this factor; else it travels as it is
DEAD = 1e-6  # of its length is what a column keeps of rounding errors when the columns before it have taken all it had


@dataclass(frozen=True)
class Family:
    """Matrices of one shape [rows, columns], worked on as one batch: tensors number `members` of a layout. rank: of P and Q."""

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
    return [Family(n, m, min(rank, n, m), tuple(members)) for (n, m), members in sorted_into.items()], whole


def fresh_basis(family: Family, names: Sequence[str], *, seed: int) -> Tensor:
    """A first Q for each matrix, transposed [members, rank, columns]: normal numbers keyed by the tensor's name."""
    drawn = [normal(seed, f"PowerSGD/{names[i]}", (family.rank, family.columns)) for i in family.members]
    return torch.stack(drawn)


def sum_last(x: Tensor) -> Tensor:
    """The sum over the last dimension, in an order that nothing but the length decides: one after the other on a CPU, where
    running sums are one operation; by halving elsewhere."""
    if x.device.type == "cpu":
        return x.cumsum(-1)[..., -1]
    while (length := x.shape[-1]) > 1:
        half = length // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        if length % 2:
            folded[..., 0] += x[..., -1]
        x = folded
    return x[..., 0]


def orthonormal(columns: Tensor) -> Tensor:
    """Gram-Schmidt, modified, in float64: [K, r, n], the matrices' columns as rows, finite; fp32.

    A column that depends on those before it becomes zero.
    """
    left = [column.double() for column in columns.unbind(1)]
    for i, column in enumerate(left):
        before, length = sum_last(columns[:, i].double().square()), sum_last(column.square())
        scale = torch.where(length > DEAD**2 * before, length.rsqrt(), 0.0)
        left[i] = column * scale[:, None]
        for j in range(i + 1, len(left)):
            left[j] = left[j] - sum_last(left[i] * left[j])[:, None] * left[i]
    return torch.stack(left, dim=1).float()


def product(p: Tensor, q: Tensor, *, out: Tensor | None = None) -> Tensor:
    """P Q^T, [..., n, m], of the columns [..., r, n] and [..., r, m]; the sum over r in its order. out: where to put it."""
    out = torch.mul(p[..., 0, :, None], q[..., 0, None, :], out=out)
    for k in range(1, p.shape[-2]):
        out.addcmul_(p[..., k, :, None], q[..., k, None, :])
    return out


def unit_columns(q: Tensor, *, fresh: Tensor) -> Tensor:
    """q [K, r, m] with columns of length 1; one of length zero is taken from `fresh`, or it would stay zero for ever."""
    length = sum_last(q.double().square())[..., None]
    return torch.where(length > 0, q.double() * length.rsqrt(), fresh.double()).float()

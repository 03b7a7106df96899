"""Adafactor over parts of tensors: each process steps a range of every flattened tensor, and sums
travel between them.

    tensor [R, C], flattened      | process 0 ......... | process 1 ............ | process 2 .... |
      rows are cut anywhere
    1  sums of g^2 by row, by column, of p^2, of its range   -> reduce: R + C + 1 numbers of each
                                                             matrix
    2  row_var, col_var: whole and equal everywhere; u^2     -> reduce: 1 number of each tensor
    3  the step of its range

A range is cut into boxes of whole rows, or parts of one, so sums and roots meet it by plain
indexing. The formula is that of pyops/ops/optimizers/adafactor.py; sums are float64. In plain
torch, in bands that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from pyops.flat import boxes_of_range
from pyops.ops.optimizers.step import round_stochastically

__all__ = ["PartRow", "TensorPart", "part_of", "step_parts"]

BAND = 1 << 17  # elements
Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TensorPart:
    """What a parameter of one dimension is: elements [start, start + its length) of a flattened
    tensor of this shape."""

    shape: tuple[int, ...]
    start: int

    @property
    def is_factored(self) -> bool:
        return len(self.shape) > 1

    @property
    def matrices(self) -> tuple[int, int, int]:
        """(number of matrices, rows, columns)."""
        rows, columns = self.shape[-2:]
        return prod(self.shape[:-2]), rows, columns


def part_of(param: Tensor) -> TensorPart | None:
    """What a parameter is a part of, its attribute `part_of`; None: it is whole."""
    return getattr(param, "part_of", None)


@dataclass
class PartRow:
    """A parameter's tensors, 1-D and contiguous but for the states, and what they are a part of."""

    part: TensorPart
    param: Tensor
    grad: Tensor
    master: Tensor | None
    copy: Tensor | None
    step: Tensor
    state: dict[str, Tensor]
    offset: int

    @property
    def stepped(self) -> Tensor:
        return self.param if self.master is None else self.master

    def bands(self) -> Iterator[tuple[slice, tuple[slice, slice, slice]]]:
        """(range of the part, where it lies as matrices, rows, columns) of boxes in order; a
        vector's is one row."""
        n = self.param.numel()
        for low in range(0, n, BAND):
            high = min(n, low + BAND)
            if not self.part.is_factored:
                yield slice(low, high), (slice(0, 1), slice(0, 1), slice(low, high))
                continue
            at, start = low, self.part.start
            for offset, size in boxes_of_range(self.part.matrices, start + low, start + high):
                matrix, row, column = (slice(o, o + k) for o, k in zip(offset, size, strict=True))
                yield slice(at, at + prod(size)), (matrix, row, column)
                at += prod(size)


def _gradient(row: PartRow, where: slice, factor: Tensor | None) -> Tensor:
    """float32, unscaled and clipped; without the sign of maximize."""
    g = row.grad[where].float()
    return g if factor is None else g * factor.to(g.device, g.dtype)


def _shape(at: tuple[slice, slice, slice]) -> list[int]:
    return [s.stop - s.start for s in at]


def _first_sums(
    rows: Sequence[PartRow], factor: Tensor | None
) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
    """All sums in one tensor; and of each row, views of it: g^2 by row [m, R], by column [m, C],
    p^2 [1]."""
    sizes = [_matrices(row) for row in rows]
    total = torch.zeros(
        sum(m * (r + c) + 1 for m, r, c in sizes), dtype=torch.float64, device=rows[0].param.device
    )
    views, start = [], 0
    for row, (m, r, c) in zip(rows, sizes, strict=True):
        of_rows = total[start : (start := start + m * r)].view(m, r)
        of_columns = total[start : (start := start + m * c)].view(m, c)
        of_param = total[start : (start := start + 1)]
        views.append((of_rows, of_columns, of_param))
        for where, (matrix, rows_, columns) in row.bands():
            of_param += row.stepped[where].double().square().sum()
            if row.part.is_factored:
                square = (
                    _gradient(row, where, factor)
                    .double()
                    .square_()
                    .view(_shape((matrix, rows_, columns)))
                )
                of_rows[matrix, rows_] += square.sum(2)
                of_columns[matrix, columns] += square.sum(1)
    return total, views


def _matrices(row: PartRow) -> tuple[int, int, int]:
    return row.part.matrices if row.part.is_factored else (0, 0, 0)


def _roots(
    row: PartRow,
    sums: tuple[Tensor, Tensor, Tensor],
    least: float,
    weight: float,
    factor: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The variances moved in place; roots [m, R, 1] and [m, 1, C] whose product is sqrt(V). A
    vector's are 1 and its own."""
    if not row.part.is_factored:
        variance = row.state["variance"]
        for where, _ in row.bands():
            square = _gradient(row, where, factor).double().square_()
            variance[where] = torch.lerp(variance[where].double(), square, weight).float()
        return torch.ones(1, 1, 1, device=variance.device), variance.sqrt().view(1, 1, -1)
    m, r, c = row.part.matrices
    row_var, col_var = row.state["row_var"].view(m, r), row.state["col_var"].view(m, c)
    row_var.copy_(torch.lerp(row_var.double(), sums[0] / c, weight))
    col_var.copy_(torch.lerp(col_var.double(), sums[1] / r, weight))
    divisor = row_var.double().mean(1, keepdim=True).clamp(min=least)
    return (row_var.double() / divisor).sqrt().float().unsqueeze(2), col_var.sqrt().unsqueeze(1)


def _update(
    row: PartRow,
    where: slice,
    at: tuple[slice, slice, slice],
    roots: tuple[Tensor, Tensor],
    least: float,
    factor: Tensor | None,
) -> Tensor:
    """u of a band, flat."""
    root = (roots[0][at[0], at[1]] * roots[1][at[0], :, at[2]]).clamp_(min=least)
    return (_gradient(row, where, factor).view(root.shape) / root).view(-1)


def _apply(row: PartRow, where: slice, value: Tensor, *, number: int, seed: int | None) -> None:
    """Store a band of the parameter's new values, rounded as the whole tensor's would be."""
    row.stepped[where] = (
        value
        if seed is None or row.master is not None or row.param.dtype == torch.float32
        else round_stochastically(
            value,
            row.param.dtype,
            seed=seed,
            step=number,
            stream=0,
            offset=row.offset + where.start,
        )
    )
    if row.master is not None:
        row.param[where] = row.master[where].to(row.param.dtype)
    if row.copy is not None:
        row.copy[where] = row.param[where].to(row.copy.dtype)


@torch.no_grad()
def step_parts(
    rows: Sequence[PartRow],
    *,
    reduce: Reduce,
    group: dict[str, Any],
    lr: float,
    factor: Tensor | None,
    zero_grads: bool,
    stochastic_rounding: bool,
) -> None:
    """One step of the parts of one launch; every process steps its parts of the same tensors, in
    one order.

    Args:
        reduce: a float64 tensor's sum over the processes.
        group: the hyper-parameters.
        factor: of the gradients.
    """
    eps1, eps2 = group["eps"]
    total, views = _first_sums(rows, factor)
    reduce(total)
    squares = torch.zeros(len(rows), dtype=torch.float64, device=total.device)
    numbers = [int(row.step) + 1 for row in rows]
    leasts = [torch.finfo(row.stepped.dtype).eps if eps1 is None else eps1 for row in rows]
    roots = []
    for i, (row, sums) in enumerate(zip(rows, views, strict=True)):
        roots.append(_roots(row, sums, leasts[i], numbers[i] ** group["beta2_decay"], factor))
        for where, at in row.bands():
            squares[i] += (
                _update(row, where, at, roots[i], leasts[i], factor).double().square_().sum()
            )
    reduce(squares)
    means = zip((float(sums[2]) for sums in views), squares.tolist(), strict=True)
    for i, (row, (squared_param, squared_update)) in enumerate(zip(rows, means, strict=True)):
        numel = max(1, prod(row.part.shape))
        excess = max(1.0, (squared_update / numel) ** 0.5 / group["d"])
        scale = max(eps2, (squared_param / numel) ** 0.5) * min(lr, numbers[i] ** -0.5) / excess
        scale = -scale if group["maximize"] else scale
        for where, at in row.bands():
            value = row.stepped[where].float() * (1.0 - lr * group["weight_decay"])
            value = value.sub_(_update(row, where, at, roots[i], leasts[i], factor), alpha=scale)
            _apply(
                row,
                where,
                value,
                number=numbers[i],
                seed=group["seed"] if stochastic_rounding else None,
            )
        row.step.add_(1)
        if zero_grads:
            row.grad.zero_()

"""Products in q steps of single blocks: SUMMA (van de Geijn and Watts, 1997), as in Optimus and
Tesseract.

    step t of  A B     A[i,t] to all of row i, B[t,j] to all of column j; C[i,j] += A[i,t] B[t,j]
               A B^T   B[t,j] to all of column j; A[i,j] B[t,j]^T summed over row i to column t
               A^T B   A[i,t] to all of row i; A[i,t]^T B[i,j] summed over column j to row t

The blocks of step t + 1, and the summands of step t - 1, travel while those of step t are
multiplied. A rank holds two blocks beside its own at a time. As many bytes come in as in the form
that gathers, in q times as many messages. Sums are in the order of t, in fp32 for 16 bits, and
rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyops.tensor_parallel.grids.grid import Grid
from pyops.tensor_parallel.grids.line import Reduction

__all__ = ["stepwise_product"]

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def stepwise_product(form: str, a: Tensor, b: Tensor, *, grid: Grid) -> Tensor:
    """This rank's block of the product, of a q x q grid, or of its layer of a d x q x q grid.

    Args:
        form: "ab", "abt" or "atb".
        a: This rank's block of A, two-dimensional.
        b: This rank's block of B.
        grid: The ranks.
    """
    if form == "ab":
        return _added(a, b, grid)
    return _reduced(form, a, b, grid)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in _SIXTEEN_BITS else x


def _added(a: Tensor, b: Tensor, grid: Grid) -> Tensor:
    row, column = grid.line("column"), grid.line("row")
    total: Tensor | None = None
    coming = row.start_broadcast(a, 0), column.start_broadcast(b, 0)
    for t in range(row.size):
        (left, left_pending), (right, right_pending) = coming
        left_pending.wait()
        right_pending.wait()
        if t + 1 < row.size:
            coming = row.start_broadcast(a, t + 1), column.start_broadcast(b, t + 1)
        part = _wide(left) @ _wide(right)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(a.dtype)


def _reduced(form: str, a: Tensor, b: Tensor, grid: Grid) -> Tensor:
    row, column = grid.line("column"), grid.line("row")
    sent, to = (column, row) if form == "abt" else (row, column)
    block = b if form == "abt" else a
    found: Tensor | None = None
    before: Reduction | None = None
    coming = sent.start_broadcast(block, 0)
    for t in range(sent.size):
        other, pending = coming
        pending.wait()
        if t + 1 < sent.size:
            coming = sent.start_broadcast(block, t + 1)
        part = _wide(a) @ _wide(other).t() if form == "abt" else _wide(other).t() @ _wide(b)
        if before is not None:
            result = before.result()
            found = found if result is None else result
        before = to.start_reduce(part, t)
    assert before is not None
    result = before.result()
    found = found if result is None else result
    assert found is not None
    return found.to(a.dtype)

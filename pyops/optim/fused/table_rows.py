"""Rows of tensors that one launch steps, gathered from a param group with every check, and
stand-ins for odd layouts.

    param | grad | the optimizer's own states ... | master | copy | step
    one row per parameter with a gradient

A tensor with gaps, one laid out otherwise than its parameter, or a view whose sign is still to be
taken is copied into a dense stand-in before the launch and copied back after it: exact, and memory
between its elements is never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyops.flat.dtensor import Spread, first_element, is_dtensor, local_of, placed_as, spread_of
from pyops.optim.fused.input_checks import is_unresolved
from pyops.optim.fused.memory_layout import is_dense, lies_like, overlapping

__all__ = [
    "GRAD",
    "PARAM",
    "Row",
    "TableRows",
    "by_spread",
    "columns_of",
    "row_of",
    "split_rows",
    "table_rows_of",
]

PARAM, GRAD = 0, 1


class Row(NamedTuple):
    """One parameter's tensors in column order, None where it has none; `place` in its group;
    `offset`: its first element's number for stochastic rounding. Of a DTensor the tensors are what
    this rank holds, `shared` is the
    parameter itself, and `spread` says over which ranks its elements are."""

    place: int
    tensors: list[Tensor | None]
    offset: int
    shared: Tensor | None = None
    spread: Spread | None = None

    @property
    def device(self) -> torch.device:
        param = self.tensors[PARAM]
        assert param is not None
        return param.device


class StandIn(NamedTuple):
    """A tensor of a column and its dense stand-in; `written`: the launch changes it, so it is
    copied back."""

    column: int
    tensor: Tensor
    stand_in: Tensor
    written: bool


class TableRows(NamedTuple):
    """Columns for one launch, and the stand-ins among them. `shared`: the DTensors whose local
    tensors are stepped; `spread`: that of every row."""

    columns: list[list[Tensor]]
    offsets: list[int]
    exchanges: list[StandIn]
    shared: list[Tensor]
    spread: Spread | None

    def load(self, *, gradients: bool) -> None:
        """Copy into the stand-ins of gradients, which the norm needs first, or into those of
        everything else, just before the launch: an earlier one may have stepped the same memory."""
        for exchange in self.exchanges:
            if (exchange.column == GRAD) == gradients:
                exchange.stand_in.copy_(exchange.tensor)

    def store(self) -> None:
        """Copy back what the launch changed."""
        for exchange in self.exchanges:
            if exchange.written:
                exchange.tensor.copy_(exchange.stand_in)


def _walkable(row: Row) -> bool:
    """Whether all of a row's tensors are dense and laid out alike."""
    tensors = [t for t in row.tensors[:-1] if t is not None]
    if any(is_unresolved(t) for t in tensors):
        return False
    if all(t.is_contiguous() for t in tensors):
        return True
    strides = tensors[PARAM].stride()
    return is_dense(tensors[PARAM]) and all(lies_like(t, strides) for t in tensors)


def columns_of(rows: Sequence[Row]) -> list[list[Tensor]]:
    """The rows' tensors by column. An empty tensor stands for none; a column that no row uses is
    empty."""
    param = rows[0].tensors[PARAM]
    assert param is not None
    absent = torch.empty(0, device=param.device)
    return [
        [absent if t is None else t for t in column] if any(t is not None for t in column) else []
        for column in zip(*(row.tensors for row in rows), strict=True)
    ]


def table_rows_of(rows: Sequence[Row], *, zero_grads: bool) -> TableRows:
    """Columns of the rows, with stand-ins where a row needs them."""
    exchanges: list[StandIn] = []
    ready: list[Row] = []
    for row in rows:
        param, tensors = row.tensors[PARAM], list(row.tensors)
        assert param is not None
        strides = param.stride() if is_dense(param) else torch.empty_like(param).stride()
        for column, tensor in enumerate(tensors[:-1]):
            if tensor is not None and (
                is_unresolved(tensor) or not (is_dense(tensor) and lies_like(tensor, strides))
            ):
                stand_in = torch.empty_strided(
                    tuple(param.shape), strides, dtype=tensor.dtype, device=tensor.device
                )
                exchanges.append(StandIn(column, tensor, stand_in, column != GRAD or zero_grads))
                tensors[column] = stand_in
        ready.append(row._replace(tensors=tensors))
    shared = [row.shared for row in rows if row.shared is not None]
    return TableRows(
        columns_of(ready), [row.offset for row in rows], exchanges, shared, rows[0].spread
    )


def row_of(place: int, tensors: list[Tensor | None], offset: int | None) -> Row:
    """A row of these tensors; of a DTensor, what this rank holds of each. A gradient that lies
    otherwise than its parameter is brought here first.

    Args:
        offset: None where nobody asks for the numbers of elements.
    """
    param, grad = tensors[PARAM], tensors[GRAD]
    if not is_dtensor(param):
        return Row(place, tensors, offset or 0)
    assert param is not None
    assert grad is not None
    local = [None if t is None else local_of(t) for t in tensors]
    local[GRAD] = placed_as(grad, param)
    first = 0 if offset is None else offset + (first_element(param) or 0)
    return Row(place, local, first, param, spread_of(param))


def by_spread(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows in lists of one spread each, in the order in which these come up."""
    found: dict[Spread | None, list[Row]] = {}
    for row in rows:
        found.setdefault(row.spread, []).append(row)
    return list(found.values())


def split_rows(rows: Sequence[Row]) -> tuple[list[Row], list[list[Row]]]:
    """Rows of one device that a table may hold, and the others in lists that must be launched one
    after the other.

    Parameters that share memory are stepped in their order, each alone, as torch does.
    """
    params = [row.tensors[PARAM] for row in rows]
    shared = overlapping([p for p in params if p is not None])
    fast = [row for i, row in enumerate(rows) if i not in shared and _walkable(row)]
    taken = {row.place for row in fast}
    together = [row for i, row in enumerate(rows) if i not in shared and row.place not in taken]
    alone = [[row] for i, row in enumerate(rows) if i in shared]
    return fast, ([together] if together else []) + alone

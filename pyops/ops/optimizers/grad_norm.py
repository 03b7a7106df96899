"""The squared norm of a list of tensors and its count of non-finite elements, in one pass: 4 bytes
read per fp32 element.

Sums are float64 and in a fixed order, so the result has the same bits for any number of threads.
The norm itself, and any sum over ranks, is the caller's: squared norms of shards add up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyops.ops.library import define
from pyops.ops.optimizers.table import COLUMNS, GRAD, hidden_operands, row_problem, tensor_at

__all__ = [
    "CLIP_EPSILON",
    "squared_norm",
    "squared_norm_from_table",
    "squared_norm_from_table_reference",
    "squared_norm_reference",
]

CLIP_EPSILON = 1e-6
"""Added to a norm before gradients are divided by it, as torch.nn.utils.clip_grad_norm_ does."""


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """float64 [2] on the tensors' device: the sum of squares of all elements, and how many are inf
    or nan.

    Tensors are of fp32, bf16 or fp16, each non-overlapping and dense. An inf or nan makes the sum
    inf or nan. An empty list raises ValueError, because it names no device.
    """
    if not tensors:
        raise ValueError("squared_norm needs at least one tensor, got an empty list")
    result: Tensor = torch.ops.pyops.squared_norm.default(list(tensors))
    return result


def squared_norm_from_table(table: Tensor) -> Tensor:
    """`squared_norm` of the gradients in a table made by `optimizer_table`, for one call per step
    whatever their number."""
    result: Tensor = torch.ops.pyops.squared_norm_from_table.default(table)
    return result


def squared_norm_reference(tensors: Sequence[Tensor]) -> Tensor:
    """The meaning of `squared_norm` in plain torch, up to the order of the float64 sum."""
    if not tensors:
        raise ValueError("squared_norm needs at least one tensor, got an empty list")
    for i, t in enumerate(tensors):
        if (problem := row_problem("tensors", i, t, t)) is not None:
            raise ValueError(problem)
    squares = torch.stack([t.detach().double().square().sum() for t in tensors]).sum()
    nonfinite = torch.stack([(~t.detach().isfinite()).sum() for t in tensors]).sum()
    return torch.stack([squares, nonfinite.double()])


def squared_norm_from_table_reference(table: Tensor) -> Tensor:
    """The meaning of `squared_norm_from_table` in plain torch; CPU tables only."""
    if table.dim() != 2 or table.shape[1] != COLUMNS:
        raise ValueError(
            f"table must be [n, {COLUMNS}], made by optimizer_table; got {tuple(table.shape)}"
        )
    gradients = [g for row in table.tolist() if (g := tensor_at(row, GRAD)) is not None]
    return (
        squared_norm_reference(gradients)
        if gradients
        else torch.zeros(2, dtype=torch.float64, device="cpu")
    )


def _fake(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty(2, dtype=torch.float64)


define("squared_norm(Tensor[] tensors) -> Tensor", reference=squared_norm_reference, fake=_fake)
define(
    "squared_norm_from_table(Tensor table) -> Tensor",
    reference=squared_norm_from_table_reference,
    fake=hidden_operands("squared_norm_from_table", "squared_norm"),
)

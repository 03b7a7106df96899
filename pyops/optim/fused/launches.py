"""What one step launches: for each group, a table that a plan keeps or lists of tensors, and the
norm of their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyops.flat.dtensor import Spread, spread_of
from pyops.ops.optimizers.grad_norm import squared_norm, squared_norm_from_table
from pyops.optim.fused.table_plan import TablePlan
from pyops.optim.fused.table_rows import GRAD, PARAM, TableRows

__all__ = ["Launch", "device_of", "spread_of_work", "squared_norms"]

Launch = tuple[dict[str, Any], TablePlan | TableRows]


def device_of(work: TablePlan | TableRows) -> torch.device:
    if isinstance(work, TableRows):
        return work.columns[PARAM][0].device
    assert work.table is not None
    return work.table.device


def spread_of_work(work: object) -> Spread | None:
    """Over which ranks the elements of every row are; None where this rank has them all."""
    return work.spread if isinstance(work, TableRows) else None


def _squared_norm_of(work: TablePlan | TableRows) -> Tensor:
    if isinstance(work, TableRows):
        return squared_norm(work.columns[GRAD])
    assert work.table is not None
    return squared_norm_from_table(work.table)


def squared_norms(
    launches: Sequence[Launch], unplanned: Iterable[Tensor], device: torch.device
) -> list[Tensor]:
    """Squared norms of the launches' gradients, those of DTensors summed over the ranks that hold
    the other parts.

    Args:
        unplanned: the parameters of groups without a plan, with or without a gradient here: the
            other ranks may wait for a sum.
    """
    found: list[Tensor] = []
    parts: dict[Spread, list[Tensor]] = {}
    # a loop, which torch.compile of torch 2.13 follows where a comprehension names what it tests
    for param in unplanned:
        spread = spread_of(param)
        if spread is not None:
            parts.setdefault(spread, [])
    for _, work in launches:
        spread = spread_of_work(work)
        (found if spread is None else parts[spread]).append(_squared_norm_of(work))
    for spread, here in parts.items():
        mine = torch.zeros(2, dtype=torch.float64, device=device)
        for squared in here:
            mine = mine + squared.to(device)
        found.append(spread.sum_(mine))
    return found

"""What the layer-wise optimizers share: rows taken one by one, and the squared norms between their
two passes.

first pass -> norms, float64 [rows, 2]: squared norm of the parameter, and of the update or the
gradient
              [a caller whose rows are shards sums them over its processes here]
second pass -> the parameter, moved by the rate of its row
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pyops.ops.optimizers.step import Tensors
from pyops.ops.optimizers.table import PARAM, STEP, table_of

__all__ = [
    "BOTH",
    "FIRST_PASS",
    "SECOND_PASS",
    "check_layers",
    "is_skipped",
    "primary",
    "reference_rows",
    "squared",
]

FIRST_PASS, SECOND_PASS, BOTH = 1, 2, 3


def check_layers(
    lists: Sequence[Tensors],
    norms: Tensor,
    passes: int,
    *,
    offsets: Sequence[int],
    required: Sequence[int],
) -> None:
    """Raise ValueError unless the lists make a table, `norms` is a float64 [rows, 2] and `passes`
    one of 1, 2, 3."""
    table_of(lists, offsets, required)
    rows = len(lists[PARAM])
    if norms.dtype != torch.float64 or norms.shape != (rows, 2) or not norms.is_contiguous():
        raise ValueError(
            f"norms must be a contiguous float64 [{rows}, 2], got {norms.dtype} "
            f"{tuple(norms.shape)}"
        )
    if passes not in (FIRST_PASS, SECOND_PASS, BOTH):
        raise ValueError(f"passes must be 1 (norms), 2 (apply) or 3 (both), got {passes}")


def reference_rows(
    lists: Sequence[Tensors], *, passes: int, found_inf: Tensor | None
) -> Iterator[tuple[int, list[list[Tensor]]]]:
    """Yields (row, the lists of that row alone) for every row; a list without tensors stays so.

    Each row has a copy of its step, because rows that follow each other may be layers of one
    parameter, which share one. After the last row the second pass counts each step once.
    """
    steps = lists[STEP]
    own = [*lists[:STEP], [step.clone() for step in steps]]
    for i in range(len(lists[PARAM])):
        yield i, [[column[i]] if column else [] for column in own]
    if passes & SECOND_PASS and not is_skipped(found_inf):
        for i, step in enumerate(steps):
            if i == 0 or step.data_ptr() != steps[i - 1].data_ptr():
                step.add_(1)


def is_skipped(found_inf: Tensor | None) -> bool:
    """Whether the step is skipped, because a gradient holds an inf or a nan."""
    return found_inf is not None and bool(found_inf.item())


def primary(params: Tensors, masters: Tensors, i: int) -> Tensor:
    """What a row's step is computed on: its master where it has one."""
    return masters[i] if masters and masters[i].numel() else params[i]


def squared(t: Tensor) -> Tensor:
    """The sum of squares, in float64."""
    return t.double().square().sum()

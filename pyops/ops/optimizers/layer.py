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

__all__ = [
    "BOTH", "FIRST_PASS", "SECOND_PASS", "check_norms", "count_steps", "each_row", "is_skipped", "primary", "squared",
    "take_steps",
]  # fmt: skip

FIRST_PASS, SECOND_PASS, BOTH = 1, 2, 3


def check_norms(norms: Tensor, rows: int, passes: int) -> None:
    """Raise ValueError unless `norms` is a float64 [rows, 2] and `passes` one of 1, 2, 3."""
    if norms.dtype != torch.float64 or norms.shape != (rows, 2) or not norms.is_contiguous():
        raise ValueError(
            f"norms must be a contiguous float64 [{rows}, 2], got {norms.dtype} "
            f"{tuple(norms.shape)}"
        )
    if passes not in (FIRST_PASS, SECOND_PASS, BOTH):
        raise ValueError(f"passes must be 1 (norms), 2 (apply) or 3 (both), got {passes}")


def each_row(lists: Sequence[Tensors]) -> Iterator[tuple[int, list[list[Tensor]]]]:
    """(row, the lists of that row alone) for every row; a list without tensors stays so."""
    for i in range(len(lists[0])):
        yield i, [[column[i]] if column else [] for column in lists]


def take_steps(steps: Tensors) -> list[Tensor]:
    """A step of its own for each row; rows that follow each other may be layers of one parameter,
    which share one."""
    return [step.clone() for step in steps]


def count_steps(steps: Tensors) -> None:
    """Count each step once."""
    for i, step in enumerate(steps):
        if i == 0 or step.data_ptr() != steps[i - 1].data_ptr():
            step.add_(1)


def is_skipped(found_inf: Tensor | None) -> bool:
    return found_inf is not None and bool(found_inf.item())


def primary(params: Tensors, masters: Tensors, i: int) -> Tensor:
    """What a row's step is computed on: its master where it has one."""
    return masters[i] if masters and masters[i].numel() else params[i]


def squared(t: Tensor) -> Tensor:
    return t.double().square().sum()

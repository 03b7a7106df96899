"""Portion: a replica's part of a batch, filled up so that each step has as many rows, in micro-batches of one size; and Step.

share of 5 samples, 4 micro-batches      7 2 | 9 0 | 4 - | - -        -: sample -1, a row that counts nothing
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Portion", "Step", "portion_of"]


@dataclass(frozen=True)
class Portion:
    """samples: int64 [n], -1 where it is filled up. first_row: its first row in the batch; batch: rows of all replicas. step:
    how many batches there were before. micro_rows: rows of each micro-batch."""

    samples: Tensor
    first_row: int
    batch: int
    epoch: int
    step: int
    micro_rows: int


@dataclass(frozen=True)
class Step:
    """loss: the mean over the terms of the batch of all replicas. grad_norm: before clipping; nan where it was not finite, and
    nothing changed. flagged: some rank had set its flag."""

    loss: float
    grad_norm: float
    flagged: bool = False


def portion_of(
    samples: Tensor, *, most: int, micro_batches: int, first_row: int, batch: int, epoch: int, step: int
) -> Portion:  # fmt: skip
    """The portion of these samples. most: how many a replica may have."""
    rows = -(-most // micro_batches)
    padded = torch.full((rows * micro_batches,), -1, dtype=torch.int64, device="cpu")
    padded[: len(samples)] = samples
    return Portion(padded, first_row, batch, epoch, step, rows)

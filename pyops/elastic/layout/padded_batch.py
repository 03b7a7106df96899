"""PaddedBatch: a replica's part of a batch, filled up so that each step has as many rows, in
micro-batches of one size; and Step.

share of 5 samples, 4 micro-batches   7 2 | 9 0 | 4 - | - -   -: sample PADDING, a row that counts
                                                              nothing

PADDING is no index of anything: a list, an array or a tensor of rows raises IndexError for it,
where -1 would be its last row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PADDING", "PaddedBatch", "Step", "indices_of", "padded_batch"]

# Beyond the rows of any data set, and still so times the length of a sequence, or as int32.
PADDING = 999_999_999_999


@dataclass(frozen=True)
class PaddedBatch:
    """A replica's part of a batch, filled up to micro-batches of one size."""

    samples: Tensor
    """int64 [n], PADDING where it is filled up: see `indices_of`."""

    first_row: int
    """The first of these rows in the batch."""

    batch: int
    """Rows of all replicas."""

    epoch: int
    """To which the batch belongs."""

    step: int
    """How many batches there were before."""

    micro_rows: int
    """Rows of each micro-batch."""


@dataclass(frozen=True)
class Step:
    """What a step of all replicas gave."""

    loss: float
    """The mean over the terms of the batch of all replicas."""

    grad_norm: float
    """Before clipping; nan where it was not finite, and nothing changed."""

    flagged: bool = False
    """Whether some rank had set its flag."""


def indices_of(samples: Tensor) -> tuple[Tensor, Tensor]:
    """(indices, padding) of samples int64 [n], as a PaddedBatch has them: `rows[indices]` has a row
    for
    each, and padding bool [n] says which of them count nothing: there the index is 0, and the
    target has to be one that the loss leaves out, such as `labels[indices].masked_fill(padding,
    -100)`.

    Raises:
        ValueError: For a number below 0, which no sample has.
    """
    padding = samples == PADDING
    if len(samples) and int(samples.min()) < 0:
        raise ValueError(
            f"a sample is numbered {int(samples.min())}; samples are numbered from 0, "
            "and rows that only fill up a batch "
            "pyops.elastic.PADDING"
        )
    return samples.masked_fill(padding, 0), padding


def padded_batch(
    samples: Tensor,
    *,
    most: int,
    micro_batches: int,
    first_row: int,
    batch: int,
    epoch: int,
    step: int,
) -> PaddedBatch:
    """The portion of these samples.

    Args:
        most: How many a replica may have.
    """
    rows = -(-most // micro_batches)
    padded = torch.full((rows * micro_batches,), PADDING, dtype=torch.int64, device="cpu")
    padded[: len(samples)] = samples
    return PaddedBatch(padded, first_row, batch, epoch, step, rows)

"""The sum of ranks over symmetric memory: one kernel that waits for the ranks, adds their rows in
the order of ranks, and stores the sum here or into every rank's memory.

    one shot         rows: all that each rank has     outs: one, of this rank
    reduce-scatter   rows: this rank's part of each   outs: one, of this rank
    two shots        rows: this rank's part of each   outs: this part of every rank's memory

fp32 inside, rounded once: the bits of `sum_rows_`. How ranks meet is said in
csrc/cuda/communication/symmetric_meeting.cuh. On the CPU there is no symmetric memory: the rows are
those of one process there, and nobody is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyops.ops.communication.reduce import sum_rows_reference
from pyops.ops.library import build_info, define, library
from pyops.ops.memory import check_memory

__all__ = [
    "MAX_CTAS",
    "MAX_RANKS",
    "PAD_WORDS",
    "Peers",
    "symmetric_sum_",
    "symmetric_sum_reference",
]

MAX_RANKS = 32
MAX_CTAS = 64
PAD_WORDS = 8192
"""int64 numbers of a pad, which is 0 before the ranks first meet, with room:
csrc/cuda/communication/symmetric_meeting.cuh."""


@dataclass(frozen=True)
class Peers:
    """The ranks that meet within a kernel."""

    pads: Sequence[Tensor]
    """Each rank's pad, int64 [PAD_WORDS] in symmetric memory, in the order of ranks."""

    failure: Tensor
    """int32 [1] in pinned memory: 1 + the number of a rank that was lost, 0 for none."""

    rank: int
    """This one's number."""

    timeout: float
    """Seconds that a rank may be late."""


def symmetric_sum_(
    whole: Tensor,
    outs: Sequence[Tensor],
    rows: Sequence[Tensor],
    peers: Peers,
    *,
    ctas: int,
    scale: float = 1.0,
    norm: Tensor | None = None,
) -> None:
    """outs = round(scale * ((rows[0] + rows[1]) + ...)). Collective: a kernel that waits for those
    of the other ranks. Launches that share pads must not overlap.

    Args:
        whole: All of this rank's result, of which the outs are a part or which other ranks fill;
            nan once a rank was lost.
        outs: One tensor, or one in each rank's memory; of the rows' dtype or fp32, of their size.
        rows: One of each rank; fp32, bf16 or fp16.
        peers: The ranks.
        ctas: How many CTAs wait for one another, 1 to MAX_CTAS; the same on all ranks.
        scale: Rounded to fp32.
        norm: float64 [2] for the sum of squares of the outs and the count of those that are inf or
            nan; with several outs of all ranks' together.
    """
    torch.ops.pyops.symmetric_sum_.default(
        whole,
        list(outs),
        list(rows),
        list(peers.pads),
        peers.failure,
        norm,
        rank=peers.rank,
        ctas=ctas,
        scale=scale,
        timeout_ns=round(peers.timeout * 1e9),
    )


def symmetric_sum_reference(
    whole: Tensor,
    outs: Sequence[Tensor],
    rows: Sequence[Tensor],
    pads: Sequence[Tensor],
    failure: Tensor,
    norm: Tensor | None,
    *,
    rank: int,
    ctas: int,
    scale: float = 1.0,
    timeout_ns: int = 0,
) -> None:
    """The meaning of `symmetric_sum_` in plain torch, bit for bit, for rows that are there already;
    the norm is this rank's."""
    if len(pads) != len(rows) or not 0 <= rank < len(rows) or len(outs) not in (1, len(rows)):
        raise ValueError(
            f"{len(rows)} rows, {len(pads)} pads, {len(outs)} outs of rank {rank}: give one row "
            "and one pad for each rank, and one out or as many"
        )
    if norm is not None and (norm.dtype != torch.float64 or norm.shape != (2,)):
        raise ValueError(
            f"symmetric_sum_: norm must be float64 [2]; got {norm.dtype} {list(norm.shape)}"
        )
    total = torch.empty_like(outs[0])
    sum_rows_reference(total, rows, scale=scale)
    for out in outs:
        out.copy_(total)
    if norm is not None:
        norm[0] = total.double().square().sum()
        norm[1] = (~total.isfinite()).sum()


def _fake(
    whole: Tensor,
    outs: Sequence[Tensor],
    rows: Sequence[Tensor],
    pads: Sequence[Tensor],
    failure: Tensor,
    norm: Tensor | None,
    *,
    rank: int,
    ctas: int,
    scale: float = 1.0,
    timeout_ns: int = 0,
) -> None:
    return None


define(
    "symmetric_sum_(Tensor(a!) whole, Tensor(b!)[] outs, Tensor[] rows, Tensor(c!)[] pads, "
    "Tensor(d!) failure, Tensor(e!)? norm, *, int rank, int ctas, float scale=1.0, "
    "int timeout_ns) -> ()",
    reference=symmetric_sum_reference,
    fake=_fake,
)
if build_info()["extension"]:  # no kernel for the CPU, whose ranks share memory in another way
    library.impl("symmetric_sum_", check_memory("symmetric_sum_", symmetric_sum_reference), "CPU")

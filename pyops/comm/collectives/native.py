"""The backend's own collectives, with as few calls and copies as they allow.

equal parts     one call of the form that takes one tensor: nothing is padded, nothing copied
unequal parts   the same call with every part as long as the longest one, and one copy
mean            NCCL's own average of floats, which scales before it adds: a sum of fp16 may
                overflow where the mean does not, and a pass over the tensor is saved
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.collectives.arithmetic import scale_in_place
from pyops.comm.failure import PeerError

if TYPE_CHECKING:
    from pyops.comm.collectives.communicator import Communicator

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def all_reduce(comm: Communicator, flat: Tensor, *, scale: float) -> None:
    """flat = scale * (the sum over ranks), in place.

    Args:
        scale: 1, or one over the number of ranks.
    """
    op, after = _op(comm, flat, scale)
    _call(lambda: dist.all_reduce(flat, op=op, group=comm.group))
    scale_in_place(flat, scale=after)


def reduce_scatter(
    comm: Communicator, flat: Tensor, out: Tensor, *, starts: list[int], scale: float
) -> None:
    """out = scale * (the sum over ranks of this rank's part of `flat`).

    Args:
        starts: where the ranks' parts begin, and the end of the last one.
        scale: 1, or one over the number of ranks.
    """
    op, after = _op(comm, flat, scale)
    longest = _longest(starts)
    if longest * comm.size == starts[-1]:
        mine = out
        sent = flat
    else:
        mine, sent = flat.new_empty(longest), flat.new_zeros(longest * comm.size)
        for row, (a, b) in zip(
            sent.view(comm.size, longest), itertools.pairwise(starts), strict=True
        ):
            row[: b - a].copy_(flat[a:b])
    _call(lambda: dist.reduce_scatter_tensor(mine, sent, op=op, group=comm.group))
    if mine is not out:
        out.copy_(mine[: len(out)])
    scale_in_place(out, scale=after)


def all_gather(comm: Communicator, x: Tensor, out: Tensor, *, starts: list[int]) -> None:
    """out = the ranks' `x`, one after the other.

    Args:
        starts: where the ranks' parts begin in `out`, and the end of the last one.
    """
    longest = _longest(starts)
    if longest * comm.size == starts[-1]:
        _call(lambda: dist.all_gather_into_tensor(out, x, group=comm.group))
        return
    sent, padded = x.new_zeros(longest), x.new_empty((comm.size, longest))
    sent[: len(x)].copy_(x)
    _call(lambda: dist.all_gather_into_tensor(padded.view(-1), sent, group=comm.group))
    parts = [row[: b - a] for row, (a, b) in zip(padded, itertools.pairwise(starts), strict=True)]
    torch.cat(parts, out=out)


def _longest(starts: list[int]) -> int:
    return max(b - a for a, b in itertools.pairwise(starts))


def _op(comm: Communicator, x: Tensor, scale: float) -> tuple[Any, float]:
    """The reduction to ask the backend for, and the scale that is left for afterwards."""
    mean = scale != 1.0 and scale == 1.0 / comm.size
    if mean and x.is_floating_point() and comm.backend(x.device) == "nccl":
        return dist.ReduceOp.AVG, 1.0
    return dist.ReduceOp.SUM, scale


def _call(function: Callable[[], Any]) -> None:
    try:
        function()
    except RuntimeError as error:
        raise PeerError(-1, error) from error

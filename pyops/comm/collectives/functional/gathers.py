"""The gathering collective: any dtype, any size, any strides, one result on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyops.comm.collectives import native, ring, two_shot
from pyops.comm.collectives.arithmetic import row_starts
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional.call_options import CallDetails, CallOptions
from pyops.comm.collectives.functional.operands import (
    SEGMENT_BYTES,
    check_operand,
    check_out,
    width_of_row,
)
from pyops.comm.collectives.functional.sums import reduce_flat
from pyops.mesh import ProcessGroupLike

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["all_gather", "gather_bytes"]


def all_gather(
    tensor: Tensor,
    *,
    group: ProcessGroupLike = None,
    length: int | None = None,
    algorithm: str = "auto",
    async_op: bool = False,
    out: Tensor | None = None,
    **details: Unpack[CallDetails],
) -> Any:
    """The ranks' tensors, one after the other along dim 0, on every rank. Collective: every rank
    must call it.

    Args:
        tensor: [rows, ...] of any dtype; one without dims counts as one row.
        group: as for `all_reduce`.
        length: rows of the result, where the ranks' parts are those of torch.tensor_split (as
            `reduce_scatter` makes them); None: every rank gives equally many rows.
        algorithm: as for `all_reduce`.
        async_op: return a Work at once.
        out: where the result goes, contiguous; `tensor` may be this rank's own part of it.
        details: `CallOptions`: label, segment_bytes, communicator.

    Returns:
        `out`, or a new tensor; a Work when `async_op`, whose `wait()` returns it.

    Raises:
        ValueError: another algorithm, or this rank's rows are not those of `length`.
    """
    options = CallOptions.of("all_gather", **details)
    comm = options.communicator or Communicator.of(group)
    segment = check_operand(tensor, algorithm, options.segment_bytes, written=False)
    mine = tensor if tensor.dim() else tensor.reshape(1)
    if length is not None and length < 0:
        raise ValueError(
            f"length is {length}; give the rows of the result, 0 or more, or None where "
            "all ranks have equally many"
        )
    rows = row_starts(len(mine) * comm.size if length is None else length, comm.size)
    if len(mine) != rows[comm.rank + 1] - rows[comm.rank]:
        raise ValueError(
            f"rank {comm.rank} gives {len(mine)} rows, but its part of length={length} "
            f"over {comm.size} ranks is "
            f"{rows[comm.rank + 1] - rows[comm.rank]} rows"
        )
    staged = tensor.is_cuda and comm.size > 1 and comm.backend(tensor.device) == "gloo"
    shape = (rows[-1], *mine.shape[1:])
    check_out(out, tensor, shape)

    def call(spins: int) -> Tensor:
        x = mine.detach().contiguous().resolve_conj().resolve_neg().view(-1).view(torch.uint8)
        x = x.cpu() if staged else x
        width = mine[:1].numel() * mine.element_size() if len(mine) else width_of_row(mine)
        starts = [row * width for row in rows]
        whole = (
            x.new_empty(starts[-1])
            if out is None or staged
            else out.detach().view(-1).view(torch.uint8)
        )
        _all_gather(comm, x, whole, starts, algorithm, segment, spins)
        result = whole.view(tensor.dtype).view(shape)
        return out.copy_(result) if out is not None and staged else result.to(tensor.device)

    what = (
        f"all_gather{options.of_label} ({tensor.numel()} elements of {tensor.dtype}, {algorithm})"
    )
    with torch.no_grad():
        return comm.run(
            call, what=what, tensor=tensor, async_op=async_op, direct=tensor.is_cuda and not staged
        )


def _all_gather(
    comm: Communicator,
    x: Tensor,
    out: Tensor,
    starts: list[int],
    algorithm: str,
    segment: int,
    spins: int,
) -> None:
    if comm.size == 1:
        out.copy_(x)
        return
    chosen = comm.choose(
        algorithm,
        x,
        runners=lambda name: lambda y: reduce_flat(comm, y, 1.0, name, segment, 0, spins),
    )
    chosen = "native" if chosen == "symmetric" else chosen  # nothing is added
    if chosen in ("shared_memory", "native"):
        comm.count((comm.size - 1) * x.numel() * x.element_size())
    if chosen == "shared_memory":
        comm.shared_memory().all_gather(x, out, starts=starts, spins=spins)
    elif chosen == "native":
        native.all_gather(comm, x, out, starts=starts)
    else:
        if not x.is_cuda:
            comm.agree(
                "all_gather", numel=starts[-1], dtype=x.dtype, details=(chosen, segment, starts)
            )
        function = ring.all_gather if chosen == "ring" else two_shot.all_gather
        function(x, out, starts=starts, transport=comm.transport, segment=segment)


def gather_bytes(
    comm: Communicator, x: Tensor, out: Tensor, starts: list[int], *, spins: int
) -> None:
    """`all_gather` of flat uint8 tensors into `out`, cut at `starts`, for a call that `comm` is
    running already."""
    _all_gather(comm, x, out, starts, "auto", SEGMENT_BYTES, spins)

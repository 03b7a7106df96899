"""Collectives that send a codec's payloads in place of numbers: what a slow link needs.

    from pyops.comm import Communicator, ErrorFeedback, OneBit
    error = ErrorFeedback(gradient.numel(), codec=OneBit(), communicator=Communicator.of(group))
    compressed_all_reduce(gradient, codec=OneBit(), error=error, group=group)
    # in place: nearly the mean

Two exchanges, each once per segment, whatever the number of tensors and ranks; see
compressed_shots.py. All ranks decode the same bytes, so the result has the same bits everywhere.
What a payload leaves out is kept in `error` and added the next time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.collectives.arithmetic import row_starts
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional.call_options import CallDetails, CallOptions
from pyops.comm.compression import compressed_shots as shots
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.compressed.between_nodes import all_reduce_between_nodes
from pyops.comm.compression.compressed.call import (
    agree_on,
    communicator_of,
    flat_view,
    memory_of,
    payload_transport,
    run_call,
    segment_of,
)
from pyops.comm.compression.error_feedback import ErrorFeedback
from pyops.comm.compression.refusal import (
    check_error,
    check_length,
    check_tensor,
    mistake_of,
    refuse,
)
from pyops.mesh import ProcessGroupLike
from pyops.protocols import CollectiveCodec

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["compressed_all_gather", "compressed_all_reduce", "compressed_reduce_scatter"]


def compressed_all_reduce(
    tensor: Tensor,
    *,
    codec: Codec,
    error: ErrorFeedback | None = None,
    group: ProcessGroupLike = None,
    op: str = "mean",
    within: dist.ProcessGroup | None = None,
    async_op: bool = False,
    **details: Unpack[CallDetails],
) -> Any:
    """Replace `tensor` by its mean, or sum, over the ranks, as `codec` writes it, in place.
    Collective: every rank must call it.

    A number that is not finite on any rank makes its block nan on every rank and sets
    `error.overflowed` where it was met: on the rank that had it and on the one that owns the block.
    The errors of the block stay there as they were.

    Args:
        tensor: fp32, bf16 or fp16, of any shape, of one size on all ranks.
        codec: how numbers are written; the same on all ranks.
        error: what earlier calls left out, for a tensor of this size (with `within`, for this
            rank's part of it). None: nothing is remembered, and what is left out is lost.
        group: the ranks; None for the default group (one process where torch.distributed is not
            initialized), pyops.mesh.ALONE for this process alone, whose tensor is written and read,
            twice.
        op: "mean" or "sum".
        within: the process group of this node. The sum within a node is exact; compressed numbers
            go only between nodes, in `group`, which holds the ranks that have this rank's place in
            their nodes. Nodes must have equally many ranks.
        async_op: return a Work at once.
        details: `CallOptions`: label, segment_bytes (4 MiB by default), communicator.

    Returns:
        `tensor`, or a Work when `async_op`, whose `wait()` returns it.

    Raises:
        TypeError: a tensor of integers, or of another dtype; what is no tensor, codec or
            ErrorFeedback.
        ValueError: an `error` of another size, codec or rank.
        DisagreementError: another codec, size, dtype, op, segment or collective on some rank; or,
            on the ranks that made no mistake, what another rank raises.

    On the CPU all ranks raise, nothing is changed, and the group is as good as before; with
    async_op the error comes from wait(). On CUDA without Gloo each rank raises for itself.
    """
    options = CallOptions.of("compressed_all_reduce", **details)
    comm = communicator_of(group, options)
    if within is not None:
        return all_reduce_between_nodes(
            tensor, codec, error, comm, Communicator.of(within), op, async_op, options
        )

    def check() -> None:
        check_tensor(tensor, codec, op=op, segment_bytes=options.segment_bytes)
        check_error(error, codec, x=tensor, numel=tensor.numel(), comm=comm)

    what = f"compressed_all_reduce{options.of_label}"
    if mistake := mistake_of(check):
        return refuse(mistake, comm, what=what, tensor=tensor, async_op=async_op)
    scale = 1.0 / (comm.size if comm is not None else 1) if op == "mean" else 1.0
    segment = segment_of(options)

    def call(spins: int) -> Tensor:
        flat, copied = flat_view(tensor)
        agree_on(comm, "compressed_all_reduce", flat, (codec.name, scale, segment))
        transport, memory = payload_transport(comm, tensor), memory_of(error, codec, comm)
        if isinstance(codec, CollectiveCodec):
            codec.all_reduce(flat, error=error, transport=transport, scale=scale)
        else:
            shots.all_reduce(
                flat, codec=codec, transport=transport, segment=segment, memory=memory, scale=scale
            )
        if copied:
            tensor.copy_(flat.view(tensor.shape))
        return tensor

    return run_call(comm, call, what, tensor, codec, async_op)


def compressed_reduce_scatter(
    tensor: Tensor,
    *,
    codec: Codec,
    error: ErrorFeedback | None = None,
    group: ProcessGroupLike = None,
    op: str = "mean",
    async_op: bool = False,
    **details: Unpack[CallDetails],
) -> Any:
    """This rank's part of the mean, or sum, over the ranks of what they wrote of `tensor`.
    Collective: every rank must call it. Numbers are written once: the parts are summed in fp32 by
    their owner and rounded to tensor.dtype.

    Args:
        tensor: [N, ...], left as it is; cut along dim 0 as torch.tensor_split(tensor, ranks) does.
        codec: as for `compressed_all_reduce`, but one that writes pieces.
        error: for a tensor of this size; only `error.worker` is used.
        group: as for `compressed_all_reduce`.
        op: "mean" or "sum".
        async_op: return a Work at once.
        details: `CallOptions`: label, segment_bytes, communicator.

    Returns:
        A new tensor; a Work when `async_op`, whose `wait()` returns it.

    Raises:
        ValueError: a tensor without dims; the rest as for `compressed_all_reduce`.
    """
    options = CallOptions.of("compressed_reduce_scatter", **details)
    comm = communicator_of(group, options)
    size, rank = (comm.size, comm.rank) if comm is not None else (1, 0)

    def check() -> None:
        check_tensor(tensor, codec, op=op, segment_bytes=options.segment_bytes, in_pieces=True)
        if tensor.dim() == 0:
            raise ValueError(
                "compressed_reduce_scatter cuts dim 0, but the tensor has no dims; use "
                "tensor.reshape(1)"
            )
        check_error(error, codec, x=tensor, numel=tensor.numel(), comm=comm)

    what = f"compressed_reduce_scatter{options.of_label}"
    if mistake := mistake_of(check):
        return refuse(mistake, comm, what=what, tensor=tensor, async_op=async_op)
    rows = row_starts(len(tensor), size)
    scale = 1.0 / size if op == "mean" else 1.0
    segment = segment_of(options)

    def call(spins: int) -> Tensor:
        flat, _ = flat_view(tensor)
        width = flat.numel() // len(tensor) if len(tensor) else 0
        starts = [row * width for row in rows]
        out = flat.new_empty(starts[rank + 1] - starts[rank])
        agree_on(comm, "compressed_reduce_scatter", flat, (codec.name, scale, segment, starts))
        shots.reduce_scatter(
            flat,
            out,
            starts=starts,
            codec=codec,
            transport=payload_transport(comm, tensor),
            segment=segment,
            memory=memory_of(error, codec, comm),
            scale=scale,
        )
        return out.view(rows[rank + 1] - rows[rank], *tensor.shape[1:])

    return run_call(comm, call, what, tensor, codec, async_op)


def compressed_all_gather(
    tensor: Tensor,
    *,
    codec: Codec,
    length: int | None = None,
    error: ErrorFeedback | None = None,
    group: ProcessGroupLike = None,
    async_op: bool = False,
    **details: Unpack[CallDetails],
) -> Any:
    """The ranks' tensors as their payloads say them, one after the other along dim 0, with the same
    bits on every rank. Collective: every rank must call it.

    Args:
        tensor: [rows, ...], fp32, bf16 or fp16.
        codec: as for `compressed_all_reduce`, but one that writes pieces.
        length: rows of the result, where the ranks' parts are those of torch.tensor_split; None:
            every rank gives equally many.
        error: for a tensor of this rank's size; only `error.worker` is used.
        group: as for `compressed_all_reduce`.
        async_op: return a Work at once.
        details: `CallOptions`: label, segment_bytes, communicator.

    Returns:
        A new tensor; a Work when `async_op`, whose `wait()` returns it.

    Raises:
        ValueError: a rank's part is not that of `length`; the rest as for `compressed_all_reduce`.
    """
    options = CallOptions.of("compressed_all_gather", **details)
    comm = communicator_of(group, options)
    size, rank = (comm.size, comm.rank) if comm is not None else (1, 0)

    def check() -> None:
        check_tensor(tensor, codec, op="sum", segment_bytes=options.segment_bytes, in_pieces=True)
        check_length(len(tensor) if tensor.dim() else 1, length, rank=rank, size=size)
        check_error(error, codec, x=tensor, numel=tensor.numel(), comm=comm)

    what = f"compressed_all_gather{options.of_label}"
    if mistake := mistake_of(check):
        return refuse(mistake, comm, what=what, tensor=tensor, async_op=async_op)
    mine = tensor if tensor.dim() else tensor.reshape(1)
    rows = row_starts(len(mine) * size if length is None else length, size)
    segment = segment_of(options)

    def call(spins: int) -> Tensor:
        flat, _ = flat_view(mine)
        width = torch.Size(mine.shape[1:]).numel()
        starts = [row * width for row in rows]
        out = flat.new_empty(starts[-1])
        agree_on(comm, "compressed_all_gather", out, (codec.name, segment, starts))
        shots.all_gather(
            flat,
            out,
            starts=starts,
            codec=codec,
            transport=payload_transport(comm, tensor),
            segment=segment,
            memory=memory_of(error, codec, comm),
        )
        return out.view(rows[-1], *mine.shape[1:])

    return run_call(comm, call, what, tensor, codec, async_op)

"""The collectives that add up: any dtype, any size, any strides, one result on all ranks, bit for
bit.

    tensor -> flat contiguous view (or copy) of a summable dtype -> algorithm over a transport ->
    back

What a call needs of its group is in its Communicator. These functions check what the caller passed,
before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyops.comm.collectives import native, ring, symmetric, two_shot
from pyops.comm.collectives.arithmetic import (
    check_reducible,
    row_starts,
    scale_in_place,
    summable_view,
)
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional.call_options import CallDetails, CallOptions, SliceDetails
from pyops.comm.collectives.functional.operands import (
    check_operand,
    check_out,
    flat_operand,
    like_operand,
)
from pyops.mesh import ProcessGroupLike

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["all_reduce", "reduce_flat", "reduce_scatter"]


def all_reduce(
    tensor: Tensor,
    *,
    group: ProcessGroupLike = None,
    op: str = "sum",
    algorithm: str = "auto",
    async_op: bool = False,
    **details: Unpack[SliceDetails],
) -> Any:
    """Replace `tensor` by its sum, or mean, over the ranks of `group`, in place. Collective: every
    rank must call it, with a tensor of the same size and dtype.

    16-bit floats are summed in fp32 and rounded once, at the end (except by "native", which "auto"
    takes on CUDA: NCCL rounds every partial sum); a mean divides before that rounding, and on NCCL
    before it adds, so that it overflows nowhere. Integers wrap, bool is a logical or. The result
    has the same bits on all ranks, and they don't depend on timing or run.

    Args:
        tensor: of any shape and any dtype that has a sum, dense, on the CPU or on CUDA.
        group: the ranks; None for the default group (one process where torch.distributed is not
            initialized), pyops.mesh.ALONE for this process alone.
        op: "sum" or "mean".
        algorithm: "ring", "two_shot", "shared_memory" (CPU tensors, ranks of one host), "symmetric"
            (CUDA tensors of fp32, bf16 or fp16, GPUs of one node; "native" elsewhere), "native"
            (the backend's own), or "auto", the fastest by measurement. "two_shot", "shared_memory"
            and "symmetric" sum in rank order; the ring in an order that depends on an element's
            position in the buffer of which the tensor is the slice at `offset`, and on
            `segment_bytes`.
        async_op: return at once; the tensor is the result after `wait()` of what is returned.
        details: `CallOptions`: label, segment_bytes (1 MiB by default), communicator, offset.

    Returns:
        `tensor`, or a Work when `async_op`, whose `wait()` returns it.

    Raises:
        ValueError: another op or algorithm, a sparse or overlapping tensor.
        TypeError: a dtype without a sum, a mean of integers.
        CommunicationError: a rank died or stalled; the error names it.
        DisagreementError: the ranks called different things.
    """
    options = CallOptions.of("all_reduce", **details)
    comm = options.communicator or Communicator.of(group)
    check_reducible(tensor, op=op)
    segment = check_operand(tensor, algorithm, options.segment_bytes, written=True)
    if options.offset < 0:
        raise ValueError(
            f"offset is {options.offset}; give the tensor's first position in its buffer, 0 or more"
        )
    scale = 1.0 / comm.size if op == "mean" else 1.0
    staged = (
        tensor.is_cuda
        and comm.size > 1
        and algorithm != "native"
        and comm.backend(tensor.device) == "gloo"
    )
    direct = tensor.is_cuda and not staged
    factor = 2 if tensor.dtype.is_complex else 1

    def call(spins: int) -> Tensor:
        flat, copied = flat_operand(tensor, host=staged)
        reduce_flat(comm, flat, scale, algorithm, segment, options.offset * factor, spins)
        if copied:
            tensor.copy_(like_operand(flat, tensor).view(tensor.shape))
        return tensor

    what = (
        f"all_reduce{options.of_label} ({tensor.numel()} elements of {tensor.dtype}, {algorithm})"
    )
    with torch.no_grad():
        return comm.run(call, what=what, tensor=tensor, async_op=async_op, direct=direct)


def reduce_flat(
    comm: Communicator,
    flat: Tensor,
    scale: float,
    algorithm: str,
    segment: int,
    offset: int,
    spins: int,
) -> None:
    """Sum a flat tensor in place by the named algorithm."""
    if comm.size == 1:
        scale_in_place(flat, scale=scale)
        return
    pieces = max(1, segment // flat.element_size())

    def runner(name: str) -> Callable[[Tensor], None]:
        return lambda x: reduce_flat(comm, x, scale, name, segment, 0, spins)

    chosen = comm.choose(algorithm, flat, runners=runner)
    if chosen == "symmetric":
        if (memory := _symmetric(comm, flat)) is not None:
            comm.count(2 * _others_share(comm, flat))
            memory.all_reduce(flat, scale=scale)
            return
        chosen = "native"
    if chosen == "shared_memory":
        comm.count(2 * _others_share(comm, flat))
        comm.shared_memory().all_reduce(flat, scale=scale, spins=spins)
        return
    if chosen == "native":
        comm.count(2 * _others_share(comm, flat))
        native.all_reduce(comm, flat, scale=scale)
        return
    if not flat.is_cuda:
        details = (chosen, scale, segment, offset)
        comm.agree("all_reduce", numel=flat.numel(), dtype=flat.dtype, details=details)
    if chosen == "ring":
        ring.all_reduce(flat, transport=comm.transport, segment=pieces, scale=scale, offset=offset)
    else:
        two_shot.all_reduce(flat, transport=comm.transport, segment=pieces, scale=scale)


def reduce_scatter(
    tensor: Tensor,
    *,
    group: ProcessGroupLike = None,
    op: str = "sum",
    algorithm: str = "auto",
    async_op: bool = False,
    out: Tensor | None = None,
    **details: Unpack[CallDetails],
) -> Any:
    """This rank's part of the sum, or mean, of `tensor` over the ranks. Collective: every rank must
    call it. Numbers, algorithms and errors are those of `all_reduce`.

    Args:
        tensor: [N, ...], left as it is; cut along dim 0 as torch.tensor_split(tensor, ranks) does:
            the first N % ranks ranks get one row more.
        group: as for `all_reduce`.
        op: "sum" or "mean".
        algorithm: as for `all_reduce`.
        async_op: return a Work at once.
        out: where the result goes, contiguous; it may be this rank's own part of `tensor`, and
            nothing is allocated then.
        details: `CallOptions`: label, segment_bytes, communicator.

    Returns:
        `out`, or a new tensor; a Work when `async_op`, whose `wait()` returns it.
    """
    options = CallOptions.of("reduce_scatter", **details)
    comm = options.communicator or Communicator.of(group)
    check_reducible(tensor, op=op)
    segment = check_operand(tensor, algorithm, options.segment_bytes, written=False)
    if tensor.dim() == 0:
        raise ValueError(
            "reduce_scatter cuts dim 0, but the tensor has no dims; use tensor.reshape(1)"
        )
    scale = 1.0 / comm.size if op == "mean" else 1.0
    rows = row_starts(len(tensor), comm.size)
    staged = tensor.is_cuda and comm.size > 1 and comm.backend(tensor.device) == "gloo"
    shape = (rows[comm.rank + 1] - rows[comm.rank], *tensor.shape[1:])
    check_out(out, tensor, shape)

    def call(spins: int) -> Tensor:
        flat, _ = flat_operand(tensor, host=staged)
        width = flat.numel() // len(tensor) if len(tensor) else 0
        starts = [row * width for row in rows]
        if out is None or staged:
            part = flat.new_empty(starts[comm.rank + 1] - starts[comm.rank])
        else:
            part = summable_view(out.detach().view(-1))
        _reduce_scatter(comm, flat, part, starts, scale, algorithm, segment, spins)
        result = like_operand(part, tensor).view(shape)
        return out.copy_(result) if out is not None and staged else result.to(tensor.device)

    what = (
        f"reduce_scatter{options.of_label} ({tensor.numel()} elements of "
        f"{tensor.dtype}, {algorithm})"
    )
    with torch.no_grad():
        return comm.run(
            call, what=what, tensor=tensor, async_op=async_op, direct=tensor.is_cuda and not staged
        )


def _reduce_scatter(
    comm: Communicator,
    flat: Tensor,
    out: Tensor,
    starts: list[int],
    scale: float,
    algorithm: str,
    segment: int,
    spins: int,
) -> None:
    if comm.size == 1:
        out.copy_(flat)
        scale_in_place(out, scale=scale)
        return
    chosen = comm.choose(
        algorithm,
        flat,
        runners=lambda name: lambda x: reduce_flat(comm, x, 1.0, name, segment, 0, spins),
    )
    if chosen == "symmetric":
        if (memory := _symmetric(comm, flat)) is not None:
            comm.count(_others_share(comm, flat))
            memory.reduce_scatter(flat, out, starts=starts, scale=scale)
            return
        chosen = "native"
    if chosen == "shared_memory":
        comm.count(_others_share(comm, flat))
        comm.shared_memory().reduce_scatter(flat, out, starts=starts, scale=scale, spins=spins)
        return
    if chosen == "native":
        comm.count(_others_share(comm, flat))
        native.reduce_scatter(comm, flat, out, starts=starts, scale=scale)
        return
    if not flat.is_cuda:
        comm.agree(
            "reduce_scatter",
            numel=flat.numel(),
            dtype=flat.dtype,
            details=(chosen, scale, segment, starts),
        )
    function = ring.reduce_scatter if chosen == "ring" else two_shot.reduce_scatter
    pieces = max(1, segment // flat.element_size())
    function(flat, out, starts=starts, transport=comm.transport, segment=pieces, scale=scale)


def _symmetric(comm: Communicator, flat: Tensor) -> symmetric.SymmetricMemory | None:
    """The group's symmetric memory, where it has any and sums of this dtype are made in it."""
    if flat.dtype not in symmetric.DTYPES:
        return None
    return symmetric.memory_of(comm, flat.device)


def _others_share(comm: Communicator, flat: Tensor) -> float:
    """Bytes of a tensor that are not this rank's own part."""
    return flat.numel() * flat.element_size() * (comm.size - 1) / comm.size

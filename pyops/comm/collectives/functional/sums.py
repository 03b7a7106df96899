"""The collectives: any dtype, any size, any strides, one result on all ranks, bit for bit.

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
from pyops.comm.collectives.communicator import ALGORITHMS, Communicator
from pyops.comm.collectives.functional.call_options import CallDetails, CallOptions, SliceDetails
from pyops.mesh import ProcessGroupLike
from pyops.ops.memory import require_memory

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["all_gather", "all_reduce", "gather_bytes", "reduce_scatter"]

# Of a ring's piece or a slice: on TCP the time of a message is well above its latency from here on.
SEGMENT_BYTES = 1 << 20


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
    segment = _check(tensor, algorithm, options.segment_bytes, written=True)
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
        flat, copied = _flat(tensor, host=staged)
        _reduce(comm, flat, scale, algorithm, segment, options.offset * factor, spins)
        if copied:
            tensor.copy_(_like(flat, tensor).view(tensor.shape))
        return tensor

    what = (
        f"all_reduce{options.of_label} ({tensor.numel()} elements of {tensor.dtype}, {algorithm})"
    )
    with torch.no_grad():
        return comm.run(call, what=what, tensor=tensor, async_op=async_op, direct=direct)


def _reduce(
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
        return lambda x: _reduce(comm, x, scale, name, segment, 0, spins)

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
    segment = _check(tensor, algorithm, options.segment_bytes, written=False)
    if tensor.dim() == 0:
        raise ValueError(
            "reduce_scatter cuts dim 0, but the tensor has no dims; use tensor.reshape(1)"
        )
    scale = 1.0 / comm.size if op == "mean" else 1.0
    rows = row_starts(len(tensor), comm.size)
    staged = tensor.is_cuda and comm.size > 1 and comm.backend(tensor.device) == "gloo"
    shape = (rows[comm.rank + 1] - rows[comm.rank], *tensor.shape[1:])
    _check_out(out, tensor, shape)

    def call(spins: int) -> Tensor:
        flat, _ = _flat(tensor, host=staged)
        width = flat.numel() // len(tensor) if len(tensor) else 0
        starts = [row * width for row in rows]
        if out is None or staged:
            part = flat.new_empty(starts[comm.rank + 1] - starts[comm.rank])
        else:
            part = summable_view(out.detach().view(-1))
        _reduce_scatter(comm, flat, part, starts, scale, algorithm, segment, spins)
        result = _like(part, tensor).view(shape)
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
        runners=lambda name: lambda x: _reduce(comm, x, 1.0, name, segment, 0, spins),
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
    segment = _check(tensor, algorithm, options.segment_bytes, written=False)
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
    _check_out(out, tensor, shape)

    def call(spins: int) -> Tensor:
        x = mine.detach().contiguous().resolve_conj().resolve_neg().view(-1).view(torch.uint8)
        x = x.cpu() if staged else x
        width = mine[:1].numel() * mine.element_size() if len(mine) else _width_of_row(mine)
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
        algorithm, x, runners=lambda name: lambda y: _reduce(comm, y, 1.0, name, segment, 0, spins)
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


def _symmetric(comm: Communicator, flat: Tensor) -> symmetric.SymmetricMemory | None:
    """The group's symmetric memory, where it has any and sums of this dtype are made in it."""
    if flat.dtype not in symmetric.DTYPES:
        return None
    return symmetric.memory_of(comm, flat.device)


def _others_share(comm: Communicator, flat: Tensor) -> float:
    """Bytes of a tensor that are not this rank's own part."""
    return flat.numel() * flat.element_size() * (comm.size - 1) / comm.size


def gather_bytes(
    comm: Communicator, x: Tensor, out: Tensor, starts: list[int], *, spins: int
) -> None:
    """`all_gather` of flat uint8 tensors into `out`, cut at `starts`, for a call that `comm` is
    running already."""
    _all_gather(comm, x, out, starts, "auto", SEGMENT_BYTES, spins)


def _check(tensor: Tensor, algorithm: str, segment_bytes: int | None, *, written: bool) -> int:
    """ValueError for arguments that no collective takes; the bytes of a segment."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {ALGORITHMS}, got {algorithm!r}")
    if tensor.layout != torch.strided:
        raise ValueError(
            f"a tensor of layout {tensor.layout} can't be communicated; pass tensor.to_dense()"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"a tensor on {tensor.device} has no memory that ranks can exchange; pass "
            "one on the CPU or on CUDA"
        )
    require_memory(tensor, "a tensor that")
    if (
        written
        and not tensor.is_contiguous()
        and any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    ):
        raise ValueError(
            "an expanded tensor has several elements in one place and can't take a "
            "result; pass tensor.clone()"
        )
    if algorithm == "shared_memory" and tensor.is_cuda:
        raise ValueError(
            "algorithm='shared_memory' takes CPU tensors; use 'two_shot' or 'native' on CUDA"
        )
    if segment_bytes is None:
        return SEGMENT_BYTES
    if segment_bytes < 1024:
        raise ValueError(f"segment_bytes is {segment_bytes}; give at least 1024")
    return segment_bytes


def _check_out(out: Tensor | None, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """ValueError for a place that the result does not fit into."""
    if out is None:
        return
    if (out.dtype, out.device, tuple(out.shape)) != (
        tensor.dtype,
        tensor.device,
        shape,
    ) or not out.is_contiguous():
        raise ValueError(
            f"out is {tuple(out.shape)} of {out.dtype} on "
            f"{out.device}{'' if out.is_contiguous() else ', not contiguous'}; the "
            f"result is {shape} of {tensor.dtype} on {tensor.device}"
        )
    require_memory(out, "out")
    if out.is_neg() or out.is_conj():
        raise ValueError(
            "out is a view whose sign or conjugate is still to be taken; pass a plain "
            "tensor, as torch.empty makes it"
        )


def _flat(tensor: Tensor, *, host: bool) -> tuple[Tensor, bool]:
    """(flat contiguous tensor of a summable dtype, whether it is a copy)."""
    whole = tensor.detach()
    plain = whole.is_contiguous() and not host and not whole.is_conj() and not whole.is_neg()
    if not plain:
        whole = whole.resolve_conj().resolve_neg().contiguous()
        whole = whole.cpu() if host else whole
    return summable_view(whole.view(-1)), whole.data_ptr() != tensor.data_ptr() or host


def _like(flat: Tensor, tensor: Tensor) -> Tensor:
    """Undo `summable_view`."""
    return flat if flat.dtype == tensor.dtype else flat.view(tensor.dtype)


def _width_of_row(tensor: Tensor) -> int:
    """Bytes of a row of a tensor that has no rows."""
    width = tensor.element_size()
    for size in tensor.shape[1:]:
        width *= size
    return width

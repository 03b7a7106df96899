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
from pyops.comm.collectives.functional import gather_bytes, reduce_scatter
from pyops.comm.collectives.functional.call_options import CallDetails, CallOptions
from pyops.comm.collectives.transport import Pending, Transport
from pyops.comm.collectives.work import Work
from pyops.comm.compression import compressed_shots as shots
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.compressed_shots import Alone, Memory
from pyops.comm.compression.error_feedback import ErrorFeedback
from pyops.comm.compression.refusal import (
    check_error,
    check_length,
    check_tensor,
    compares,
    mistake_of,
    refuse,
    refusing,
)
from pyops.comm.failure import DisagreementError
from pyops.mesh import ProcessGroupLike, resolve
from pyops.protocols import CollectiveCodec

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["compressed_all_gather", "compressed_all_reduce", "compressed_reduce_scatter"]

SEGMENT_BYTES = 4 << 20  # of the numbers behind one message


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
    comm = _communicator(group, options)
    if within is not None:
        return _hierarchical(
            tensor, codec, error, comm, Communicator.of(within), op, async_op, options
        )

    def check() -> None:
        check_tensor(tensor, codec, op=op, segment_bytes=options.segment_bytes)
        check_error(error, codec, x=tensor, numel=tensor.numel(), comm=comm)

    if mistake := mistake_of(check):
        return refuse(
            mistake,
            comm,
            what=f"compressed_all_reduce{options.of_label}",
            tensor=tensor,
            async_op=async_op,
        )
    scale = 1.0 / (comm.size if comm is not None else 1) if op == "mean" else 1.0
    segment = _segment(options)

    def call(spins: int) -> Tensor:
        flat, copied = _flat(tensor)
        _agree(comm, "compressed_all_reduce", flat, (codec.name, scale, segment))
        transport, memory = _transport(comm, tensor), _memory(error, codec, comm)
        if isinstance(codec, CollectiveCodec):
            codec.all_reduce(flat, error=error, transport=transport, scale=scale)
        else:
            shots.all_reduce(
                flat, codec=codec, transport=transport, segment=segment, memory=memory, scale=scale
            )
        if copied:
            tensor.copy_(flat.view(tensor.shape))
        return tensor

    return _run(comm, call, f"compressed_all_reduce{options.of_label}", tensor, codec, async_op)


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
    comm = _communicator(group, options)
    size, rank = (comm.size, comm.rank) if comm is not None else (1, 0)

    def check() -> None:
        check_tensor(tensor, codec, op=op, segment_bytes=options.segment_bytes, in_pieces=True)
        if tensor.dim() == 0:
            raise ValueError(
                "compressed_reduce_scatter cuts dim 0, but the tensor has no dims; use "
                "tensor.reshape(1)"
            )
        check_error(error, codec, x=tensor, numel=tensor.numel(), comm=comm)

    if mistake := mistake_of(check):
        return refuse(
            mistake,
            comm,
            what=f"compressed_reduce_scatter{options.of_label}",
            tensor=tensor,
            async_op=async_op,
        )
    rows = row_starts(len(tensor), size)
    scale = 1.0 / size if op == "mean" else 1.0
    segment = _segment(options)

    def call(spins: int) -> Tensor:
        flat, _ = _flat(tensor)
        width = flat.numel() // len(tensor) if len(tensor) else 0
        starts = [row * width for row in rows]
        out = flat.new_empty(starts[rank + 1] - starts[rank])
        _agree(comm, "compressed_reduce_scatter", flat, (codec.name, scale, segment, starts))
        shots.reduce_scatter(
            flat,
            out,
            starts=starts,
            codec=codec,
            transport=_transport(comm, tensor),
            segment=segment,
            memory=_memory(error, codec, comm),
            scale=scale,
        )
        return out.view(rows[rank + 1] - rows[rank], *tensor.shape[1:])

    return _run(comm, call, f"compressed_reduce_scatter{options.of_label}", tensor, codec, async_op)


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
    comm = _communicator(group, options)
    size, rank = (comm.size, comm.rank) if comm is not None else (1, 0)

    def check() -> None:
        check_tensor(tensor, codec, op="sum", segment_bytes=options.segment_bytes, in_pieces=True)
        check_length(len(tensor) if tensor.dim() else 1, length, rank=rank, size=size)
        check_error(error, codec, x=tensor, numel=tensor.numel(), comm=comm)

    if mistake := mistake_of(check):
        return refuse(
            mistake,
            comm,
            what=f"compressed_all_gather{options.of_label}",
            tensor=tensor,
            async_op=async_op,
        )
    mine = tensor if tensor.dim() else tensor.reshape(1)
    rows = row_starts(len(mine) * size if length is None else length, size)
    segment = _segment(options)

    def call(spins: int) -> Tensor:
        flat, _ = _flat(mine)
        width = torch.Size(mine.shape[1:]).numel()
        starts = [row * width for row in rows]
        out = flat.new_empty(starts[-1])
        _agree(comm, "compressed_all_gather", out, (codec.name, segment, starts))
        shots.all_gather(
            flat,
            out,
            starts=starts,
            codec=codec,
            transport=_transport(comm, tensor),
            segment=segment,
            memory=_memory(error, codec, comm),
        )
        return out.view(rows[-1], *mine.shape[1:])

    return _run(comm, call, f"compressed_all_gather{options.of_label}", tensor, codec, async_op)


def _hierarchical(
    tensor: Tensor,
    codec: Codec,
    error: ErrorFeedback | None,
    across: Communicator | None,
    node: Communicator,
    op: str,
    async_op: bool,
    options: CallOptions,
) -> Any:
    """Sum exactly within the node, each rank a part; compress that part's way between the nodes;
    bring the parts together.

    Every call joins its group's queue here, on the caller's thread, so that the order is the same
    on all ranks; each waits for the one before on its own group's thread. What goes wrong within a
    node is told to the other nodes.
    """
    if across is None:
        raise ValueError("within= needs torch.distributed: initialise it, or call without within")

    def check() -> None:
        check_tensor(tensor, codec, op=op, segment_bytes=options.segment_bytes)
        part = row_starts(tensor.numel(), node.size)[node.rank : node.rank + 2]
        check_error(error, codec, x=tensor, numel=part[1] - part[0], comm=across)

    what = f"compressed_all_reduce{options.of_label} between nodes"
    if mistake := mistake_of(check):
        return _refuse_in_node(mistake, across, node, what, tensor, async_op)
    starts = row_starts(tensor.numel(), node.size)
    scale, segment = (1.0 / across.size if op == "mean" else 1.0), _segment(options)
    first = reduce_scatter(
        _flat(tensor)[0], op=op, communicator=node, async_op=True, label=options.label
    )

    def between(spins: int) -> Tensor:
        part = _or_tell(first, across, what)
        _agree(across, "compressed_all_reduce", part, (codec.name, scale, segment, node.size))
        transport, memory = _transport(across, part), _memory(error, codec, across)
        if isinstance(codec, CollectiveCodec):
            codec.all_reduce(part, error=error, transport=transport, scale=scale)
        else:
            shots.all_reduce(
                part, codec=codec, transport=transport, segment=segment, memory=memory, scale=scale
            )
        return part

    second = _run(across, between, what, tensor, codec, True)

    def together(spins: int) -> Tensor:
        part = _or_tell(second, node, what).view(torch.uint8)
        whole = part.new_empty(tensor.numel() * tensor.element_size())
        in_bytes = [start * tensor.element_size() for start in starts]
        gather_bytes(node, part, whole, in_bytes, spins=spins)
        tensor.copy_(whole.view(tensor.dtype).view(tensor.shape))
        return tensor

    direct = tensor.is_cuda and not _staged(node, tensor)
    return node.run(
        together, what=f"{what}, all_gather within", tensor=tensor, async_op=async_op, direct=direct
    )


def _refuse_in_node(
    mistake: Exception,
    across: Communicator,
    node: Communicator,
    what: str,
    tensor: object,
    async_op: bool,
) -> Any:
    """As `refuse`, in the place of the three calls of `_hierarchical`."""
    if not (compares(node, tensor) and compares(across, tensor)):
        raise mistake

    def run(comm: Communicator, call: Any, async_op: bool) -> Any:
        return comm.run(
            call, what=what, tensor=torch.empty(0, device="cpu"), async_op=async_op, direct=False
        )

    first = run(node, refusing(mistake, node, what=what), True)
    second = run(across, lambda spins: _or_tell(first, across, what), True)
    return run(node, lambda spins: _or_tell(second, node, what), async_op)


def _or_tell(before: Work, comm: Communicator, what: str) -> Tensor:
    """What `before` gives; where it gives an error instead, the ranks of `comm`, which will wait
    for this one, are told."""
    try:
        return before.wait()
    except (DisagreementError, TypeError, ValueError) as error:
        if comm.size > 1:
            comm.agree(what, refusal=error)
        raise


class _OverHost:
    """A transport for payloads on a GPU whose group only carries CPU tensors."""

    def __init__(self, inner: Transport) -> None:
        self._inner, self.rank, self.size = inner, inner.rank, inner.size

    def post(self, sends: Any, receives: Any) -> Pending:
        arriving = [
            (torch.empty(t.shape, dtype=t.dtype, device="cpu"), peer) for t, peer in receives
        ]
        pending = self._inner.post([(t.cpu(), peer) for t, peer in sends], arriving)
        return _Arriving(
            pending, [(t, host) for (t, _), (host, _) in zip(receives, arriving, strict=True)]
        )


class _Arriving:
    def __init__(self, pending: Pending, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self._pending, self._pairs = pending, pairs

    def wait(self) -> None:
        self._pending.wait()
        for tensor, host in self._pairs:
            tensor.copy_(host)


def _staged(comm: Communicator | None, tensor: Tensor) -> bool:
    return comm is not None and tensor.is_cuda and comm.backend(tensor.device) == "gloo"


def _transport(comm: Communicator | None, tensor: Tensor) -> Transport:
    if comm is None:
        return Alone()
    return _OverHost(comm.transport) if _staged(comm, tensor) else comm.transport


def _communicator(group: ProcessGroupLike, options: CallOptions) -> Communicator | None:
    """That of the group; None for one process."""
    if options.communicator is not None:
        return options.communicator
    ranks = resolve(group, "a compressed collective")
    return None if ranks is None else Communicator.of(ranks)


def _run(
    comm: Communicator | None, call: Any, what: str, tensor: Tensor, codec: Codec, async_op: bool
) -> Any:
    what = f"{what} ({tensor.numel()} elements of {tensor.dtype}, {codec.name})"
    with torch.no_grad():
        if comm is None:
            return Work(call(0)) if async_op else call(0)
        return comm.run(
            call,
            what=what,
            tensor=tensor,
            async_op=async_op,
            direct=tensor.is_cuda and not _staged(comm, tensor),
        )


def _agree(comm: Communicator | None, kind: str, flat: Tensor, details: tuple[Any, ...]) -> None:
    if comm is not None and comm.size > 1 and (not flat.is_cuda or _staged(comm, flat)):
        comm.agree(kind, numel=flat.numel(), dtype=flat.dtype, details=details)


def _memory(error: ErrorFeedback | None, codec: Codec, comm: Communicator | None) -> Memory:
    if error is None:
        return Memory(seed=comm.sequence if comm is not None else 0)
    error.rounds += 1
    if not codec.feedback:
        return Memory(flag=error.overflowed, seed=error.rounds)
    return Memory(error.worker, error.server, error.overflowed, error.rounds)


def _segment(options: CallOptions) -> int:
    """Numbers behind one message."""
    return (SEGMENT_BYTES if options.segment_bytes is None else options.segment_bytes) // 4


def _flat(tensor: Tensor) -> tuple[Tensor, bool]:
    """(the flat contiguous tensor, whether it is a copy)"""
    flat = tensor.detach().contiguous().view(-1)
    return flat, flat.data_ptr() != tensor.data_ptr()

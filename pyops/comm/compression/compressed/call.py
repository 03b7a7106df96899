"""A compressed collective as its group runs it: communicator, agreement, transport and memory.

flat_view -> agree_on -> payload_transport, memory_of -> shots       within run_call
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional.call_options import CallOptions
from pyops.comm.collectives.transport import Transport
from pyops.comm.collectives.work import Work
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.compressed.host_transport import HostTransport
from pyops.comm.compression.compressed_shots import Alone, Memory
from pyops.comm.compression.error_feedback import ErrorFeedback
from pyops.mesh import ProcessGroupLike, resolve

__all__ = [
    "agree_on",
    "communicator_of",
    "flat_view",
    "is_staged",
    "memory_of",
    "payload_transport",
    "run_call",
    "segment_of",
]

SEGMENT_BYTES = 4 << 20  # of the numbers behind one message


def is_staged(comm: Communicator | None, tensor: Tensor) -> bool:
    """Whether the group carries a GPU's tensors by copies on the host."""
    return comm is not None and tensor.is_cuda and comm.backend(tensor.device) == "gloo"


def payload_transport(comm: Communicator | None, tensor: Tensor) -> Transport:
    """What carries payloads on the tensor's device."""
    if comm is None:
        return Alone()
    return HostTransport(comm.transport) if is_staged(comm, tensor) else comm.transport


def communicator_of(group: ProcessGroupLike, options: CallOptions) -> Communicator | None:
    """That of the group; None for one process."""
    if options.communicator is not None:
        return options.communicator
    ranks = resolve(group, "a compressed collective")
    return None if ranks is None else Communicator.of(ranks)


def run_call(
    comm: Communicator | None, call: Any, what: str, tensor: Tensor, codec: Codec, async_op: bool
) -> Any:
    """Run `call(spins)` on the communicator, or at once where there is none; its tensor, or a Work.

    Args:
        comm: None for one process.
        call: The collective.
        what: Its name, for errors.
        tensor: The tensor of the caller.
        codec: How numbers are written.
        async_op: Whether to return a Work at once.
    """
    what = f"{what} ({tensor.numel()} elements of {tensor.dtype}, {codec.name})"
    with torch.no_grad():
        if comm is None:
            return Work(call(0)) if async_op else call(0)
        return comm.run(
            call,
            what=what,
            tensor=tensor,
            async_op=async_op,
            direct=tensor.is_cuda and not is_staged(comm, tensor),
        )


def agree_on(comm: Communicator | None, kind: str, flat: Tensor, details: tuple[Any, ...]) -> None:
    """DisagreementError unless all ranks call the same collective, where ranks compare calls.

    Args:
        comm: None for one process.
        kind: The collective's name.
        flat: Its tensor.
        details: The options that ranks must agree on.
    """
    if comm is not None and comm.size > 1 and (not flat.is_cuda or is_staged(comm, flat)):
        comm.agree(kind, numel=flat.numel(), dtype=flat.dtype, details=details)


def memory_of(error: ErrorFeedback | None, codec: Codec, comm: Communicator | None) -> Memory:
    """What the collective may write beside its result, and the key of its rounding.

    Args:
        error: What earlier calls left out, or None.
        codec: How numbers are written.
        comm: None for one process.
    """
    if error is None:
        return Memory(seed=comm.sequence if comm is not None else 0)
    error.rounds += 1
    if not codec.feedback:
        return Memory(flag=error.overflowed, seed=error.rounds)
    return Memory(error.worker, error.server, error.overflowed, error.rounds)


def segment_of(options: CallOptions) -> int:
    """Numbers behind one message."""
    return (SEGMENT_BYTES if options.segment_bytes is None else options.segment_bytes) // 4


def flat_view(tensor: Tensor) -> tuple[Tensor, bool]:
    """(the flat contiguous tensor, whether it is a copy)"""
    flat = tensor.detach().contiguous().view(-1)
    return flat, flat.data_ptr() != tensor.data_ptr()

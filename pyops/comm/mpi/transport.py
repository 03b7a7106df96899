"""Messages over a communicator of MPI, as bytes: the small transport that every algorithm of
pyops.comm is written against.

mpi4py lets other threads of Python run while a call waits. MPI itself must allow calls of several
threads: pyops sends asynchronous collectives from one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyops.comm.failure import PeerError

__all__ = ["MPITransport", "Requests", "as_bytes", "received", "sent", "tag_of"]

TAGS = 32749  # a prime below 32767, the least that an MPI has to allow
Messages = Sequence[tuple[Tensor, int]]


def tag_of(tag: int) -> int:
    """A tag that every MPI takes."""
    return tag % TAGS


def as_bytes(tensor: Tensor) -> Any:
    """The memory of a contiguous CPU tensor, as NumPy's bytes.

    Raises:
        ValueError: The tensor is on another device.
    """
    if tensor.device.type != "cpu":
        raise ValueError(
            f"the backend of MPI carries CPU tensors, got one on {tensor.device}; move it to the "
            "CPU, or use NCCL for it"
        )
    return tensor.detach().view(-1).view(torch.uint8).numpy()


class Requests:
    """Sends and receives that have begun, each with the rank at the other end."""

    def __init__(self, requests: list[tuple[Any, int]], tensors: list[Tensor]) -> None:
        self._requests, self._tensors = requests, tensors  # alive until the wait

    def wait(self) -> None:
        """Return when all are done. PeerError names a rank that failed."""
        for request, peer in self._requests:
            try:
                request.Wait()
            except Exception as error:  # mpi4py's own, which need not be imported for this
                raise PeerError(peer, error) from error
        self._requests, self._tensors = [], []


def sent(comm: Any, tensor: Tensor, peer: int, tag: int) -> Any:
    """Begin to send a contiguous tensor; mpi4py's request."""
    return comm.Isend(as_bytes(tensor), dest=peer, tag=tag_of(tag))


def received(comm: Any, tensor: Tensor, peer: int, tag: int) -> Any:
    """Begin to receive into a contiguous tensor; mpi4py's request."""
    return comm.Irecv(as_bytes(tensor), source=peer, tag=tag_of(tag))


class MPITransport:
    """One rank of a communicator of MPI, as `pyops.comm.collectives.transport.Transport` has it.

    Args:
        comm: Of mpi4py.
        tag: Keeps these messages apart from others on the same communicator.
    """

    def __init__(self, comm: Any, *, tag: int = 0x70796F) -> None:
        self._comm, self._tag = comm, tag
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.bytes_sent = 0

    def post(self, sends: Messages, receives: Messages) -> Requests:
        """Start some sends and receives together; the tensors must be left alone until the wait.

        Args:
            sends: Flat contiguous CPU tensors, each with the rank that gets it.
            receives: The same, each with the rank that it comes from.
        """
        sends = [(t, peer) for t, peer in sends if t.numel()]
        receives = [(t, peer) for t, peer in receives if t.numel()]
        self.bytes_sent += sum(t.numel() * t.element_size() for t, _ in sends)
        requests = [(received(self._comm, t, peer, self._tag), peer) for t, peer in receives]
        requests += [(sent(self._comm, t, peer, self._tag), peer) for t, peer in sends]
        return Requests(requests, [t for t, _ in (*sends, *receives)])

"""Messages over a communicator of MPI, as bytes: the small transport that every algorithm of
pyops.comm is written against.

mpi4py lets other threads of Python run while a call waits. MPI itself must allow calls of several
threads: pyops sends asynchronous collectives from one of its own.

An MPI waits in a loop that takes a whole core. Where the ranks of a host are more than its cores,
waits therefore sleep between looks, which costs up to a millisecond each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pyops.comm.failure import PeerError

__all__ = [
    "MPITransport",
    "Requests",
    "as_bytes",
    "finished",
    "received",
    "sent",
    "shares_cores",
    "tag_of",
]

TAGS = 32749  # a prime below 32767, the least that an MPI has to allow
LOOKS = 100  # without a pause
PAUSES = 2e-5, 1e-3  # seconds, the first and the longest
Messages = Sequence[tuple[Tensor, int]]


def tag_of(tag: int) -> int:
    """A tag that every MPI takes."""
    return tag % TAGS


def shares_cores(environment: Mapping[str, str], cores: int) -> bool:
    """Whether waits are to leave their core to others.

    Args:
        environment: Of the process: torchrun's LOCAL_WORLD_SIZE, or PYOPS_MPI_YIELD, 1 or 0.
        cores: That the process may use.
    """
    if (wanted := environment.get("PYOPS_MPI_YIELD", "")) in ("0", "1"):
        return wanted == "1"
    ranks = environment.get("LOCAL_WORLD_SIZE", "")
    return ranks.isdigit() and int(ranks) > cores


YIELDS = shares_cores(os.environ, len(os.sched_getaffinity(0)))


def finished(request: Any, status: Any = None, *, seconds: float | None = None) -> bool:
    """Wait for a request of mpi4py.

    Args:
        request: The request.
        status: Gets the source of a message, where given.
        seconds: How long to wait at most; None: without a limit.

    Returns:
        Whether it has ended.
    """
    if not YIELDS and seconds is None:
        request.Wait(status)
        return True
    end = None if seconds is None else time.monotonic() + seconds
    looks, pause = 0, PAUSES[0]
    while not request.Test(status):
        if end is not None and time.monotonic() > end:
            return False
        looks += 1
        if looks > LOOKS:
            time.sleep(pause)
            pause = min(2 * pause, PAUSES[1])
    return True


def as_bytes(tensor: Tensor) -> Any:
    """The memory of a contiguous CPU tensor, as mpi4py takes it, by its address: a NumPy array over
    it would forbid for ever to resize it.

    Raises:
        ValueError: The tensor is on another device.
    """
    from mpi4py import MPI

    if tensor.device.type != "cpu":
        raise ValueError(
            f"the backend of MPI carries CPU tensors, got one on {tensor.device}; move it to the "
            "CPU, or use NCCL for it"
        )
    memory = getattr(MPI, "buffer", None) or MPI.memory  # the older name
    return memory.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


class Requests:
    """Sends and receives that have begun, each with the rank at the other end."""

    def __init__(self, requests: list[tuple[Any, int]], tensors: list[Tensor]) -> None:
        self._requests, self._tensors = requests, tensors  # alive until the wait

    def wait(self) -> None:
        """Return when all are done. PeerError names a rank that failed."""
        for request, peer in self._requests:
            try:
                finished(request)
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

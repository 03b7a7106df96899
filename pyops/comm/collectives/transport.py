"""How tensors go from rank to rank: the one primitive that every algorithm is written against, and
two carriers.

    post(sends, receives) -> Pending   start some sends and receives together; wait() until all are
                                       done

    ProcessGroupTransport   point-to-point messages of a torch process group (Gloo, NCCL)
    VirtualTransport        n threads of one process as ranks: tests without processes, n ranks on
                            one GPU

Messages between two ranks arrive in the order they were posted. Empty tensors are not sent; both
sides know their sizes.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pyops import flight_record
from pyops.comm.failure import PeerError

__all__ = [
    "Pending",
    "ProcessGroupTransport",
    "Transport",
    "VirtualTransport",
    "exchange_bytes",
    "run_staggered",
    "run_virtual",
    "transport_of",
]

Messages = Sequence[tuple[Tensor, int]]  # (flat contiguous tensor, group rank)
T = TypeVar("T")
_TAG = 0x70796F  # keeps these messages apart from the user's own on the same group
_TASKS = Path("/proc/self/task")
_AT_EXIT = 0.5  # seconds that the process waits at most at its end


class Pending(Protocol):
    def wait(self) -> None:
        """Return when the sent tensors may be written and the received ones read. PeerError names a
        rank that failed."""


class Transport(Protocol):
    rank: int
    size: int

    def post(self, sends: Messages, receives: Messages) -> Pending:
        """Start sending and receiving; tensors must be left alone until the wait."""


class _Works:
    """Several c10d works, each with the rank at the other end."""

    def __init__(
        self, works: list[tuple[Any, int]], tensors: list[Tensor], group: dist.ProcessGroup
    ) -> None:
        self._works, self._group = works, group
        self._tensors = tensors  # alive until the wait

    def wait(self) -> None:
        for work, peer in self._works:
            try:
                with flight_record.message(self._group, "message", peer=peer):
                    work.wait()
            except RuntimeError as error:
                raise PeerError(peer, error) from error
        self._tensors.clear()


class ProcessGroupTransport:
    """Messages over a process group. Tensors travel as bytes where the backend is choosy about
    dtypes.

    On Gloo the messages carry a tag, so they never meet the user's collectives, nor those of a
    transport of another tag, whichever thread posts them. On NCCL the sends and receives of a
    `post` form one batch, so that they can't deadlock, and they follow the current stream.
    """

    def __init__(self, group: dist.ProcessGroup, *, tag: int = _TAG) -> None:
        _settle_at_exit()
        self._group, self._tag = weakref.ref(group), tag
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.bytes_sent = 0

    def post(self, sends: Messages, receives: Messages) -> Pending:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group of this transport was destroyed")
        sends = [(t, peer) for t, peer in sends if t.numel()]
        receives = [(t, peer) for t, peer in receives if t.numel()]
        tensors = [t for t, _ in (*sends, *receives)]
        self.bytes_sent += sum(t.numel() * t.element_size() for t, _ in sends)
        if tensors and tensors[0].is_cuda:
            return _Works(self._batch(group, sends, receives), tensors, group)
        # Receives first: Gloo sends when it knows that somebody waits.
        works = [self._start(group.recv, t, peer, self._tag) for t, peer in receives]
        works += [self._start(group.send, t, peer, self._tag) for t, peer in sends]
        return _Works(works, tensors, group)

    @staticmethod
    def _start(
        function: Callable[..., Any], tensor: Tensor, peer: int, tag: int
    ) -> tuple[Any, int]:
        try:
            return function([tensor], peer, tag), peer
        except RuntimeError as error:
            raise PeerError(peer, error) from error

    @staticmethod
    def _batch(
        group: dist.ProcessGroup, sends: Messages, receives: Messages
    ) -> list[tuple[Any, int]]:
        if not sends and not receives:
            return []
        operations = [
            dist.P2POp(function, t.view(torch.uint8), group=group, group_peer=peer)
            for function, messages in ((dist.isend, sends), (dist.irecv, receives))
            for t, peer in messages
        ]
        first_peer = (*sends, *receives)[0][1]
        try:
            return [(work, first_peer) for work in dist.batch_isend_irecv(operations)]
        except RuntimeError as error:
            raise PeerError(first_peer, error) from error


def transport_of(group: dist.ProcessGroup) -> Any:
    """The transport of a group: its own, where it has one (`pyops.comm.mpi`)."""
    own = getattr(group, "transport", None)
    return ProcessGroupTransport(group) if own is None else own()


@cache
def _settle_at_exit() -> None:
    """See `_settle`; once in a process."""
    atexit.register(_settle)


def _settle() -> None:
    """Wait until the threads of groups that are still open have let go of their last tensors.

    Gloo wakes up who waits for a collective before its own thread lets go of the tensors, for which
    that thread needs the interpreter. Where the interpreter is being taken down by then, the thread
    is ended in the middle of it, and with it the process, by an abort.
    """
    quiet, until = 0, time.monotonic() + _AT_EXIT
    while quiet < 2 and time.monotonic() < until:
        time.sleep(0.002)  # a thread that waits for the interpreter has it meanwhile
        quiet = 0 if _others_run() else quiet + 1


def _others_run() -> bool:
    """Whether another thread of this process computes; False where the system does not tell."""
    own = threading.get_native_id()
    for task in _TASKS.glob("*") if _TASKS.is_dir() else ():
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has just ended
            continue
        if state == "R" and task.name != str(own):
            return True
    return False


class _Letter:
    """A message that is to come from a peer, and the tensor that it is copied to."""

    def __init__(self, tensor: Tensor, peer: int) -> None:
        self.tensor, self.peer, self.here = tensor, peer, False

    def take(self, found: Any) -> None:
        """Copy what came."""
        tensor, self.here = self.tensor, True
        if found is None:
            raise PeerError(self.peer, "it ended")
        if found.numel() != tensor.numel() or found.dtype != tensor.dtype:
            sizes = f"{found.numel()} of {found.dtype} came for {tensor.numel()} of {tensor.dtype}"
            raise PeerError(self.peer, sizes)
        tensor.copy_(found)


class _Mail:
    def __init__(self, transport: VirtualTransport, letters: list[_Letter]) -> None:
        self._transport, self._letters = transport, letters

    def wait(self) -> None:
        for letter in self._letters:
            while not letter.here:
                self._transport.receive_next(letter.peer)


class VirtualTransport:
    """One of n ranks that are threads of this process; `run_virtual` makes them. Messages are
    copied when they are posted, and may be waited for in any order."""

    def __init__(
        self, rank: int, boxes: list[list[queue.SimpleQueue[Any]]], *, timeout: float
    ) -> None:
        self.rank, self.size = rank, len(boxes)
        self._boxes, self._timeout = boxes, timeout
        self._due: list[deque[_Letter]] = [deque() for _ in boxes]

    def post(self, sends: Messages, receives: Messages) -> Pending:
        for tensor, peer in sends:
            if tensor.numel():
                self._boxes[self.rank][peer].put(tensor.clone())
        letters = [_Letter(t, peer) for t, peer in receives if t.numel()]
        for letter in letters:
            self._due[letter.peer].append(letter)
        return _Mail(self, letters)

    def receive_next(self, peer: int) -> None:
        """The message of the oldest receive from the peer that is still to come."""
        letter = self._due[peer].popleft()
        try:
            found = self._boxes[peer][self.rank].get(timeout=self._timeout)
        except queue.Empty:
            letter.here = True
            raise PeerError(peer, f"nothing came within {self._timeout:g} s") from None
        letter.take(found)

    def end(self) -> None:
        """Tell every peer that nothing more will come."""
        for box in self._boxes[self.rank]:
            box.put(None)


def run_virtual(size: int, body: Callable[[Transport], T], *, timeout: float = 60.0) -> list[T]:
    """body(transport) on `size` threads, each a rank; the results in rank order. The first rank's
    exception is raised."""
    boxes: list[list[queue.SimpleQueue[Any]]] = [
        [queue.SimpleQueue() for _ in range(size)] for _ in range(size)
    ]
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        transport = VirtualTransport(rank, boxes, timeout=timeout)
        try:
            results[rank] = body(transport)
        except BaseException as error:
            errors[rank] = error
            transport.end()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A rank that failed by itself tells more than one that waited for it.
    for error in sorted(
        (e for e in errors if e is not None), key=lambda e: isinstance(e, PeerError)
    ):
        raise error
    return results


def run_staggered(rounds: Iterable[Iterator[Pending]], *, window: int) -> None:
    """Run generators that yield what they wait for, `window` of them at a time: while one waits,
    another computes.

    Every rank must be given generators that yield equally often: the order of posts is then the
    same on all ranks.
    """
    waiting: deque[tuple[Iterator[Pending], Pending]] = deque()

    def advance(generator: Iterator[Pending]) -> None:
        pending = next(generator, None)
        if pending is not None:
            waiting.append((generator, pending))

    for generator in rounds:
        while len(waiting) >= window:
            oldest, pending = waiting.popleft()
            pending.wait()
            advance(oldest)
        advance(generator)
    while waiting:
        oldest, pending = waiting.popleft()
        pending.wait()
        advance(oldest)


def exchange_bytes(transport: Transport, payload: bytes, *, width: int) -> list[bytes]:
    """Every rank's payload, in rank order, filled up with zeros to `width` bytes (equal on all
    ranks); CPU only."""
    if len(payload) > width:
        raise ValueError(f"payload of {len(payload)} bytes does not fit into width {width}")
    mine = torch.frombuffer(bytearray(payload.ljust(width, b"\0")), dtype=torch.uint8)
    rows = [
        mine if r == transport.rank else torch.empty(width, dtype=torch.uint8, device="cpu")
        for r in range(transport.size)
    ]
    others = [r for r in range(transport.size) if r != transport.rank]
    transport.post([(mine, r) for r in others], [(rows[r], r) for r in others]).wait()
    return [bytes(row.tolist()) for row in rows]

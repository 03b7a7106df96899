"""Shared memory: what a replica and a shard of one host both map, so that only headers travel.

    room        | header, push | header, parameters |   each written by one end, read by the other
    gradients   | flat vector | flat vector |           of a replica: computed in one, pushed in the
                                                        other; all shards of its host read them
    parameters  | flat vector |                         of a shard: its replicas read them

A room is of one session, and the header that travels says that the message in it is whole. Without
a codec a push lies in the gradients, where they were computed, and parameters are read where the
shard has them. Before those change, the shard copies them into the room of each replica that may
still be reading.
"""

from __future__ import annotations

import mmap
import os
import platform
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from pyops.parameter_server.messages import HEADER_BYTES, Fetched

__all__ = ["LOADS_IN_ORDER", "Gradients", "LentParameters", "Memory", "Room"]

LINE_BYTES = 64  # of a cache
COPIED, READ = 0, 1  # numbers of a room's last line
# A replica reads parameters and only then whether they were copied, which holds where the processor
# keeps the order of loads and of stores, as the memory model of x86 does.
LOADS_IN_ORDER = platform.machine() in ("x86_64", "AMD64")


class Memory:
    """Bytes that processes of one host map: a file without a name, which ends with the processes
    that have it. One makes it, others open its `address`.

    Args:
        file: Its number in this process.

    Attributes:
        bytes: All of it, uint8.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        mapped = mmap.mmap(file, os.fstat(file).st_size)
        self.bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self._close = weakref.finalize(self, os.close, file)

    @classmethod
    def make(cls, name: str, size: int) -> Memory:
        """New bytes, all 0. OSError where there is no memory for them."""
        if not hasattr(os, "memfd_create"):
            raise OSError("files without a name are Linux's")
        file = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(file, 0, size)
            return cls(file)
        except OSError:
            os.close(file)
            raise

    @property
    def address(self) -> list[int]:
        """What another process opens it by."""
        return [os.getpid(), self._file]

    @classmethod
    def open(cls, address: list[int]) -> Memory:
        """That of another process, on the same host. OSError where it can't be opened."""
        process, number = map(int, address)
        file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            found = cls(file)
        except BaseException:
            os.close(file)
            raise
        found.close()
        return found

    def close(self) -> None:
        """Close the file: nobody can open it any more. The bytes stay."""
        self._close()


class Gradients:
    """Two flat vectors of a replica, in memory that the shards of its host read: gradients are
    computed in one while a push is read in the other. The replica makes them.

    Args:
        memory: The bytes of both.
        numel: Numbers of each.
        dtype: Their dtype.

    Raises:
        OSError: The memory is of another size.
    """

    def __init__(self, memory: Memory, numel: int, dtype: torch.dtype) -> None:
        size = _whole_lines(numel * dtype.itemsize)
        if len(memory.bytes) != 2 * size:
            raise OSError(f"memory of {len(memory.bytes)} bytes for two vectors of {numel} {dtype}")
        self._memory = memory
        self.vectors = [half.view(dtype)[:numel] for half in memory.bytes.split(size)]

    @classmethod
    def make(cls, numel: int, dtype: torch.dtype) -> Gradients:
        """New ones, zero. OSError where there is no memory for them."""
        size = 2 * _whole_lines(numel * dtype.itemsize)
        return cls(Memory.make("pyops-session-gradients", size), numel, dtype)

    @property
    def address(self) -> list[int]:
        """What a shard opens them by, until they are closed."""
        return self._memory.address

    @classmethod
    def open(cls, address: list[int], numel: int, dtype: torch.dtype) -> Gradients:
        """Those of a replica on this host. OSError where they can't be opened."""
        return cls(Memory.open(address), numel, dtype)

    def part(self, start: int, numel: int) -> list[Tensor]:
        """The same numbers of both."""
        return [vector[start : start + numel] for vector in self.vectors]

    def close(self) -> None:
        """Close the file: no shard can open them any more. The numbers stay."""
        self._memory.close()


class Room:
    """Memory of both ends of a session. The replica makes it, the shard opens its `address`.

    Args:
        memory: The bytes.
        push_bytes: Of the payload of a push.
        fetch_bytes: Of the payload of a fetch's answer.

    Raises:
        OSError: The memory is of another size than both payloads ask for.
    """

    def __init__(self, memory: Memory, push_bytes: int, fetch_bytes: int) -> None:
        sizes = _sizes(push_bytes, fetch_bytes)
        if len(memory.bytes) != sum(sizes):
            raise OSError(f"a room of {len(memory.bytes)} bytes for messages of {sizes[:2]}")
        self._memory, self._fetch_bytes = memory, fetch_bytes
        parts: list[Tensor] = list(memory.bytes.split(sizes))
        self.pushes, self.fetches = parts[:2]
        self._numbers = parts[2].view(torch.int64)

    @classmethod
    def make(cls, push_bytes: int, fetch_bytes: int) -> Room:
        """A new one. OSError where there is no memory for it."""
        memory = Memory.make("pyops-session", sum(_sizes(push_bytes, fetch_bytes)))
        return cls(memory, push_bytes, fetch_bytes)

    @property
    def address(self) -> list[int]:
        """What the other end opens it by."""
        return self._memory.address

    @classmethod
    def open(cls, address: list[int], push_bytes: int, fetch_bytes: int) -> Room:
        """That of the other end, on the same host. OSError where it can't be opened."""
        return cls(Memory.open(address), push_bytes, fetch_bytes)

    def close(self) -> None:
        """Close the file: nobody can open the room any more. Its memory stays."""
        self._memory.close()

    # The two numbers of a fetch whose parameters are read where they lie; neither end waits.
    #     shard      looks at READ, copies, writes COPIED, changes the parameters
    #     replica    reads the parameters, looks at COPIED, reads the copy, writes READ
    # A replica that has seen a changed number sees COPIED, which was written before it.

    def settle(self, number: int, values: Tensor) -> None:
        """The shard's end, before its parameters change: copy them, unless fetch `number` has been
        read."""
        if int(self._numbers[READ]) != number:
            payload = self.fetches[HEADER_BYTES : HEADER_BYTES + self._fetch_bytes]
            payload.view(values.dtype).copy_(values)
            self._numbers[COPIED] = number

    def lent(self, number: int, parameters: Tensor) -> Iterator[Tensor]:
        """The replica's end: what fetch `number` is to read, and its copy where the parameters may
        have changed meanwhile."""
        yield parameters
        if int(self._numbers[COPIED]) == number:
            yield self.fetches[HEADER_BYTES : HEADER_BYTES + self._fetch_bytes]
        self._numbers[READ] = number


class LentParameters(Fetched):
    """Parameters that are read in the shard's memory.

    Args:
        answer: The reply's message.
        number: Of the fetch.
        room: Where the copy lies, if one is made.
        parameters: The shard's, as bytes.
    """

    def __init__(self, answer: Tensor, *, number: int, room: Room, parameters: Tensor) -> None:
        super().__init__(answer, whole=True)
        self._number, self._room, self._parameters = number, room, parameters

    def payloads(self) -> Iterator[Tensor]:
        """The parameters, and the copy where they have changed meanwhile."""
        yield from self._room.lent(self._number, self._parameters)


def _sizes(push_bytes: int, fetch_bytes: int) -> list[int]:
    """Bytes of a room's parts: both messages, and a line of numbers."""
    return [*(HEADER_BYTES + _whole_lines(size) for size in (push_bytes, fetch_bytes)), LINE_BYTES]


def _whole_lines(size: int) -> int:
    """Rounded up to whole lines of a cache."""
    return -(-size // LINE_BYTES) * LINE_BYTES

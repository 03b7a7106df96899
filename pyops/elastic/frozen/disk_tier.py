"""DiskTier: records of one size in a file without a name, which the processes of a host share; read
ahead of their use.

    put     record 7, record 2       written, side by side; back when all are
    ahead   record 4, record 9       begun to be read, back at once
    get     record 9, record 3       9 is there already or soon, 3 is read now

The file loses its name before it has a byte, the others open it through /proc: whatever ends the
processes, its space is free.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.agreement import agree, gather
from pyops.offload.async_file import PAGE, AsyncFile, Transfer, aligned_empty

__all__ = ["DiskTier", "page_multiple"]

AHEAD = 2  # batches that are read ahead: the one that is computed, and the next


class PendingRead(NamedTuple):
    """A record on its way.

    Attributes:
        version: What its tag said then.
    """

    version: Hashable
    values: Tensor
    transfer: Transfer


class DiskTier:
    """`records` tensors of `shape` and `dtype` in a file in `folder`, each from a page's start on.

    Args:
        group: The processes of one host that share it; each makes it. None: this process alone.

    Raises:
        OSError: On every rank alike, when there is no room. A record's `version` is whatever
            changes when others write it: what was read ahead of another is dropped.
    """

    def __init__(
        self,
        folder: str,
        *,
        records: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.records, self.shape, self.dtype = records, tuple(shape), dtype
        self._used = math.prod(self.shape) * dtype.itemsize
        self._size = page_multiple(self._used)
        self.nbytes = self._size * records
        self._file = _opened(folder, self.nbytes, group)
        self._ahead: deque[dict[int, PendingRead]] = deque()

    def put(self, places: Tensor, values: Tensor) -> None:
        """Write values [n, *shape] to the records [n]; back when they are there.

        Raises:
            OSError: When the disk does not take them.
        """
        for batch in self._ahead:  # what is read of them is old
            _wait([batch.pop(place).transfer for place in places.tolist() if place in batch])
        buffer = self._buffer(len(places))
        self._typed(buffer).copy_(values)
        going = [
            self._file.write(row, offset=self._size * place)
            for row, place in zip(buffer, places.tolist(), strict=True)
        ]
        _wait(going)

    def ahead(self, places: Tensor, versions: Sequence[Hashable]) -> None:
        """Begin to read these records. Those of the call before the last that nobody took are
        dropped."""
        while len(self._ahead) >= AHEAD:
            with contextlib.suppress(OSError):
                _wait([reading.transfer for reading in self._ahead.popleft().values()])
        wanted = [
            (place, version)
            for place, version in zip(places.tolist(), versions, strict=True)
            if all(place not in batch or batch[place].version != version for batch in self._ahead)
        ]
        buffer = self._buffer(len(wanted))
        typed = self._typed(buffer)
        self._ahead.append(
            {
                place: PendingRead(
                    version, typed[i], self._file.read(buffer[i], offset=self._size * place)
                )
                for i, (place, version) in enumerate(wanted)
            }
        )

    def get(self, places: Tensor, versions: Sequence[Hashable]) -> Tensor:
        """The records [n], [n, *shape].

        Raises:
            OSError: When the disk can't read one.
        """
        readings: list[PendingRead] = []
        buffer = self._buffer(len(places))
        typed = self._typed(buffer)
        for i, (place, version) in enumerate(zip(places.tolist(), versions, strict=True)):
            reading = next((batch[place] for batch in self._ahead if place in batch), None)
            if reading is None or reading.version != version:
                reading = PendingRead(
                    version, typed[i], self._file.read(buffer[i], offset=self._size * place)
                )
            readings.append(reading)
        _wait([reading.transfer for reading in readings])
        return torch.stack([reading.values for reading in readings]) if readings else typed

    def close(self) -> None:
        """Wait for what is under way, and close: this process' part in the file is over."""
        self._ahead.clear()
        self._file.close()

    def _buffer(self, rows: int) -> Tensor:
        return aligned_empty(rows * self._size).view(rows, self._size)

    def _typed(self, buffer: Tensor) -> Tensor:
        return buffer[:, : self._used].view(self.dtype).view(-1, *self.shape)


def page_multiple(nbytes: int) -> int:
    """So many bytes, and what is missing to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def _wait(going: Sequence[Transfer]) -> None:
    """For all, then the first error."""
    error: OSError | None = None
    for transfer in going:
        try:
            transfer.wait()
        except OSError as caught:
            error = error or caught
    if error is not None:
        raise error


def _nameless(folder: str) -> int:
    """A new file in the folder that nobody can name."""
    with contextlib.suppress(OSError):
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    path = os.path.join(
        folder, f"pyops-activations-{secrets.token_hex(8)}"
    )  # a file system without such files
    number = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    return number


def _opened(folder: str, nbytes: int, group: dist.ProcessGroup | None) -> AsyncFile:
    """The same file on every rank, or the same error."""
    error: Exception | None = None
    number = -1
    file: AsyncFile | None = None
    if group is None or dist.get_rank(group) == 0:
        try:
            room = os.statvfs(folder)
            if (
                nbytes > room.f_bavail * room.f_frsize
            ):  # before the disk is filled to its last byte to find that out
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            number = _nameless(folder)
            os.posix_fallocate(number, 0, nbytes)
        except OSError as caught:
            error = OSError(f"no file of {nbytes} bytes in {folder}: {caught.strerror}")
    path = f"/proc/{os.getpid()}/fd/{number}"
    try:
        if group is None:
            if error is None:
                file = AsyncFile(path, temporary=False)
        else:
            path, failed = gather((path, error is not None), group=group)[0]
            try:
                if not failed:
                    file = AsyncFile(path, temporary=False)
            except OSError as caught:
                error = caught
            agree(error, group=group)
        if error is not None:
            raise error
    finally:
        if number >= 0:
            os.close(number)
    assert file is not None
    return file

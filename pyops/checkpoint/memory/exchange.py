"""Files of every rank, handed to its neighbor: in messages of 32 MiB, while those of another come.

turn    rank 0 sends              rank 0 receives, and appends
0       shards, bytes 0-32 Mi     shards, bytes 0-32 Mi
1       shards, 32-40 Mi          shards, 32-40 Mi
2       header                    header, the last: what has none is not whole

A neighbor that sees the files, on the same host, copies them itself: once, in the kernel, where a
message is read, sent, received and written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pyops.checkpoint.memory.snapshot import HEADER
from pyops.comm.agreement import gather, naming_lost_ranks

__all__ = ["exchange"]

CHUNK = 32 << 20  # bytes of a message to the neighbor
Files = Sequence[tuple[str, int]]  # name, bytes
Piece = tuple[str, int, int]  # name, first byte, bytes


def exchange(
    folder: Path, files: Files, received: Path, *, to: int, source: int, host: str
) -> OSError | None:
    """Hand files to one rank, and take another's. A collective of the default group.

    Args:
        folder: Of the files that are handed over.
        files: Their names and bytes.
        received: A folder that is made for those that arrive; one that is there goes first.
        to: The rank that gets them.
        source: The rank whose files are taken.
        host: The same on all ranks of a host, and on no others.

    Returns:
        What this rank could not read or write, if anything. The messages go round nevertheless, so
        that no rank waits for one.

    Raises:
        CommunicationError: A rank is lost.
    """
    told = gather((files, folder, _identity(folder, host)))
    theirs, there, identity = told[source]
    copies = gather(_identity(there, host) == identity)  # of each rank, whether it does
    error: OSError | None = None
    try:
        shutil.rmtree(received, ignore_errors=True)
        received.mkdir()
        if copies[dist.get_rank()]:
            _copy(there, theirs, received)
    except OSError as caught:
        error = caught
    outgoing = [] if copies[to] else _pieces(files)
    incoming = [] if copies[dist.get_rank()] else _pieces(theirs)
    with naming_lost_ranks("handing a checkpoint to the neighbor", group=None):
        for turn in range(max(len(outgoing), len(incoming))):
            works, arrived = [], None
            if turn < len(outgoing):
                name, start, length = outgoing[turn]
                try:
                    piece = _read(folder / name, start, length)
                except OSError as caught:
                    error = error or caught
                    piece = np.zeros(length, np.uint8)  # the neighbor waits for so many bytes
                works.append(dist.isend(torch.from_numpy(piece), to))
            if turn < len(incoming):
                arrived = torch.empty(incoming[turn][2], dtype=torch.uint8, device="cpu")
                works.append(dist.irecv(arrived, source))
            for work in works:
                if work is not None:
                    work.wait()
            if arrived is None or error is not None:
                continue
            try:
                with open(received / incoming[turn][0], "ab") as file:
                    file.write(arrived.numpy().data)
            except OSError as caught:
                error = caught
    return error


def _identity(folder: Path, host: str) -> tuple[str, int, int] | None:
    """What no other folder has, on any host; None for one that is not seen here."""
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return host, found.st_dev, found.st_ino


def _copy(folder: Path, files: Files, received: Path) -> None:
    """Copy files of a folder, the header last. OSError where one has not as many bytes."""
    for name, size in _in_order(files):
        shutil.copyfile(folder / name, received / name)
        if (received / name).stat().st_size != size:
            raise OSError(f"{name} was cut off while it was copied")


def _in_order(files: Files) -> Files:
    """The header is the last."""
    return sorted(files, key=lambda file: (file[0] == HEADER, file[0]))


def _pieces(files: Files) -> list[Piece]:
    """Messages of which the files are made."""
    return [
        (name, start, min(CHUNK, size - start))
        for name, size in _in_order(files)
        for start in range(0, size, CHUNK)
    ]


def _read(path: Path, start: int, length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A piece of a file. OSError where it has fewer bytes."""
    piece = np.fromfile(path, np.uint8, length, offset=start)
    if len(piece) != length:
        raise OSError(f"{path.name} was cut off while it was read")
    return piece

"""A file that tensors are read from and written to while the program computes
(csrc/native/async_file.cpp).

    file = AsyncFile("/fast/disk", nbytes=1 << 30)       a nameless file in the folder, its space
                                                         reserved
    going = file.write(tensor, offset=0); ...; going.wait()

O_DIRECT where the file system takes it: the page cache neither fills memory nor copies. io_uring
where the kernel lets us, else threads.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import torch
from torch import Tensor

from pyops.host_memory import pinned_empty
from pyops.ops.library import native
from pyops.ops.memory import memory_problem

__all__ = ["AsyncFile", "Transfer", "aligned_empty"]

PAGE = 4096


def aligned_empty(nbytes: int, *, pin_memory: bool = False) -> Tensor:
    """Uninitialised uint8 [nbytes] in host memory whose address O_DIRECT takes: nothing goes
    through a bounce buffer."""
    if pin_memory:
        return pinned_empty(nbytes)
    whole = torch.empty(nbytes + PAGE, dtype=torch.uint8, device="cpu")
    start = -whole.data_ptr() % PAGE
    return whole[start : start + nbytes]


class Transfer:
    """One read or write under way. The file keeps its tensor alive until `wait`, or until it is
    closed."""

    def __init__(self, file: Any, ticket: int, tensor: Tensor) -> None:
        self._file, self._ticket, self._tensor = file, ticket, tensor
        self._waiting = True

    def wait(self) -> Tensor:
        """The tensor, when all its bytes have moved.

        Raises:
            OSError: Naming file, bytes and offset; only the first time.
        """
        if self._waiting:
            self._waiting = False
            self._file.wait(self._ticket)
        return self._tensor

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return not self._waiting or self._file.done(self._ticket)


class AsyncFile:
    """A file of at least `nbytes` bytes for asynchronous reads and writes of tensors, of any size
    and at any offset.

    Args:
        path: A folder, in which a file without a name is made: its space is given back when it is
            closed or the process ends, however it does. Or, with temporary=False, a file, which is
            made if need be and stays.
        nbytes: Room that is reserved at once, and reads as zeros until it is written. OSError names
            the file when there is none.
        engine: "io_uring", "threads", or "auto".
        direct: Try O_DIRECT; without it the page cache is used.
        piece_bytes: How much one operation of the kernel moves.
        depth: How many of them are in its hands (io_uring).
        threads: How many threads move them otherwise.
        engine, direct: What it came to. bytes_read, bytes_written: asked for so far.
    """

    def __init__(
        self,
        path: str,
        *,
        nbytes: int = 0,
        temporary: bool = True,
        engine: str = "auto",
        direct: bool = True,
        piece_bytes: int = 4 << 20,
        depth: int = 32,
        threads: int = 4,
    ) -> None:
        module = native()
        if module is None:
            raise RuntimeError(
                "pyops was built without kernels (PYOPS_NO_EXT=1), and files are read "
                "and written by one of them"
            )
        path = os.path.abspath(os.fspath(path))
        if temporary:
            if not os.path.isdir(path):
                raise ValueError(
                    f"{path} is no folder; make it first, on the disk that is to be used"
                )
            path = os.path.join(path, f"pyops-{os.getpid()}-{secrets.token_hex(6)}")
        self._file = module.AsyncFile(
            path, nbytes, engine, direct, temporary, depth, threads, piece_bytes
        )
        self.path, self.engine, self.direct = path, self._file.engine, self._file.direct
        self.bytes_read = self.bytes_written = 0

    def read(self, tensor: Tensor, *, offset: int) -> Transfer:
        """Begin to fill `tensor` (contiguous, in host memory) with the file's bytes from `offset`
        on."""
        pointer, nbytes = _memory_of(tensor)
        self.bytes_read += nbytes
        return Transfer(self._file, self._file.read(pointer, nbytes, offset, tensor), tensor)

    def write(self, tensor: Tensor, *, offset: int) -> Transfer:
        """Begin to write `tensor` (contiguous, in host memory) to the file at `offset`; it must not
        change meanwhile."""
        pointer, nbytes = _memory_of(tensor)
        self.bytes_written += nbytes
        return Transfer(self._file, self._file.write(pointer, nbytes, offset, tensor), tensor)

    def close(self) -> None:
        """Wait for what is under way, without raising its errors, and close. A temporary file is
        gone then."""
        self._file.close()


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    what = f"a tensor of shape {tuple(tensor.shape)} on {tensor.device}"
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.is_contiguous():
        how = (
            f"strides {tensor.stride()}"
            if tensor.layout == torch.strided
            else f"layout {tensor.layout}"
        )
        raise ValueError(
            f"{what} with {how} can't be transferred; expected a contiguous one in host memory"
        )
    if tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor():
        raise ValueError(
            f"{what} can't be transferred: it is a view whose sign, conjugate or zeros "
            "are still to be computed "
            "(torch._neg_view, conj()), and its memory holds other values; pass "
            "resolve_neg().resolve_conj() of it"
        )
    if (problem := memory_problem(tensor)) is not None:
        raise ValueError(f"{what} can't be transferred: it {problem}")
    return tensor.data_ptr(), tensor.nbytes

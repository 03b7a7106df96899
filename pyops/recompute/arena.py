"""One piece of memory, taken once, for tensors that come and go: the heap never fragments.

    arena = Arena(1 << 30)
    x = arena.empty((8, 1024), dtype=torch.bfloat16)   an ordinary tensor; its memory returns when
                                                       the last view of it goes

    | x | y | z |            |      a mark moves up with each tensor
    | x |...| z |            |      y is gone: a hole, unless what is above goes too, as activations
                                    do in backward
    | x |   | z | y's place and the rest as one piece       defragment(): pages are mapped anew, x,
                                                            z and all views stay

Host memory (csrc/native/arena.h).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from pyops.ops.library import native

__all__ = ["Arena"]


class Arena:
    """`nbytes` of host memory, all of it in memory from now on, given out as tensors.

    nbytes, used, peak: bytes in all, in tensors that are alive, and the most there were. room: what
    is free in one piece, above the mark. Every tensor begins at a page of 4096 bytes, and takes
    whole ones. A process that forks shares the memory with its child, and should leave it alone
    there.

    Args:
        pin_memory: Registered with CUDA as long as this object lives, so that copies from and to a
            GPU overlap with computation.

    Raises:
        ValueError: For a size below 1.
        RuntimeError: Where the system has not so much memory, or pyops was built without kernels.
    """

    def __init__(self, nbytes: int, *, pin_memory: bool = False) -> None:
        module = native()
        if module is None:
            raise RuntimeError(
                "pyops was built without kernels (PYOPS_NO_EXT=1), and the arena is one of them"
            )
        self._arena = module.Arena(nbytes)
        self.nbytes: int = self._arena.bytes
        self._copies: list[torch.cuda.Event] = []
        if pin_memory:
            error = torch.cuda.cudart().cudaHostRegister(self._arena.address, self.nbytes, 0)
            if int(error):
                raise RuntimeError(
                    f"CUDA could not pin {self.nbytes} bytes of host memory: error "
                    f"{int(error)}; ask for less"
                )
            weakref.finalize(self, _unpin, self._arena, self._arena.address).atexit = False

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised contiguous tensor.

        Raises:
            RuntimeError: Naming the sizes, where that much is not free.
        """
        nbytes = prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        block = self._arena.allocate(nbytes)
        if block is None:
            raise RuntimeError(
                f"the arena of {self.nbytes} bytes has {self.nbytes - self.used} free, "
                f"and a tensor of shape {tuple(shape)} "
                f"and {dtype} takes {nbytes}; make the arena larger"
            )
        return torch.frombuffer(block, dtype=torch.uint8).view(dtype).view(tuple(shape))

    def copying_until(self, event: torch.cuda.Event) -> None:
        """A copy from or to a tensor of the arena is under way on a CUDA stream until `event`."""
        self._copies = [*self.copies(), event]

    def copies(self) -> list[torch.cuda.Event]:
        """Events of copies that are still under way. The tensor of one may be gone, and its memory
        another tensor's: whatever writes there has to wait for them."""
        self._copies = [event for event in self._copies if not event.query()]
        return self._copies

    def defragment(self) -> int:
        """Make what is free one piece, and return its bytes. Tensors and views keep contents and
        addresses.

        `empty` does it by itself when a tensor fits in no other way.
        """
        self._arena.defragment()
        return self.room

    @property
    def used(self) -> int:
        """Bytes that tensors of the arena take now."""
        return int(self._arena.used)

    @property
    def peak(self) -> int:
        """The most bytes that were taken at a time."""
        return int(self._arena.peak)

    @property
    def room(self) -> int:
        """The largest number of bytes that a tensor can take now."""
        return int(self._arena.room)


def _unpin(arena: object, address: int) -> None:
    """Before the memory goes, which `arena` holds until then: pages that CUDA keeps would stay
    taken, and their addresses could not be pinned again."""
    torch.cuda.synchronize()  # copies may still be under way
    torch.cuda.cudart().cudaHostUnregister(address)

"""How much memory the C library has given out, for tests of what is kept and for how long."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["allocated"]


class _Info(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


@functools.cache
def _mallinfo() -> Callable[[], _Info]:
    """The C library's function, opened once: each opening leaves reference cycles, which are memory
    themselves until the garbage collector comes."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Info
    return mallinfo


def allocated() -> int:
    """Bytes that malloc has given out and not got back, of all threads."""
    info = _mallinfo()()
    return int(info.uordblks + info.hblkhd)

"""How much memory the C library has given out, for tests of what is kept and for how long."""

from __future__ import annotations

import ctypes

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


def allocated() -> int:
    """Bytes that malloc has given out and not got back, of all threads."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Info
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)

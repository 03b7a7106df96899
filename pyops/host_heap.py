"""What the C library's allocator keeps of memory that was freed, and how to give it back.

allocated   ####--##-#---##--####-   -: freed, in pieces that the next step's tensors don't fit into
trimmed     ####  ##  ###  ####      whole pages of it go back to the system
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

__all__ = ["trim", "trim_after"]

STEPS = 100  # between two trims


@cache
def _malloc_trim() -> object:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not


def trim() -> bool:
    """Give freed host memory back to the system; whether there was any, False where the C library
    can't.

    Tensors of many sizes, made and freed step by step on the CPU, leave gaps that glibc does not
    fill again: nothing is lost, but the resident memory of a process grows with its steps. Takes
    some milliseconds.
    """
    trimmed = _malloc_trim()
    return bool(trimmed(0)) if callable(trimmed) else False


def trim_after(step: int) -> None:
    """`trim` once in a hundred steps."""
    if step % STEPS == 0:
        trim()

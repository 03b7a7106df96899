"""The line of the user's program that a call comes from."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from types import FrameType

import torch

__all__ = ["user_frame"]

LIBRARIES = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(contextlib.__file__) + os.sep,  # Python's own library
    os.path.join(sys.prefix, "bin") + os.sep,
)
OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep  # the package pyops
CARRIERS = tuple(OWN + name for name in ("comm", "flight_record", "failure", "mesh"))


@functools.lru_cache(maxsize=4096)
def _is_of(path: str) -> str:
    """Whose source a file is: "user", "room" of pyops that communicates, or "" for neither. A walk
    meets the same files again and again, and a lookup takes a tenth of the comparisons."""
    if path.startswith(OWN):
        return "" if path.startswith(CARRIERS) else "room"
    return "" if path.startswith((*LIBRARIES, "<")) else "user"


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's program, or else of the room of pyops that communicates;
    None outside of both.

    Args:
        frame: Where to begin; its callers are looked at.
    """
    own = None
    while frame is not None:
        whose = _is_of(frame.f_code.co_filename)
        if whose == "user":
            return frame
        if whose and own is None:
            own = frame
        frame = frame.f_back
    return own

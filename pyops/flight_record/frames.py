"""The line of the user's program that a call comes from."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from types import FrameType

import torch

__all__ = ["described", "user_frame", "whose"]

LIBRARIES = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(contextlib.__file__) + os.sep,  # Python's own library
    os.path.join(sys.prefix, "bin") + os.sep,
)
OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep  # the package pyops
PLACE_BYTES = 115  # of an entry
CARRIERS = tuple(OWN + name for name in ("comm", "flight_record", "failure", "mesh"))


@functools.lru_cache(maxsize=4096)
def whose(path: str) -> str:
    """Whose source a file is: "user", "room" of pyops that communicates, or "" for neither.

    A walk meets the same files again and again, and a lookup takes a tenth of the comparisons.
    """
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
        side = whose(frame.f_code.co_filename)
        if side == "user":
            return frame
        if side and own is None:
            own = frame
        frame = frame.f_back
    return own


def described(frame: FrameType) -> bytes:
    """The line of a frame for an entry: the end of the file's path, the line, the function."""
    code = frame.f_code
    parts = "/".join(Path(code.co_filename).parts[-3:])
    return f"{parts}:{frame.f_lineno} {code.co_name}".encode()[-PLACE_BYTES:]

"""The line of the user's program that a call comes from."""

from __future__ import annotations

import contextlib
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


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's program, or else of the room of pyops that communicates;
    None outside of both.

    Args:
        frame: Where to begin; its callers are looked at.
    """
    own = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OWN):
            if own is None and not name.startswith(CARRIERS):
                own = frame
        elif not name.startswith(LIBRARIES) and not name.startswith("<"):
            return frame
        frame = frame.f_back
    return own

"""A program in a process of the fork server, which need not import torch, and what it prints."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from typing import Any, TextIO

from tests.workers import fork_server

__all__ = ["start_program"]


def _run(source: str, arguments: tuple[str, ...], printed: Connection) -> None:
    os.dup2(printed.fileno(), 1)
    sys.argv[1:] = arguments
    exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})


def start_program(source: str, *arguments: str) -> tuple[Any, TextIO]:
    """Start `python -c source arguments`, for programs that are killed: what a process does at
    its end is not what an interpreter of its own does.

    Returns:
        The process of multiprocessing, and the lines of its standard output.
    """
    context = fork_server()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(source, arguments, theirs))
    process.start()
    theirs.close()
    with ours:
        return process, os.fdopen(os.dup(ours.fileno()))

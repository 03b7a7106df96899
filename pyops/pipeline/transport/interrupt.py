"""Interrupts wait: a Ctrl-C in a step is raised on its rank once the others know of it: no rank
waits for one that left.

    rank 0   0F0  0F1  0F2   -   -   -   the step ends: RuntimeError, rank 1 was interrupted
    rank 1   1F0  1B0 ^C  -   -   -   -  the step ends: KeyboardInterrupt            - sends that it failed, computes nothing

The action under way ends first. A second Ctrl-C is raised at once, wherever the rank is; then the
pipeline is of no more use.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["Interrupt", "defer_interrupts"]


class Interrupt:
    """Whether an interrupt waits to be raised."""

    def __init__(self) -> None:
        self.waits = False

    def check(self) -> None:
        """Raise the one that waits."""
        if self.waits:
            self.waits = False
            raise KeyboardInterrupt

    def note(self, number: int, frame: Any) -> None:
        """A signal handler."""
        if self.waits:
            raise KeyboardInterrupt
        self.waits = True


@contextlib.contextmanager
def defer_interrupts() -> Iterator[Interrupt]:
    """Within, SIGINT is noted; what nobody has raised by the end is raised then. Only on the main
    thread, where Python raises it, and only where it would: a handler of somebody's own is left
    alone."""
    interrupt = Interrupt()
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt.note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt.check()

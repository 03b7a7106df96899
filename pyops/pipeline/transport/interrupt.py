"""Interrupts wait: a Ctrl-C in a step is raised on its rank once the others know of it: no rank
waits for one that left.

    rank 0   0F0  0F1  0F2   -   -   -   the step ends: RuntimeError, rank 1 was interrupted
    rank 1   1F0  1B0 ^C  -   -   -   -  the step ends: KeyboardInterrupt

    -        sends that it failed, computes nothing

The action in progress ends first. A second Ctrl-C is raised at once, wherever the rank is; then the
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
    """An interrupt that is held back; `pending` while one waits to be raised."""

    def __init__(self) -> None:
        self.pending = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if one is pending."""
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt

    def handle(self, number: int, frame: Any) -> None:
        """The signal handler: the first interrupt is held back, a second one is raised."""
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True


@contextlib.contextmanager
def defer_interrupts() -> Iterator[Interrupt]:
    """Within, SIGINT is held back; one that is still pending at the end is raised then. Only on the
    main thread, where Python raises it, and only with Python's own handler: a handler that the
    program has set stays in place."""
    interrupt = Interrupt()
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt.handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt.check()

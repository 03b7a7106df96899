"""What an asynchronous collective returns, and the thread on which CPU collectives run in the order
of their calls.

caller   all_reduce(a, async_op=True)   all_reduce(b, async_op=True)   all_reduce(c)
thread       |-- a --|-- b --|-- c --|            c is executed after a and b: the order of the
                                                  calls, which is the same on every rank
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyops import flight_record

__all__ = ["StreamWork", "ThreadWork", "Work", "Worker"]


class Work:
    """A collective that may still be on its way. This class itself: one that is finished."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> Tensor:
        """The result, when it is there; raises what went wrong. On CUDA the current stream waits,
        not the host."""
        return self._result

    def is_completed(self) -> bool:
        return True


class ThreadWork(Work):
    """A collective that runs on a `Worker`."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self._function: Callable[[], Tensor] | None = function
        self.done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            assert self._function is not None
            with torch.no_grad():
                self._result = self._function()
        except BaseException as error:
            self._error = error
        self._function = None  # and the tensors that it holds
        self.done.set()

    def wait(self) -> Tensor:
        if not self.done.is_set():
            record = flight_record.active()
            if record is None:
                self.done.wait()
            else:
                record.run(0, self.done.wait)
        if self._error is not None:
            raise self._error
        # its memory is of the thread's stream, and must not be used there again before this one's
        # end
        if self._result.is_cuda:
            self._result.record_stream(torch.cuda.current_stream(self._result.device))
        return self._result

    def is_completed(self) -> bool:
        return self.done.is_set()


class StreamWork(Work):
    """A collective that was put on a CUDA stream of its own."""

    def __init__(self, result: Tensor, event: Any) -> None:
        super().__init__(result)
        self._event = event

    def wait(self) -> Tensor:
        stream = torch.cuda.current_stream(self._result.device)
        stream.wait_event(self._event)
        self._result.record_stream(stream)
        return self._result

    def is_completed(self) -> bool:
        return bool(self._event.query())


def _serve(inbox: queue.SimpleQueue[ThreadWork | None]) -> None:
    while True:
        work = inbox.get()
        if work is None:
            return
        work.run()
        del work  # its result belongs to the caller, while this thread waits for the next one


class Worker:
    """One thread that runs works in the order given, from the first work on until this object, or
    the program, ends."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._inbox: queue.SimpleQueue[ThreadWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: threading.Event | None = None  # that of a work, which would hold its result

    @property
    def busy(self) -> bool:
        return self._last is not None and not self._last.is_set()

    def submit(self, function: Callable[[], Tensor]) -> ThreadWork:
        if self._thread is None:
            # The thread holds the inbox only, so it does not keep this object alive.
            self._thread = threading.Thread(
                target=_serve, args=(self._inbox,), name=self._name, daemon=True
            )
            self._thread.start()
            stop = weakref.finalize(self, self._inbox.put, None)
            stop.atexit = False
            atexit.register(_stop_at_exit, weakref.ref(self))
        work = ThreadWork(function)
        self._last = work.done
        self._inbox.put(work)
        return work

    def stop(self, *, patience: float = 1.0) -> None:
        """End the thread when its works are done; a stuck one is left to the end of the process. A
        later work starts anew."""
        if self._thread is None:
            return
        self._inbox.put(None)
        self._thread.join(patience)
        self._thread, self._inbox = None, queue.SimpleQueue()


def _stop_at_exit(worker: weakref.ref[Worker]) -> None:
    # A thread that comes back from native code while the interpreter is being taken down ends the
    # process with an abort.
    if (alive := worker()) is not None:
        alive.stop()

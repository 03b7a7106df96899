"""Prefetched: a thread makes the next batches while the step computes; the cursor is that of the
batch which was taken, not of the one that was made.

    thread   make 3 | make 4 |  (the queue is full)   | make 5
    queue    [3, 4]                                     [4]
    step        2                    take 3              3          state_dict(): behind 3
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

__all__ = ["BatchStream", "Prefetched"]


class BatchStream(Protocol):
    """Endless batches that go on where a state was taken."""

    def next(self) -> dict[str, Tensor]:
        """The next batch of this rank."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where it is, behind the batch that was given last."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batch after which `state` was taken.

        Args:
            state: Of `state_dict`.
        """
        ...


Made = tuple[dict[str, Tensor], dict[str, Any]] | Exception


class Prefetched:
    """The batches of another stream, made ahead by a thread.

    Args:
        batches: The stream, which nothing else may use from now on.
        depth: How many batches are made ahead; 0: none, and there is no thread.

    Attributes:
        waited_s: Seconds that `next` has waited for batches in all.

    Raises:
        ValueError: When `depth` is negative.
    """

    def __init__(self, batches: BatchStream, *, depth: int = 2) -> None:
        if depth < 0:
            raise ValueError(f"depth is {depth}; give a number of batches, or 0 for none ahead")
        self._batches, self._depth = batches, depth
        self._state = batches.state_dict()
        self._worker: _Worker | None = None
        self._stop: weakref.finalize[..., Any] | None = None
        self.waited_s = 0.0

    def next(self) -> dict[str, Tensor]:
        """The next batch of this rank.

        Raises:
            Exception: What the stream raised, in the order of its batches.
        """
        started = time.perf_counter()
        try:
            if not self._depth:
                found = self._batches.next()
                self._state = self._batches.state_dict()
                return found
            if self._worker is None:
                self._worker = _Worker(self._batches, self._depth)
                # Not a method of this object, which the thread would keep alive.
                self._stop = weakref.finalize(self, self._worker.stop)
            made = self._worker.take()
        finally:
            self.waited_s += time.perf_counter() - started
        if isinstance(made, Exception):
            self.close()
            raise made
        batch, self._state = made
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the stream was behind the batch that `next` gave last."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batch after which `state` was taken; what was made ahead is dropped.

        Args:
            state: Of `state_dict`, of this or of the stream itself.
        """
        self.close()
        self._batches.load_state_dict(dict(state))
        self._state = self._batches.state_dict()

    def close(self) -> None:
        """End the thread, and set the stream back behind the batch that was taken last."""
        if self._stop is not None:
            self._stop()
            self._worker, self._stop = None, None
            self._batches.load_state_dict(dict(self._state))


class _Worker:
    """The thread and its queue."""

    def __init__(self, batches: BatchStream, depth: int) -> None:
        self._queue: queue.Queue[Made] = queue.Queue(depth)
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(batches,), name="pyops: next batches", daemon=True
        )
        self._thread.start()

    def _run(self, batches: BatchStream) -> None:
        while not self._over.is_set():
            made: Made
            try:
                made = batches.next(), batches.state_dict()
            except Exception as error:  # raised where the batch is taken
                made = error
            self._queue.put(made)
            if isinstance(made, Exception):
                return

    def take(self) -> Made:
        return self._queue.get()

    def stop(self) -> None:
        self._over.set()
        while self._thread.is_alive():  # one that waits for room in the queue is let go on
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

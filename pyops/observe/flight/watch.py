"""A thread on each rank that sees when a collective does not come to its end, and has all ranks say
where they stand.

    oldest call older than `patience`, SIGUSR2, or another rank asks
        -> rankR.stacks: the stacks of all threads    folder/ask: the others do the same
    rank that saw it first: reads all records, says the verdict through logging ("pyops")
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from pyops.flight_record import FlightRecord, user_frame
from pyops.observe.flight.reading import FlightError, read_records
from pyops.observe.flight.verdict import explain

__all__ = ["watched", "write_stacks"]

LOOK_EVERY = 0.5  # seconds
LOOKS_TO_ANSWER = 4  # within which the other ranks write their stacks
logger = logging.getLogger("pyops.observe")


@contextlib.contextmanager
def watched(
    record: FlightRecord, *, patience: float = 60.0, look_every: float = LOOK_EVERY
) -> Iterator[None]:
    """Within the block, watch a rank's calls.

    On the main thread, SIGUSR2 asks all ranks to say where they stand.

    Args:
        record: Of this rank, being written.
        patience: Seconds after which a call that has not ended is a hang; shorter than the group's
            timeout, at which the ranks are ended.
        look_every: Seconds between two looks.

    Raises:
        ValueError: `patience` or `look_every` is not more than 0.
    """
    if not (patience > 0 and look_every > 0):
        raise ValueError(
            f"patience is {patience} and look_every is {look_every}; give seconds, more than 0"
        )
    (record.folder / "ask").unlink(missing_ok=True)
    listening, waking = os.pipe()
    os.set_blocking(waking, False)
    with _signal_to(waking):
        thread = threading.Thread(
            target=_watch,
            args=(record, listening, patience, look_every),
            name="pyops flight watch",
            daemon=True,
        )
        thread.start()
        try:
            yield
        finally:
            os.write(waking, b"\0")
            thread.join(10 * look_every * LOOKS_TO_ANSWER)
    os.close(listening)
    os.close(waking)


@contextlib.contextmanager
def _signal_to(descriptor: int) -> Iterator[None]:
    """SIGUSR2 writes its number there, also while the main thread is in native code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGUSR2, _nothing)
    others = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(others)
        signal.signal(signal.SIGUSR2, before)


def _nothing(number: int, frame: FrameType | None) -> None:
    """The number comes by the descriptor."""


def _watch(record: FlightRecord, listening: int, patience: float, look_every: float) -> None:
    ask = record.folder / "ask"
    answered, told = 0.0, 0.0  # the last request that was answered; the call that was told of
    while True:
        ready, _, _ = select.select([listening], [], [], look_every)
        numbers = os.read(listening, 64) if ready else b""
        if 0 in numbers:
            return
        record.alive()
        oldest = record.oldest
        late = oldest is not None and oldest != told and time.monotonic() - oldest > patience
        asked = signal.SIGUSR2 in numbers
        with contextlib.suppress(OSError):
            if late or asked:
                told = oldest or told
                first = not ask.exists() or time.time() - ask.stat().st_mtime > patience
                if first or asked:
                    ask.write_text(f"rank {record.rank}")
                    write_stacks(record)
                    answered = ask.stat().st_mtime
                    time.sleep(LOOKS_TO_ANSWER * look_every)
                    _say(record)
            elif ask.exists() and (when := ask.stat().st_mtime) > answered:
                answered = when
                write_stacks(record)


def write_stacks(record: FlightRecord) -> None:
    """Write where all threads of this process stand to rankR.stacks: {thread: lines}, a line of the
    user's program last.

    Args:
        record: Of this rank.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = {}
    for number, frame in sys._current_frames().items():
        lines = []
        at: FrameType | None = frame
        while at is not None:
            code = at.f_code
            lines.append(f"{code.co_filename}:{at.f_lineno} {code.co_name}")
            at = at.f_back
        user = user_frame(frame)
        if user is not None:
            code = user.f_code
            lines.insert(0, f"{code.co_filename}:{user.f_lineno} {code.co_name}")
        found[names.get(number, str(number))] = lines[::-1]
    path = record.folder / f"rank{record.rank}.stacks"
    path.with_suffix(".tmp").write_text(json.dumps(found))
    path.with_suffix(".tmp").replace(path)
    record.flush()


def _say(record: FlightRecord) -> None:
    try:
        text = explain(read_records(record.folder))
    except FlightError as error:
        text = str(error)
    logger.warning("a collective does not come to its end; %s", text)

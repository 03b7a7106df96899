"""Supervisor: starts the ranks of a run on this host, and another process for each that dies.

    supervisor   serves the store in which the ranks meet, and outlives them
      rank 0     pid 100                                   runs on
      rank 1     pid 101, killed -> pid 102, killed -> ...  as long as steps are taken between

torchrun starts all ranks again where one dies; here the others stay, and keep the state.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

import torch.distributed as dist

from pyops.healing.quorum import noted_steps

__all__ = ["STARTED", "Supervisor", "start_process"]

STARTED = "PYOPS_HEALING"  # tells a rank that it is replaced where it dies
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
LOOK_EVERY = 0.05  # seconds between two looks at the processes
GRACE = 30.0  # seconds that the others have where one ended that is not replaced
UNCAUGHT = 1  # exit code of a Python process that an exception ended


class Process(Protocol):
    """What is asked of a process: subprocess.Popen has it."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    def poll(self) -> int | None:
        """The exit code, minus the number of the signal that killed it; None while it runs."""
        ...

    def send_signal(self, number: int, /) -> None:
        """Send it a signal."""
        ...


Start = Callable[[Mapping[str, str]], Process]
"""Starts a rank, given the variables that are added to its environment."""


def start_process(command: Sequence[str], given: Mapping[str, str] | None = None) -> Start:
    """What starts this command as a rank.

    Args:
        command: Its words.
        given: Variables of every rank, beside this process's.
    """

    def start(variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
        return subprocess.Popen(command, env={**inherited, **(given or {}), **variables})

    return start


class Supervisor:
    """Runs `ranks` processes to their end.

    A process is replaced that a signal killed or an exception ended. It is not where any rank has
    ended by itself, with a code of its own, or where replacements have come `most_idle` times in a
    row without a step between: then the others get some seconds, and are ended.

    Args:
        start: Starts a rank.
        ranks: How many.
        most_idle: Replacements in a row between which no step is taken; 0: any number.
        tell: Takes a line on each replacement; by default it goes to stderr.
    """

    def __init__(
        self,
        start: Start,
        *,
        ranks: int,
        most_idle: int,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._start, self._ranks, self._most_idle = start, ranks, most_idle
        self._tell = tell or (lambda line: print(f"pyops: {line}", file=sys.stderr, flush=True))
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._running: dict[int, Process] = {}
        self._codes: dict[int, int] = {}
        self._idle, self._steps = 0, -1
        self._asked = 0
        self._end_by = float("inf")

    def run(self) -> int:
        """Start the ranks, and return when all have ended.

        Returns:
            0 where all ranks have ended well; else the code of the first that did not: 1 for one
            that a signal killed and that was not replaced.
        """
        before = self._listen()
        try:
            for rank in range(self._ranks):
                self._running[rank] = self._started(rank)
            while self._running:
                for rank, process in list(self._running.items()):
                    if (code := process.poll()) is not None:
                        del self._running[rank]
                        self._ended(rank, process.pid, code)
                self._end_late_ones()
                time.sleep(LOOK_EVERY)
        finally:
            self._send(signal.SIGKILL)
            for number, handler in before.items():
                signal.signal(number, handler)
        return next((code for code in self._codes.values() if code), 0)

    def _listen(self) -> dict[int, Any]:
        """Forward signals that ask for an end; what was done with them before."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {number: signal.signal(number, self._forward) for number in FORWARDED}

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._asked = self._asked or number
        self._send(number)

    def _send(self, number: int) -> None:
        for process in list(self._running.values()):
            process.send_signal(number)

    def _started(self, rank: int) -> Process:
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._ranks),
            "LOCAL_WORLD_SIZE": str(self._ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            STARTED: "1",
        }
        return self._start(variables)

    def _ended(self, rank: int, pid: int, code: int) -> None:
        """Replace a process that ended, or keep its code."""
        died = code < 0 or code == UNCAUGHT
        how = signal.Signals(-code).name if code < 0 else f"an error (exit code {code})"
        if not died:
            self._codes[rank] = code
            self._end_by = min(self._end_by, time.monotonic() + GRACE) if code else self._end_by
            return
        why = self._not_replaced()
        if why:
            self._tell(f"rank {rank} (process {pid}) died of {how}: not replaced, since {why}")
            self._codes[rank] = UNCAUGHT
            self._end_by = min(self._end_by, time.monotonic() + GRACE)
            return
        self._running[rank] = process = self._started(rank)
        self._tell(
            f"rank {rank} (process {pid}) died of {how} after step {max(0, self._steps)}: process "
            f"{process.pid} takes its place"
        )

    def _not_replaced(self) -> str:
        """Why nobody takes the place of a rank that died now; "" where somebody does."""
        if self._asked:
            return f"{signal.Signals(self._asked).name} asked the run to end"
        if self._codes:
            return "other ranks have ended"
        steps = noted_steps(self._store)
        self._idle = 1 if steps > self._steps else self._idle + 1
        self._steps = steps
        if self._most_idle and self._idle > self._most_idle:
            return (
                f"{self._most_idle} replacements came without a step between "
                "(observe.max_idle_restarts)"
            )
        return ""

    def _end_late_ones(self) -> None:
        """End those that a rank which is not replaced would leave waiting."""
        if time.monotonic() > self._end_by:
            self._send(signal.SIGKILL)
            self._end_by = float("inf")

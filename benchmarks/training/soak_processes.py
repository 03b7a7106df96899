"""Processes of the soak, forked or started: to be waited for, and killed when they hang."""

from __future__ import annotations

import multiprocessing
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Forked", "Process", "end", "wait_for"]


class Forked:
    """A process forked from one that has imported everything, with the ways of a
    subprocess.Popen."""

    def __init__(self, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.training.soak_rank"])
        self._process = context.Process(target=target, args=arguments)
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


Process = Forked | subprocess.Popen[bytes]


def end(processes: Sequence[Process], limit: float) -> list[int | None]:
    """Exit codes; None for a process that had to be killed because it still ran after so many
    seconds."""
    until = time.monotonic() + limit
    codes: list[int | None] = []
    for each in processes:
        try:
            codes.append(each.wait(max(0.0, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for each in processes:
        if each.poll() is None:
            each.kill()
            each.wait()
    return codes


def wait_for(what: Callable[[], bool], processes: Sequence[Process], limit: float) -> bool:
    """Whether it came about while all of the processes lived."""
    until = time.monotonic() + limit
    while not what():
        if time.monotonic() > until or any(each.poll() is not None for each in processes):
            return what()
        time.sleep(0.002)
    return True

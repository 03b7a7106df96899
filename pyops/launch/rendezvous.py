"""Processes that a launcher started meet in a store, torchrun's or rank 0's, in a part of it that
no earlier attempt has written to.

    rank r   here r = its own mark ---.                                .-->  answers that
    rank 0                            reads the marks, answers each           until every rank has
                                      with the attempt's name

    A mark is answered once, so it is of this attempt. Each answer is acknowledged with what is
    wrong on that rank, and rank 0 tells all of them the first trouble.

torchrun may keep its store through a restart, with the addresses of ranks that died, and who is
early would call there. The number of restarts tells attempts apart no longer once agents come and
go: each counts its own.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from pyops.launchers import LaunchError

__all__ = ["Rendezvous"]

TIMEOUT = timedelta(minutes=10)
LOOK_EVERY = 0.01  # seconds between two looks
TO_LEAVE = 10.0  # seconds that ranks which waited have to notice the end


class Rendezvous:
    """All ranks of this attempt, met: `store` is theirs alone. A rank that doesn't come is a
    TimeoutError that names it.

    Args:
        given: A store that all of them reach.
        trouble: Why this rank cannot go on; "" where it can. Of several ranks' the first counts.

    Raises:
        LaunchError: On every rank alike: the trouble of one.
    """

    def __init__(
        self,
        given: dist.Store,
        *,
        rank: int,
        size: int,
        timeout: timedelta = TIMEOUT,
        trouble: str = "",
    ) -> None:
        self.rank, self.size = rank, size
        self._deadline = time.monotonic() + timeout.total_seconds()
        own = uuid.uuid4().hex
        shared = dist.PrefixStore("meeting", given)
        if self.rank == 0:
            name = own
            troubles = [trouble, *self._answer(shared, name)]
            trouble = next((each for each in troubles if each), "")
            shared.set(f"{name} trouble", trouble)
        else:
            shared.set(f"here {self.rank}", own)
            self._wait(shared, f"answer {own}", "rank 0")
            name = shared.get(f"answer {own}").decode()
            shared.set(f"{name} {self.rank}", trouble)
            self._wait(shared, f"{name} trouble", "rank 0")
            trouble = shared.get(f"{name} trouble").decode()
        self.store = dist.PrefixStore(f"attempt {name}", given)
        if trouble:
            if self.rank == 0:
                self._until_left(range(1, self.size))
            else:
                self.store.set(f"left {self.rank}", "")
            raise LaunchError(trouble)

    @classmethod
    def of_environment(cls, *, timeout: timedelta = TIMEOUT, trouble: str = "") -> Rendezvous:
        """As torchrun's variables say.

        Args:
            timeout: How long to wait for the host where the ranks meet, and for each other.
            trouble: Why this rank cannot go on; "" where it can.

        Raises:
            LaunchError: The host is not reached, or its port is taken; the error names both. On
                every rank alike: the trouble of one.
        """
        host, port = (os.environ.get(f"MASTER_{each}", "") for each in ("ADDR", "PORT"))
        try:
            given, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        except dist.DistError as error:
            rank_text = os.environ.get("RANK", "?")
            if "EADDRINUSE" in str(error) or "address already in use" in str(error):
                raise LaunchError(
                    f"rank {rank_text} wanted to wait for the others on port {port} (MASTER_PORT), "
                    "which another process has; set MASTER_PORT to another number on all ranks"
                ) from None
            raise LaunchError(
                f"rank {rank_text} did not reach {host}:{port} (MASTER_ADDR, MASTER_PORT), where "
                f"the ranks meet, within {timeout.total_seconds():g} s: {_first_line(error)}; does "
                "rank 0 run there, is that the address of the network between the hosts, and is "
                "the port open?"
            ) from None
        return cls(given, rank=rank, size=size, timeout=timeout, trouble=trouble)

    def _answer(self, shared: dist.Store, name: str) -> list[str]:
        """Answer every rank's mark, also a second one: the first may have been that of a process
        which is gone. What is wrong on each."""
        marks: dict[int, bytes] = {}
        missing = list(range(1, self.size))
        while missing:
            for rank in missing:
                if shared.check([f"here {rank}"]) and (
                    mark := shared.get(f"here {rank}")
                ) != marks.get(rank):
                    shared.set(f"answer {mark.decode()}", name)
                    marks[rank] = mark
            missing = [rank for rank in missing if not shared.check([f"{name} {rank}"])]
            if missing:
                self._pause(f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}")
        return [shared.get(f"{name} {rank}").decode() for rank in range(1, self.size)]

    def _wait(self, store: dist.Store, key: str, whom: str) -> None:
        while not store.check([key]):
            self._pause(whom)

    def _pause(self, whom: str) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError(
                f"rank {self.rank} of {self.size} waited for {whom} where they meet; "
                "did all ranks start?"
            )
        time.sleep(LOOK_EVERY)

    def end(self, waiting: Iterable[int], number: int) -> None:
        """Tell the ranks that wait that it is over, and by which signal. They get some seconds to
        leave: the store may be this process's."""
        self.store.set("over", str(number))
        self._until_left(waiting)

    def _until_left(self, waiting: Iterable[int]) -> None:
        until = time.monotonic() + TO_LEAVE
        while time.monotonic() < until and not all(
            self.store.check([f"left {rank}"]) for rank in waiting
        ):
            time.sleep(LOOK_EVERY)

    def until_over(self, *, look_every: float = 0.2) -> int:
        """Wait for `end`: the signal's number.

        Raises:
            RuntimeError: When the ranks at work are gone.
        """
        try:
            while not self.store.check(["over"]):
                time.sleep(look_every)
            number = int(self.store.get("over"))
            self.store.set(f"left {self.rank}", "")
        except dist.DistError as error:
            raise RuntimeError(
                f"rank {self.rank} had no part in the work, and who did is gone: {error}"
            ) from None
        return number


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

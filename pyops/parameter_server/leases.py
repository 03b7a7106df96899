"""Leases: the samples of an epoch, handed out to the replicas that are free.

    samples   | lease 0 | lease 1 | lease 2 | lease 3 |
    store       done      worker 2  worker 0             worker 2 has died: its time runs out, and
                          until 17                       lease 1 is handed out again

Each sample is handed out at least once, and exactly once where no replica dies or is late. What a
replica had not pushed when it died is computed anew by another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.parameter_server.config import check_number
from pyops.parameter_server.sessions.session import rendezvous

__all__ = ["Leases"]

DONE = "done"


class Leases:
    """The leases of one epoch, as one replica sees them. All replicas give the same numbers.

    Args:
        store: Where the replicas meet.
        samples: How many there are, numbered from 0.
        batch: Samples of a lease; the last one may have fewer.
        worker: This replica's number.
        epoch: Which pass over the samples this is.
        seconds: After which a lease that is not done is handed out again.
        clock: What tells the time, in seconds; one that all replicas share.

    Attributes:
        again: Leases that this replica took over from another one.

    Raises:
        ValueError: For numbers below their least.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        samples: int,
        batch: int,
        worker: int,
        epoch: int = 0,
        seconds: float = 60.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        check_number(samples, name="samples", least=1)
        check_number(batch, name="batch", least=1)
        check_number(worker, name="worker", least=0)
        check_number(epoch, name="epoch", least=0)
        if not seconds > 0:
            raise ValueError(f"seconds is {seconds!r}; give the time of a lease, above 0")
        self._store = dist.PrefixStore(f"leases/{epoch}", rendezvous(store))
        self._samples, self._batch, self._worker = samples, batch, worker
        self._seconds, self._clock = seconds, clock
        self.count = -(-samples // batch)
        self._first_open = 0
        self.again = 0

    def _held(self, lease: int) -> str:
        key = str(lease)
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _mine(self) -> str:
        return f"{self._worker} {self._clock() + self._seconds:.6f}"

    def _swap(self, lease: int, before: str, after: str) -> bool:
        return bool(self._store.compare_set(str(lease), before, after).decode() == after)

    def take(self) -> int | None:
        """A lease that is free or whose time has run out; None where there is none now."""
        number = int(self._store.add("next", 1)) - 1
        if number < self.count and self._swap(number, "", self._mine()):
            return number
        for lease in range(self._first_open, self.count):
            held = self._held(lease)
            if held == DONE:
                if lease == self._first_open:
                    self._first_open += 1
                continue
            if not held or float(held.split()[1]) < self._clock():
                mine = self._mine()
                if self._swap(lease, held, mine):
                    self.again += 1
                    return lease
        return None

    def finish(self, lease: int) -> None:
        """The samples of the lease are computed."""
        self._store.set(str(lease), DONE)

    def over(self) -> bool:
        """Whether all leases are done, by whomever."""
        while self._first_open < self.count and self._held(self._first_open) == DONE:
            self._first_open += 1
        return self._first_open == self.count

    def samples_of(self, lease: int) -> Tensor:
        """The numbers of a lease's samples, int64."""
        start = lease * self._batch
        return torch.arange(start, min(start + self._batch, self._samples), device="cpu")

    def __iter__(self) -> Iterator[Tensor]:
        """The samples of one lease after the other, until the epoch is over. A lease is done when
        the next one is asked for."""
        for turn in count():
            lease = self.take()
            if lease is not None:
                yield self.samples_of(lease)
                self.finish(lease)
            elif self.over():
                return
            else:
                time.sleep(min(0.2, 0.01 * (1 + turn % 8)))

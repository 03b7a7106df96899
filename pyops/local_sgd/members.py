"""Members: replicas that find one another in a store, and go on when some die or others come.

    store    generation = 4
             4/arrived    3         a replica that arrives adds one: that is its rank
             4/size       3         the first writes it when no more have come for a while
             generation = 5         later replicas wait for the next meeting

    with one process for each replica:
        outer = LocalSGD(model, optimizer, config, group=ALONE)
        members = Members(store)
        members.join(outer)             # the first replicas alike, and those that come later
        for batch in batches:
            optimizer.step()
            members.step(outer)         # in place of outer.step()

The store must outlive the replicas: that of a launcher, say, which none of them holds.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from pyops.comm.collectives.communicator import release
from pyops.comm.failure import CommunicationError, DisagreementError
from pyops.local_sgd.averaging import LocalSGD

__all__ = ["Members"]

LOOK = 0.02  # seconds between two looks into the store


class Members:
    """The replicas that are there, each one process. It makes the default process group anew at
    each change, so nothing else may hold one.

    Args:
        store: A store of torch.distributed that all replicas reach and none of them holds.
        grace: Seconds without a newcomer after which a meeting begins.
        timeout: Seconds that a replica waits in it for another.

    Raises:
        ValueError: A process group is there already; times that are not more than 0.
    """

    def __init__(self, store: dist.Store, *, grace: float = 1.0, timeout: float = 60.0) -> None:
        if not (grace > 0 and timeout > grace):
            raise ValueError(
                f"grace is {grace} s and timeout {timeout} s; give more than 0, and a timeout that "
                "is longer than the grace"
            )
        if dist.is_initialized():
            raise ValueError(
                "Members makes the process group of the replicas, but there is one already; leave "
                "init_process_group out"
            )
        self._store, self._grace, self._timeout = store, grace, timeout
        self._generation = -1

    def step(self, outer: LocalSGD) -> bool:
        """`outer.step()`; and where a replica is lost, or one waits to join, a new group and
        `outer.regroup`.

        Returns:
            Whether parameters of this replica were written.
        """
        try:
            written = outer.step()
            if not written or not outer.exchange.gather(self._somebody_waits())[0]:
                return written
        except DisagreementError:
            raise
        except CommunicationError:
            pass
        self.join(outer)
        return True

    def join(self, outer: LocalSGD) -> None:
        """Bring `outer` together with those that are there now; again, where one is lost meanwhile.

        Args:
            outer: Made with `group=pyops.mesh.ALONE`. It takes the global values of those that are
                further, or of the first where all are at the beginning.

        Raises:
            ValueError: On every replica alike, for replicas that differ in model or configuration.
        """
        while True:
            try:
                outer.regroup(self._meet())
                return
            except DisagreementError:
                raise
            except CommunicationError:  # one is lost meanwhile
                continue

    def leave(self) -> None:
        """Leave the group, at the end of training."""
        self._leave()

    # --- meetings

    def _meet(self) -> dist.ProcessGroup:
        """The group of the replicas that are there now; those of the last one leave it."""
        self._leave()
        while True:
            generation = self._current()
            number = self._store.add(f"{generation}/arrived", 1)
            size = self._closed(generation, first=number == 1)
            if size is not None and number <= size and self._join(generation, number - 1, size):
                self._generation = generation
                assert dist.group.WORLD is not None
                return dist.group.WORLD
            self._next(generation)

    # --- the store

    def _current(self) -> int:
        """The generation that one can still join."""
        return int(self._store.add("generation", 0))

    def _next(self, generation: int) -> None:
        """Open the next generation, once."""
        if self._store.add(f"{generation}/over", 1) == 1:
            self._store.add("generation", 1)
        until = time.monotonic() + self._timeout
        while self._current() == generation and time.monotonic() < until:
            time.sleep(LOOK)

    def _closed(self, generation: int, *, first: bool) -> int | None:
        """How many take part; None where the first one is lost."""
        key = f"{generation}/size"
        if first:
            size = self._when_quiet(generation)
            self._store.set(key, str(size))
            self._next(generation)
            return size
        until = time.monotonic() + self._timeout
        while not self._store.check([key]):
            if time.monotonic() > until:
                return None
            time.sleep(LOOK)
        return int(self._store.get(key))

    def _when_quiet(self, generation: int) -> int:
        """How many have arrived when none has for a while."""
        count, since = 0, time.monotonic()
        while time.monotonic() - since < self._grace:
            now = int(self._store.add(f"{generation}/arrived", 0))
            if now != count:
                count, since = now, time.monotonic()
            time.sleep(LOOK)
        return count

    def _somebody_waits(self) -> bool:
        current = self._current()
        return current > self._generation and self._store.add(f"{current}/arrived", 0) > 0

    # --- the group

    def _join(self, generation: int, rank: int, size: int) -> bool:
        """Whether all that were counted are there."""
        limit = timedelta(seconds=self._timeout)
        store = dist.PrefixStore(f"{generation}/group", self._store)
        try:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        except RuntimeError:  # one of them was lost before it came
            self._leave()
            return False
        return True

    @staticmethod
    def _leave() -> None:
        if dist.is_initialized():
            release(dist.group.WORLD)
            dist.destroy_process_group()

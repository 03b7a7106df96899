"""Quorum: replicas agree in a store on who is alive, and make a process group of these.

    store    beat/7        41           replica 7 counts on, while its process lives
             generation    4            the meeting that one can still come to
             4/arrived     3            who arrives adds one
             4/place/1     7            and writes which replica it is
             4/members     [2, 5, 7]    the first to arrive writes it, when all that live are there

A meeting never closes without a replica whose heart beats: two groups can't train side by side.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from pyops.comm.collectives.communicator import release
from pyops.failure import CommunicationError
from pyops.torch_private import another_connection

__all__ = ["Quorum", "QuorumConfig", "noted_steps"]

LOOK = 0.02  # seconds between two looks into the store


@dataclass(frozen=True)
class QuorumConfig:
    """How many replicas train, how long they wait for each other, in seconds, and how often they
    keep copies of each other's states."""

    min_replicas: int = 1
    """Fewer do not train."""
    start_replicas: int = 1
    """How many the first meeting of all waits for; later ones may be fewer."""
    lease: float = 5.0
    """A replica whose heart has not beaten for so long is dead; it beats five times as often."""
    timeout: float = 60.0
    """Of collectives. A process that dies is noticed at once, one that stalls after this time."""
    meeting_timeout: float = 300.0
    """How long a meeting waits for replicas that live: longer than `timeout` and a step."""
    copy_every: int = 1
    """Of states that are spread (ZeRO stage 1), steps from one copy at the neighbor to the next. So
    many steps at most are taken again where a replica is lost."""

    def __post_init__(self) -> None:
        for name in ("min_replicas", "start_replicas", "copy_every"):
            least = getattr(self, name)
            if isinstance(least, bool) or not isinstance(least, int) or least < 1:
                raise ValueError(f"{name} is {least!r}; give a whole number, 1 or more")
        for name in ("lease", "timeout", "meeting_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not value > 0:
                raise ValueError(f"{name} is {value!r}; give seconds, above 0")
        if self.meeting_timeout <= self.timeout + self.lease:
            raise ValueError(
                f"meeting_timeout is {self.meeting_timeout:g}, timeout {self.timeout:g} and lease "
                f"{self.lease:g} seconds; a replica may come to a meeting only when its collective "
                "has timed out, so give a meeting_timeout above the sum of both"
            )


class Quorum:
    """The replicas that live, each one process. It makes the default process group anew at each
    change, so nothing else may hold one.

    Args:
        store: A store of torch.distributed that all replicas reach and none of them holds.
        config: How long they wait.
        place: Orders the ranks of the group; by default the replica's number. A replacement that is
            given the place of the replica that was lost has its rank.

    Attributes:
        replica: This replica's number, which no other has or had.
        members: The numbers of the replicas of the group, in the order of their ranks.

    Raises:
        ValueError: A process group is there already.
        CommunicationError: The store is gone.
    """

    def __init__(
        self, store: dist.Store, config: QuorumConfig | None = None, *, place: int | None = None
    ) -> None:
        if dist.is_initialized():
            raise ValueError(
                "Quorum makes the process group of the replicas, but there is one already; leave "
                "init_process_group out"
            )
        self.config = config or QuorumConfig()
        self._store = _part_of(store)
        self._generation = -1
        self.members: list[int] = []
        self._over = threading.Event()
        with _StoreErrors():
            self.replica = int(self._store.add("replicas", 1))
            self._store.set(f"order/{self.replica}", str(self.replica if place is None else place))
            own = _part_of(another_connection(store))
        self._thread = threading.Thread(target=self._beat, args=(own,), daemon=True)
        self._thread.start()

    def meet(self) -> dist.ProcessGroup:
        """The group of the replicas that live now; those of the last group leave it. Returns when
        all of these have come.

        Raises:
            CommunicationError: Fewer than `min_replicas` live, a replica that lives does not come
                within `meeting_timeout`, or the store is gone. The error names the replicas.
        """
        self.abandon()
        with _StoreErrors():
            until = time.monotonic() + self.config.meeting_timeout
            while True:
                generation = int(self._store.add("generation", 0))
                number = int(self._store.add(f"{generation}/arrived", 1))
                self._store.set(f"{generation}/place/{number}", str(self.replica))
                members = self._closed(generation, first=number == 1, until=until)
                if self.replica in members and self._join(generation, members, until=until):
                    self._generation, self.members = generation, members
                    assert dist.group.WORLD is not None
                    return dist.group.WORLD
                self._next(generation)

    def somebody_waits(self) -> bool:
        """Whether a replica waits at the next meeting: each rank may see it at another time."""
        with _StoreErrors():
            current = int(self._store.add("generation", 0))
            return current > self._generation and self._store.add(f"{current}/arrived", 0) > 0

    def note_progress(self, steps: int) -> None:
        """Tell those that come later how many steps have been taken."""
        with _StoreErrors():
            self._store.set("steps", str(steps))

    def noted_progress(self) -> int:
        """What was told last; 0 at the beginning."""
        with _StoreErrors():
            return _steps_in(self._store)

    def abandon(self) -> None:
        """Leave the process group, whole or not."""
        if dist.is_initialized():
            release(dist.group.WORLD)
            dist.destroy_process_group()

    def leave(self) -> None:
        """Leave for good: the others do not wait for this replica any more."""
        self.abandon()
        self._over.set()
        self._thread.join()
        with _StoreErrors():
            self._store.set(f"left/{self.replica}", "1")

    # --- hearts

    def _beat(self, store: dist.Store) -> None:
        try:
            while not self._over.is_set():
                store.add(f"beat/{self.replica}", 1)
                self._over.wait(self.config.lease / 5)
        except RuntimeError:  # the store is gone, which the next meeting says
            return

    def _arrived(self, generation: int) -> set[int]:
        """The numbers of those that have come, as far as they are written."""
        count = int(self._store.add(f"{generation}/arrived", 0))
        keys = [f"{generation}/place/{number}" for number in range(1, count + 1)]
        return {int(self._store.get(key)) for key in keys if self._store.check([key])}

    # --- meetings

    def _has_come(self, generation: int, member: int) -> bool:
        return bool(self._store.check([f"{generation}/member/{member}"]))

    def _closed(self, generation: int, *, first: bool, until: float) -> list[int]:
        """Who takes part; empty where the one that would say it is lost."""
        key, hearts = f"{generation}/members", _Hearts(self._store, self.config.lease)
        members: list[int]
        while True:
            alive, arrived = hearts.alive(), self._arrived(generation)
            # Read before the members, which are written before the generation is counted on.
            over = int(self._store.add("generation", 0)) != generation
            if self._store.check([key]):
                members = json.loads(self._store.get(key))
                return members
            if over:  # the others have lost sight of the first for a while
                return []
            here = arrived & alive
            enough = hearts.settled and alive <= arrived and len(here) >= self._least()
            if first and enough:
                self._store.set("began", "1")
                members = self._in_order(here)
                self._store.set(key, json.dumps(members))
                self._next(generation)
                return members
            if not first and hearts.settled and self._first_is_lost(generation, alive):
                return []
            if time.monotonic() > until:
                raise self._late(alive, arrived)
            time.sleep(LOOK)

    def _in_order(self, replicas: set[int]) -> list[int]:
        """By their places, by their numbers where these are equal."""
        return sorted(replicas, key=lambda each: (int(self._store.get(f"order/{each}")), each))

    def _least(self) -> int:
        """How many replicas the meeting takes."""
        least = self.config.min_replicas
        began = self._store.check(["began"])
        return least if began else max(least, self.config.start_replicas)

    def _first_is_lost(self, generation: int, alive: set[int]) -> bool:
        key = f"{generation}/place/1"
        return not self._store.check([key]) or int(self._store.get(key)) not in alive

    def _late(self, alive: set[int], arrived: set[int]) -> CommunicationError:
        waited = f"within {self.config.meeting_timeout:g} seconds"
        if missing := sorted(alive - arrived):
            return CommunicationError(
                f"replica {self.replica}: no quorum {waited}: replicas {missing} live and do not "
                "come; end their processes, or give a longer meeting_timeout",
                ranks=missing,
            )
        dead = sorted(set(self.members) - alive)
        return CommunicationError(
            f"replica {self.replica}: no quorum {waited}: {len(alive)} replicas live, and "
            f"{self._least()} are needed (min_replicas, start_replicas); "
            f"dead of the last group: {dead}; start replacements",
            ranks=dead,
        )

    def _next(self, generation: int) -> None:
        """Open the next generation, once: in one operation, in which nobody can be lost."""
        self._store.compare_set("generation", str(generation), str(generation + 1))

    def _join(self, generation: int, members: list[int], *, until: float) -> bool:
        """Whether all that were counted are there."""
        self._store.set(f"{generation}/member/{self.replica}", "1")
        hearts = _Hearts(self._store, self.config.lease)
        # A process group would wait for a lost one until its timeout.
        while missing := {m for m in members if not self._has_come(generation, m)}:
            if not missing <= hearts.alive() or time.monotonic() > until:
                return False
            time.sleep(LOOK)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"{generation}/group", self._store),
                rank=members.index(self.replica),
                world_size=len(members),
                timeout=timedelta(seconds=self.config.timeout),
            )
        except RuntimeError:  # one of them was lost before it came
            self.abandon()
            return False
        return True


def noted_steps(store: dist.Store) -> int:
    """How many steps the replicas that meet in this store have said to have taken.

    Args:
        store: As `Quorum` was given it.
    """
    return _steps_in(_part_of(store))


def _part_of(store: dist.Store) -> dist.Store:
    return dist.PrefixStore("pyops/healing", store)


def _steps_in(part: dist.Store) -> int:
    return int(part.get("steps")) if part.check(["steps"]) else 0


class _Hearts:
    """Which replicas live, as this process sees it by its own clock."""

    def __init__(self, store: dist.Store, lease: float) -> None:
        self._store, self._lease, self._begun = store, lease, time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {}
        self._left: set[int] = set()

    @property
    def settled(self) -> bool:
        """Whether each has had the time to be seen, or to be missed."""
        return time.monotonic() - self._begun > self._lease / 2

    def alive(self) -> set[int]:
        """Those that beat within the lease. One that was never seen to beat is given the lease; one
        that was missed lives again when it beats: its host had no time for it."""
        now, found = time.monotonic(), set()
        for replica in range(1, int(self._store.add("replicas", 0)) + 1):
            if replica in self._left:
                continue
            beat = int(self._store.add(f"beat/{replica}", 0))
            if replica not in self._seen or beat != self._seen[replica][0]:
                self._seen[replica] = beat, now
            if self._store.check([f"left/{replica}"]):
                self._left.add(replica)
            elif now - self._seen[replica][1] <= self._lease:
                found.add(replica)
        return found


class _StoreErrors:
    """Within, an error of the store is one that says that the store is gone."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, CommunicationError):
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CommunicationError(
                f"the store in which replicas meet is gone ({reason}); let it be served by a "
                "process that outlives them"
            ) from error

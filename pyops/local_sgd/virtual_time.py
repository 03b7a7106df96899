"""Replicas that are threads of one process, over a clock that is computed: how long a run of
hundreds of them would take, with the steps, the exchanges and the numbers of a real one.

    def body(replica):
        outer = LocalSGD(model, optimizer, config, group=replica.exchange)
        for batch in batches:
            replica.compute(0.1 * spread())          # seconds of virtual time
            optimizer.step(); outer.step()           # the same code as over processes
        return replica.clock

    clocks = run_replicas(200, body, link=Link(bytes_per_second=12.5e6, latency=0.02))

A replica's clock goes on with `compute`; an exchange begins when the last replica comes to it, and
takes as long as its bytes need on the link. Nothing sleeps. Numbers do not depend on which thread
runs when: sums are in the order of the replicas.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.transport import VirtualTransport
from pyops.comm.collectives.work import Work
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.compressed import compressed_all_reduce
from pyops.comm.compression.error_feedback import ErrorFeedback
from pyops.comm.failure import CommunicationError, DisagreementError

__all__ = ["Link", "ReplicaDied", "VirtualExchange", "VirtualReplica", "run_replicas"]

T = TypeVar("T")


class ReplicaDied(Exception):
    """Ends a virtual replica: the others are told in the next exchange."""


@dataclass(frozen=True)
class Link:
    """What joins a replica to the others.

    Attributes:
        bytes_per_second: In each direction.
        latency: Seconds that a message takes beside.
    """

    bytes_per_second: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0 or not self.latency >= 0:
            raise ValueError(
                f"a link of {self.bytes_per_second} bytes per second and a latency of "
                f"{self.latency} s; give more than 0, and 0 or more"
            )


Combine = Callable[[dict[int, Any]], Any]


@dataclass
class _Meeting:
    """What each replica brought, and what came of it.

    Attributes:
        members: The replicas that meet.
        combine: Makes the result of what they brought.
        heard: How many have the result.
    """

    members: frozenset[int]
    combine: Combine
    brought: dict[int, Any] = field(default_factory=dict)
    result: Any = None
    error: Exception | None = None
    done: bool = False
    heard: int = 0

    def conclude(self, dead: set[int]) -> None:
        """Make the result, where no replica is waited for any more."""
        lost = self.members - self.brought.keys()
        if self.done or lost - dead:
            return
        self.done = True
        if lost:
            names = ", ".join(map(str, sorted(lost)))
            self.error = CommunicationError(f"replica {names} died", ranks=sorted(lost))
            return
        try:
            self.result = self.combine(self.brought)
        except Exception as error:
            self.error = error


class _World:
    """What all virtual replicas share."""

    def __init__(self, link: Link, timeout: float) -> None:
        self.link, self.timeout = link, timeout
        self._changed = threading.Condition()
        self._dead: set[int] = set()
        self._meetings: dict[tuple[frozenset[int], int, int], _Meeting] = {}

    def end(self, number: int) -> None:
        """Mark a replica as gone."""
        with self._changed:
            self._dead.add(number)
            for meeting in self._meetings.values():
                meeting.conclude(self._dead)
            self._changed.notify_all()

    def meet(
        self, key: tuple[frozenset[int], int, int], number: int, brought: Any, combine: Combine
    ) -> Any:
        """combine({replica: what it brought}), on every member; CommunicationError on every member
        that is left where one is gone."""
        with self._changed:
            meeting = self._meetings.setdefault(key, _Meeting(key[0], combine))
            meeting.brought[number] = brought
            meeting.conclude(self._dead)
            if meeting.done:
                self._changed.notify_all()
            elif not self._changed.wait_for(lambda: meeting.done, self.timeout):
                missing = sorted(meeting.members - meeting.brought.keys() - self._dead)
                raise CommunicationError(
                    f"replicas {missing} came to no exchange within {self.timeout:g} s",
                    ranks=missing,
                )
            meeting.heard += 1
            if meeting.heard == len(meeting.brought):
                self._meetings.pop(key, None)
            if meeting.error is not None:
                raise meeting.error
            return meeting.result


class VirtualReplica:
    """One replica of `run_replicas`: its number, its clock, and what it meets the others by.

    Attributes:
        number: From 0 on, as long as the run lasts.
        clock: Seconds of virtual time since its beginning.
        computed: Those of them in which it computed.
        bytes_sent: What it put on its link.
        link_free: When its link has sent all that was begun.
        groups: How often it made a group of the same replicas.
        exchange: The `Exchange` of its present group: all replicas at first.
    """

    def __init__(self, world: _World, number: int, size: int) -> None:
        self._world, self.number = world, number
        self.clock = self.computed = self.link_free = 0.0
        self.bytes_sent = 0.0
        self.groups: dict[frozenset[int], int] = {}
        self.exchange = VirtualExchange(self, frozenset(range(size)))

    def compute(self, seconds: float) -> None:
        """Let virtual time pass in which this replica computes."""
        if not seconds >= 0:
            raise ValueError(f"seconds is {seconds}; give 0 or more")
        self.clock += seconds
        self.computed += seconds

    def die(self) -> None:
        """End this replica here, as if its process were killed."""
        raise ReplicaDied(f"replica {self.number} at {self.clock:g} s")

    def regroup(self, members: Iterable[int]) -> VirtualExchange:
        """A new group of these replicas, by number; each of them calls it. A replica that joins
        takes the clock of the others when it has waited for them."""
        self.exchange = VirtualExchange(self, frozenset(members))
        return self.exchange


class VirtualExchange:
    """The exchange of virtual replicas; see `pyops.local_sgd.Exchange`."""

    def __init__(self, replica: VirtualReplica, members: frozenset[int]) -> None:
        if replica.number not in members:
            raise ValueError(
                f"replica {replica.number} is not among {sorted(members)}; a replica makes groups "
                "of which it is one"
            )
        self._replica, self._world = replica, replica._world
        self._members = members
        # All members make their groups of the same replicas equally often.
        self._made = replica.groups[members] = replica.groups.get(members, 0) + 1
        self._order = sorted(members)
        self.rank, self.size = self._order.index(replica.number), len(members)
        self._calls = 0

    def _meet(self, kind: str, brought: T, combine: Callable[[list[T]], Any]) -> Any:
        """What `combine` makes of all replicas' values, in their order; clocks meet."""
        self._calls += 1
        replica = self._replica

        def together(found: dict[int, Any]) -> Any:
            rows = [found[number] for number in self._order]
            kinds = [row[0] for row in rows]
            if len(set(kinds)) > 1:
                raise DisagreementError(f"replicas called different exchanges: {kinds}")
            return max(row[1] for row in rows), combine([row[2] for row in rows])

        now, result = self._world.meet(
            (self._members, self._made, self._calls),
            replica.number,
            (kind, replica.clock, brought),
            together,
        )
        return now, result

    def _small(self, kind: str, brought: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """A meeting for which every replica waits."""
        now, result = self._meet(kind, brought, combine)
        self._replica.clock = now + self._world.link.latency
        return result

    def begin_mean(
        self, flat: Tensor, *, codec: Codec | None, error: ErrorFeedback | None, label: str
    ) -> VirtualPending:
        """See `Exchange`. The numbers are there at once; the time is taken by `wait`."""
        kind = f"the mean of {flat.numel()} numbers, {codec.name if codec else 'none'}"
        if codec is None:
            now, total = self._meet(kind, flat, _mean)
            nbytes = flat.numel() * flat.element_size()
            flat.copy_(total)
        else:
            now, boxes = self._meet(kind, None, lambda rows: _boxes(len(rows)))
            nbytes = codec.payload_bytes(flat.numel())
            transport = VirtualTransport(self.rank, boxes, timeout=self._world.timeout)
            compressed_all_reduce(
                flat, codec=codec, error=error, communicator=_VirtualCommunicator(transport)
            )
        return self._sent(now, nbytes)

    def _sent(self, begun: float, nbytes: float) -> VirtualPending:
        replica, link = self._replica, self._world.link
        traffic = 2 * (self.size - 1) / self.size * nbytes
        start = max(begun, replica.link_free)
        replica.link_free = start + 2 * link.latency + traffic / link.bytes_per_second
        replica.bytes_sent += traffic
        return VirtualPending(replica, replica.link_free)

    def agree(self, error: Exception | None, *, fine: bool = True) -> bool:
        """See `Exchange`."""
        first = next((e for e in self.gather(error) if e is not None), None)
        if first is not None:
            raise error if error is not None else first
        return fine

    def gather(self, value: T) -> list[T]:
        """See `Exchange`."""
        found: list[T] = self._small("telling one another", value, list)
        return found

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor], *, source: int) -> None:
        """See `Exchange`."""
        own = list(tensors)
        kind = f"the values of replica {source}: {len(own)} tensors"
        brought = [t.detach().clone() for t in own] if self.rank == source else None
        for tensor, value in zip(own, self._small(kind, brought, lambda r: r[source]), strict=True):
            tensor.copy_(value)


class VirtualPending:
    """A mean that arrives at a time of the virtual clock."""

    def __init__(self, replica: VirtualReplica, arrives: float) -> None:
        self._replica, self._arrives = replica, arrives

    def wait(self) -> None:
        """Let the replica's clock go on to the arrival."""
        self._replica.clock = max(self._replica.clock, self._arrives)


class _VirtualCommunicator(Communicator):
    """A communicator of virtual ranks: calls run at once, on the caller's thread."""

    def __init__(self, transport: VirtualTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.rank, self.size = transport.rank, transport.size
        self.sequence = self._uncounted = 0

    @property
    def bytes_sent(self) -> int:
        return 0

    def run(
        self,
        call: Callable[[int], Tensor],
        *,
        what: str,
        tensor: Tensor,
        async_op: bool,
        direct: bool,
    ) -> Any:
        self.sequence += 1
        result = call(0)
        return Work(result) if async_op else result

    def agree(self, kind: str, **details: Any) -> None:
        """The meeting before has compared what is called."""


def _mean(rows: list[Tensor]) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total.add_(row)
    return total.mul_(1.0 / len(rows))


def _boxes(size: int) -> list[list[queue.SimpleQueue[Any]]]:
    return [[queue.SimpleQueue() for _ in range(size)] for _ in range(size)]


def run_replicas(
    size: int,
    body: Callable[[VirtualReplica], T],
    *,
    link: Link | None = None,
    timeout: float = 60.0,
) -> list[T | None]:
    """body(replica) on `size` threads; the results by number, None of a replica that died.

    Args:
        size: How many replicas there are.
        body: What each does. It must draw nothing from the process's random numbers, whose order
            the threads would share.
        link: What joins each to the others; by default one that takes no time.
        timeout: Seconds of real time that a replica waits for another.

    Raises:
        Exception: The first replica's error, but for deaths.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"size is {size!r}; give a number of replicas, 1 or more")
    world = _World(link or Link(), timeout)
    results: list[T | None] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(number: int) -> None:
        try:
            results[number] = body(VirtualReplica(world, number, size))
        except ReplicaDied:
            pass
        except BaseException as error:
            errors[number] = error
        finally:
            world.end(number)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A replica that failed by itself tells more than one that waited for it.
    own = sorted((e for e in errors if e is not None), key=lambda e: type(e) is CommunicationError)
    if own:
        raise own[0]
    return results

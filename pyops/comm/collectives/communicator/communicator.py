"""Everything a process group needs beside itself to run collectives: transport, shared memory,
costs, one thread, one sequence.

Communicator.of(group)   made at the first collective of the group, kept as long as the group itself
  .run(call, ...)        here and now, on the thread when the call is asynchronous or others are
                         still waiting there, or on a CUDA stream; failures get the names of rank,
                         collective and bucket
  .choose(...)           which algorithm, the same on every rank
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from pyops import flight_record
from pyops.comm.collectives import probe
from pyops.comm.collectives.communicator.candidates import candidates, cost_key
from pyops.comm.collectives.communicator.departures import departed, note_departure
from pyops.comm.collectives.communicator.fingerprint import (
    FINGERPRINT_WIDTH,
    REFUSAL_WIDTH,
    check_equal,
    check_refused,
    fingerprint_of,
    refusal_text,
    refusing_ranks,
)
from pyops.comm.collectives.communicator.side_streams import SideStreams
from pyops.comm.collectives.shared_memory import (
    AGREEMENT,
    SPINS_ALONE,
    SPINS_BESIDE_COMPUTE,
    SharedMemory,
    Unavailable,
)
from pyops.comm.collectives.transport import exchange_bytes, transport_of
from pyops.comm.collectives.work import Work, Worker
from pyops.comm.failure import CommunicationError, DisagreementError, PeerError, lost_peer
from pyops.failure import naming_lost_ranks
from pyops.mesh import Alone, ProcessGroupLike, resolve
from pyops.torch_private import backend_name, group_timeout

__all__ = ["ALGORITHMS", "Communicator", "groups_in_use", "release"]

ALGORITHMS = ("auto", "native", "ring", "two_shot", "shared_memory", "symmetric")

KINDS_KEPT = 1024  # a text may have the shape of a tensor, of which there is no end

# The one cache at module level: what belongs to a group lives as long as the group and is found by
# it. Entries don't hold their group, so a destroyed one is forgotten by itself; a group that is
# made anew is another object with an entry of its own.
_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator] = (
    weakref.WeakKeyDictionary()
)
os.register_at_fork(after_in_child=_communicators.clear)


def release(group: dist.ProcessGroup | None = None) -> None:
    """Let go of what was kept for `group` (its thread, its shared memory) before the group itself
    goes."""
    target = group if group is not None else dist.group.WORLD
    found = _communicators.pop(target, None) if target is not None else None
    if found is not None:
        found.stop()


def groups_in_use() -> list[dist.ProcessGroup]:
    """The groups for which something is kept, in the order of their first collectives."""
    return list(_communicators)


class Communicator:
    """One rank's state for one group. `rank` and `size` are of the group. Use `Communicator.of`.

    Args:
        presumed_costs: What "auto" need not measure, by (device type, dtype); the same on every
            rank. A table counts where it has every algorithm that can run.
    """

    presumed_costs: ClassVar[Mapping[tuple[str, str], probe.Table]] = {}

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.transport = transport_of(group)
        self.worker = Worker(f"pyops collectives of {group.group_name}")
        self.sequence = 0  # collectives called so far; equal on all ranks
        self._current = 0  # the one that runs
        self._shared: SharedMemory | str | None = None  # a text says why there is none
        self._uncounted = (
            0  # bytes that went another way than the transport, less those that were for measuring
        )
        self._costs: dict[tuple[str, str], probe.Table] = {}
        self._broken: CommunicationError | None = None
        self._streams = SideStreams()
        # What notes the calls in that record; without the lookups of texts at each call.
        self._record: flight_record.FlightRecord | None = None
        self._kinds: dict[tuple[str, torch.dtype], tuple[flight_record.Kind, bool]] = {}
        self.symmetric: dict[torch.device, Any] = {}  # symmetric.memory_of; None: there is none

    @staticmethod
    def of(group: ProcessGroupLike = None) -> Communicator:
        """The communicator of a group.

        Args:
            group: None for the default group, or one process where torch.distributed is not
                initialized; pyops.mesh.ALONE for this process alone.

        Raises:
            ValueError: no process group, or one that this rank is not in; see also
                `pyops.mesh.check_initialized`.
        """
        if not isinstance(group, dist.ProcessGroup | Alone | None):
            raise ValueError(
                f"group must be a process group that this rank is in, None or ALONE, got {group!r}"
            )
        if group is None and dist.is_initialized():  # of most calls: nothing else need be asked
            ranks = dist.group.WORLD
        else:
            ranks = resolve(group, "a collective")
        if ranks is None:
            return _OneProcess()
        found = _communicators.get(ranks)
        if found is None:
            found = _communicators[ranks] = Communicator(ranks)
        return found

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; RuntimeError once it has been destroyed."""
        group = self._group()
        if group is None:
            raise RuntimeError(
                "this communicator's process group was destroyed; make it anew with "
                "Communicator.of(group)"
            )
        return group

    def backend(self, device: torch.device) -> str:
        """ "gloo", "nccl", ...: what carries tensors of this device."""
        return backend_name(self.group, device)

    def timeout(self, device: torch.device) -> float:
        """The group's timeout in seconds."""
        timeout = group_timeout(self.group, device)
        return 1800.0 if timeout is None else timeout.total_seconds()

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to others so far, or put into shared memory for them.

        What a backend's own collective sends is not told: its tensors count as if it were two
        shots.
        """
        return int(self.transport.bytes_sent) + self._uncounted

    def count(self, nbytes: float) -> None:
        """Add what goes another way than `transport`."""
        self._uncounted += round(nbytes)

    def stop(self) -> None:
        """End the thread and let go of the shared memory."""
        self.worker.stop()
        self._shared = None
        for memory in self.symmetric.values():
            if memory is not None:
                memory.close()
        self.symmetric.clear()

    # --- running
    # ----------------------------------------------------------------------------------------------

    def run(
        self,
        call: Callable[[int], Tensor],
        *,
        what: str,
        tensor: Tensor,
        async_op: bool,
        direct: bool,
    ) -> Any:
        """Run `call(spins)` in the order of calls. Returns its tensor, or a Work when `async_op`.

        Args:
            direct: The call only puts work on a CUDA stream, so it never goes to the thread.
        """
        self.sequence += 1
        number = self.sequence
        noted = self._noted(what, tensor)
        if direct:
            named = partial(self._named, call, what=what, number=number)
            if async_op:
                return noted(lambda: self._streams.put(named, tensor))
            return noted(lambda: named(SPINS_ALONE))
        if not async_op and not self.worker.busy:
            return noted(lambda: self._guarded(call, SPINS_ALONE, what, number))
        there = self._streams.for_thread(call, tensor) if tensor.is_cuda else call
        work = self.worker.submit(
            lambda: noted(lambda: self._guarded(there, SPINS_BESIDE_COMPUTE, what, number))
        )
        return work if async_op else work.wait()

    def _noted(self, what: str, tensor: Tensor) -> Callable[[Callable[[], Any]], Any]:
        """What runs a call, and notes its end in the flight record, if one is written. The call has
        begun now."""
        record = flight_record.active()
        if record is None or self.size == 1:
            return _at_once
        if record is not self._record:
            self._record, self._kinds = record, {}
        begin, sized = self._kinds.get((what, tensor.dtype)) or self._kind(what, tensor.dtype)
        index = begin(tensor.nbytes if sized else 0)
        if not index:  # within a call that is noted
            return _at_once
        if tensor.is_cuda:
            return lambda body: flight_record.run_noted(record, index, body, tensor)
        return partial(record.run, index)

    def _kind(self, what: str, dtype: torch.dtype) -> tuple[flight_record.Kind, bool]:
        """What notes that such calls begin, and whether all ranks give as many bytes."""
        label = what.partition(" (")[0]
        op = label.partition(" ")[0]
        sized = "gather" not in op
        begin = flight_record.kind_in(
            self.group,
            op,
            dtype=dtype if sized else None,
            label=label.removeprefix(op).strip(),
        )
        if len(self._kinds) >= KINDS_KEPT:
            self._kinds.clear()
        found = self._kinds[what, dtype] = begin, sized
        return found

    def _named(
        self, call: Callable[[int], Tensor], spins: int, *, what: str, number: int
    ) -> Tensor:
        if self._broken is not None:
            raise CommunicationError(
                f"{what} was not started, after: {self._broken}", ranks=self._broken.ranks
            )
        try:
            return call(spins)
        except PeerError as error:
            self._broken = lost_peer(what, group=self.group, cause=error, sequence=number)
            raise self._broken from error

    def _guarded(self, call: Callable[[int], Tensor], spins: int, what: str, number: int) -> Tensor:
        self._current = number
        try:
            return self._named(call, spins, what=what, number=number)
        except (
            DisagreementError
        ) as error:  # all ranks raise it, and the group is as good as before, unless one leaves
            if (gone := self._gone()) is not None:
                self._broken = CommunicationError(f"{what}: {gone[1]}", ranks=gone[0])
                raise self._broken from None
            raise DisagreementError(f"{what}: {error}", ranks=error.ranks) from None
        except CommunicationError as error:
            if self._broken is None:
                self._broken = CommunicationError(f"{what}: {error}", ranks=error.ranks)
                raise self._broken from None
            raise

    def leave(self, error: Exception, *, device: torch.device) -> NoReturn:
        """Raise `error`, for which this rank can take part in nothing any more. The others raise a
        CommunicationError with its text in the collective that they come to next. Where all ranks
        leave, the group is as good as before.

        Args:
            device: Of the tensors in that collective. Over NCCL ranks don't compare what they call:
                the others are then told nothing.
        """
        if self.size > 1 and (device.type == "cpu" or self.backend(device) == "gloo"):
            with contextlib.suppress(Exception):
                self.run(
                    partial(self._leaving, error),
                    what="leaving",
                    tensor=torch.empty(0),
                    async_op=False,
                    direct=False,
                )
        raise error

    def _leaving(self, error: Exception, spins: int) -> Tensor:
        note_departure(self.group, number=self._current, rank=self.rank, error=error)
        try:
            self.agree("leaving", refusal=error)
        finally:
            gone = self._gone()
            if gone is not None and len(gone[0]) < self.size:
                self._broken = CommunicationError(f"this rank left: {error}", ranks=[self.rank])
        raise error

    def _gone(self) -> tuple[list[int], str] | None:
        """Which ranks have left in the place of the present collective, and why, in words. None:
        none."""
        return departed(self.group, number=self._current, size=self.size)

    # --- choosing
    # ----------------------------------------------------------------------------------------------

    def shared_memory(self) -> SharedMemory:
        """Collective at the first call.

        Raises:
            ValueError: On every rank alike, when the ranks can't share memory.
        """
        if self._shared is None:
            self.agree("shared memory for the first time")
            try:
                self._shared = SharedMemory(
                    self.transport, timeout=self.timeout(torch.device("cpu"))
                )
            except Unavailable as reason:
                self._shared = str(reason)
        if isinstance(self._shared, str):
            raise ValueError(
                f"algorithm='shared_memory' does not work here: {self._shared}; use "
                "'auto' or 'two_shot'"
            )
        return self._shared

    def choose(
        self, algorithm: str, flat: Tensor, *, runners: Callable[[str], Callable[[Tensor], None]]
    ) -> str:
        """The name of the algorithm to run. "auto": the fastest of `candidates` by measurement, a
        collective at a group's first call.

        Args:
            algorithm: A name, or "auto".
            flat: The tensor to be reduced, flat and contiguous.
            runners: Gives the function that runs an algorithm of this name, to measure it.
        """
        if algorithm != "auto" or self.size == 1:
            return algorithm
        key = cost_key(flat)
        if (table := self._costs.get(key)) is not None:
            return probe.fastest(table, nbytes=flat.numel() * flat.element_size())
        names = candidates(
            flat,
            size=self.size,
            backend=lambda: self.backend(flat.device),
            share_memory=self._shares_memory,
        )
        if len(names) == 1:
            return names[0]
        presumed = self.presumed_costs.get(key, {})
        if presumed.keys() >= set(names):
            self._costs[key] = {name: presumed[name] for name in names}
        else:
            if not flat.is_cuda:
                self.agree(
                    "the choice of an algorithm", dtype=flat.dtype, details=(algorithm, *names)
                )
            before = self.bytes_sent
            table = probe.measure(
                {n: runners(n) for n in names}, dtype=flat.dtype, device=flat.device
            )
            self.count(before - self.bytes_sent)
            self._costs[key] = self._of_rank_0(table, flat.device)
        return probe.fastest(self._costs[key], nbytes=flat.numel() * flat.element_size())

    def _shares_memory(self) -> bool:
        """Whether the ranks share memory. Collective at the first call."""
        try:
            self.shared_memory()
        except DisagreementError:
            raise
        except ValueError:
            return False
        return True

    def _of_rank_0(self, table: probe.Table, device: torch.device) -> probe.Table:
        packed = probe.packed(table)
        if device.type == "cpu":
            return probe.unpacked(
                exchange_bytes(self.transport, packed, width=probe.TABLE_WIDTH)[0]
            )
        on_device = torch.tensor(list(packed), dtype=torch.uint8, device=device)
        with naming_lost_ranks("the choice of an algorithm", group=self.group):
            dist.broadcast(on_device, group_src=0, group=self.group)
        return probe.unpacked(bytes(on_device.tolist()))

    def agree(
        self,
        kind: str,
        *,
        numel: int = 0,
        dtype: torch.dtype = torch.uint8,
        details: tuple[Any, ...] = (),
        refusal: Exception | None = None,
    ) -> None:
        """DisagreementError, on every rank, unless all ranks are about to run this very collective.

        Gloo ends the process when a message has another size than expected, so ranks compare first,
        by a small message to each.

        Args:
            refusal: Why this rank can't take part. It is raised here, and told to the others, who
                raise a DisagreementError.
        """
        fingerprint = fingerprint_of(
            kind,
            numel=numel,
            dtype=dtype,
            number=self._current,
            details=details,
            refused=refusal is not None,
        )
        texts: list[bytes] = []
        try:
            fingerprints = self._exchange(fingerprint, width=FINGERPRINT_WIDTH)
            if refused := refusing_ranks(fingerprints):
                texts = self._exchange(refusal_text(refusal), width=REFUSAL_WIDTH)
        except DisagreementError:
            if refusal is None:
                raise
        if refusal is not None:
            raise refusal
        check_refused(refused, texts)
        check_equal(fingerprints, rank=self.rank, kind=kind, details=details)

    def _exchange(self, payload: bytes, *, width: int) -> list[bytes]:
        """Every rank's payload, filled up to `width` bytes. Where there is shared memory it goes
        that way: there it also meets the collectives of shared memory, which another rank may have
        called in the place of this one."""
        if not isinstance(self._shared, SharedMemory):
            return exchange_bytes(self.transport, payload, width=width)
        mine = torch.frombuffer(bytearray(payload.ljust(width, b"\0")), dtype=torch.uint8)
        out = torch.empty(self.size * width, dtype=torch.uint8, device="cpu")
        starts = [width * rank for rank in range(self.size + 1)]
        self.count(width * (self.size - 1))
        self._shared.all_gather(mine, out, starts=starts, tag=AGREEMENT, spins=SPINS_BESIDE_COMPUTE)
        return [bytes(row.tolist()) for row in out.view(self.size, width)]


def _at_once(call: Callable[[], Any]) -> Any:
    return call()


class _OneProcess(Communicator):
    """A communicator of this process alone, which has no group: every call runs at once."""

    def __init__(self) -> None:
        self.rank, self.size, self.sequence, self._uncounted = 0, 1, 0, 0

    @property
    def bytes_sent(self) -> int:
        return 0

    def stop(self) -> None:
        """Nothing is running."""

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
        result = call(SPINS_ALONE)
        return Work(result) if async_op else result

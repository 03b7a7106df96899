"""How replicas reach one another: the few things that averaging needs, over a process group.

    begin_mean(flat, ...)   the mean of all replicas' vectors, in place, while others compute
    agree(error)            all replicas leave, or all raise
    gather(value)           every replica's value
    broadcast(tensors)      the values of one replica, on all

Another carrier with these methods can stand in for a process group: `VirtualReplica` of
virtual_time.py is threads of one process over a clock that is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from pyops.comm import agreement
from pyops.comm.broadcast import broadcast
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_reduce
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.compressed import compressed_all_reduce
from pyops.comm.compression.error_feedback import ErrorFeedback
from pyops.comm.failure import CommunicationError
from pyops.mesh import ProcessGroupLike, resolve

__all__ = ["Exchange", "GroupExchange", "Pending"]

T = TypeVar("T")


class Pending(Protocol):
    """A mean that is on its way."""

    def wait(self) -> Any:
        """Return when it has arrived; raise what went wrong."""


@runtime_checkable
class Exchange(Protocol):
    """What replicas meet by. Every replica calls the same methods in the same order."""

    @property
    def rank(self) -> int:
        """This replica's number among them."""

    @property
    def size(self) -> int:
        """How many replicas there are."""

    def begin_mean(
        self, flat: Tensor, *, codec: Codec | None, error: ErrorFeedback | None, label: str
    ) -> Pending:
        """Begin to replace a flat tensor by its mean over the replicas, summed in their order.

        Args:
            flat: Of one size and dtype at all replicas; left alone until the wait.
            codec: How numbers are written for the wire; None: as they are.
            error: What the codec left out so far; what it leaves out now is kept there.
            label: What the tensor is, for error messages.
        """

    def agree(self, error: Exception | None, *, fine: bool = True) -> bool:
        """Raise on every replica the error of the first that has one; otherwise say whether all
        ranks of this replica are `fine`, which all replicas answer alike."""

    def gather(self, value: Any) -> list[Any]:
        """Every replica's value, in their order."""

    def broadcast(self, tensors: Iterable[Tensor], *, source: int) -> None:
        """Give each tensor, in place, the values that it has at the replica `source`."""


class GroupExchange:
    """The exchange of replicas that a process group joins.

    Args:
        group: The ranks with this rank's place in their replicas; see `pyops.mesh.resolve`.
        within: The other ranks of this replica, with which it decides whether an exchange came
            about; `pyops.mesh.ALONE` for a replica of one process.
    """

    def __init__(self, group: ProcessGroupLike, *, within: ProcessGroupLike) -> None:
        self.group, self.within = group, within
        ranks = resolve(group, "LocalSGD")
        self.rank = 0 if ranks is None else ranks.rank()
        self.size = 1 if ranks is None else ranks.size()

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to the other replicas so far."""
        return Communicator.of(self.group).bytes_sent

    def begin_mean(
        self, flat: Tensor, *, codec: Codec | None, error: ErrorFeedback | None, label: str
    ) -> Pending:
        work: Pending
        if codec is None:
            work = all_reduce(flat, group=self.group, op="mean", async_op=True, label=label)
        else:
            work = compressed_all_reduce(
                flat,
                codec=codec,
                error=error,
                group=self.group,
                op="mean",
                async_op=True,
                label=label,
            )
        return work

    def agree(self, error: Exception | None, *, fine: bool = True) -> bool:
        if not isinstance(error, CommunicationError):  # else no other replica answers
            try:
                agreement.agree(error, group=self.group)
            except Exception as caught:
                error = caught
        agreement.agree(error, group=self.within)
        return all(agreement.gather(fine, group=self.within))

    def gather(self, value: T) -> list[T]:
        return agreement.gather(value, group=self.group)

    def broadcast(self, tensors: Iterable[Tensor], *, source: int) -> None:
        broadcast(tensors, group=self.group, source=source)

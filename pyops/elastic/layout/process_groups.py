"""Groups: the process groups that train in a layout, made when it begins and destroyed when it
ends.

    waiting_group     0 1 2 3 4        all ranks: where idle ones wait, asleep, for hours if need be
    control_group     0 1 2 3 4        all ranks: whatever follows once they have met
    pp_group          0 1 | 2 3        the stages of a replica
    dp_group          0 2 | 1 3        the ranks that hold the same stage
    tp_group                           with tensor: the neighbors that share its weights; each of
                                       their parts then has a dp_group
    cp_group                           with a context: the neighbors that share out tokens

The first two are made once, and outlive every layout. Who waits learns at once when a rank dies;
that one only hangs, after the default group's timeout: in the waiting group, where an idle rank's
own is longer, those that have work notice, and tell it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from pyops.comm.agreement import agree, gather
from pyops.comm.collectives.communicator import Communicator, release
from pyops.comm.failure import CommunicationError, ranks_without_note
from pyops.elastic.layout.abort_watch import abort_waits, watched
from pyops.elastic.layout.rank_layout import Layout
from pyops.failure import PATIENCE, naming_lost_ranks
from pyops.mesh import check_initialized
from pyops.torch_private import set_group_timeout

__all__ = [
    "LayoutGroups",
    "RunGroups",
    "abort_on_failure",
    "agree_in_group",
    "make_control_group",
    "make_group",
]

GRACE = (
    2 * PATIENCE + 1
    # seconds; those who lost a rank look for signs of life in their own groups first, then come to
    # all
)


def make_control_group(*, patience: float | None = 86400.0) -> dist.ProcessGroup | None:
    """A new Gloo group of all ranks, for carrying states and for waiting; None where
    torch.distributed is not running.

    A collective; destroy it with torch.distributed.destroy_process_group.

    Args:
        patience: Seconds that a rank waits in it for one that comes late: for waiting, longer than
            from one decision to the next; None: as long as in the default group. A rank that dies
            is noticed at once.
    """
    check_initialized("make_control_group")
    if not dist.is_initialized():
        return None
    return make_group(None, patience=patience, backend="gloo")


def make_group(
    members: Sequence[int] | None, *, patience: float | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """A new group of these ranks, or of all. A collective of all ranks, which wait for one another
    as long as in the default group, however long the group's own patience is; CommunicationError,
    which names it, for a rank that is lost meanwhile."""
    usual = _limit(None)
    with naming_lost_ranks("the making of a process group"):
        made: dist.ProcessGroup = dist.new_group(members, backend=backend, timeout=usual)
    if patience is not None and dist.get_rank() in (members or range(dist.get_world_size())):
        set_group_timeout(made, _limit(patience))
    return made


def _limit(seconds: float | None) -> timedelta:
    """None: that of the default group."""
    return timedelta(
        seconds=Communicator.of(None).timeout(torch.device("cpu")) if seconds is None else seconds
    )


@contextmanager
def abort_on_failure(waiting_group: dist.ProcessGroup | None) -> Iterator[None]:
    """Around what ranks do in their own groups: if one is lost, whoever waits in this group of all
    is told of it too."""
    try:
        yield
    except CommunicationError:
        if waiting_group is not None:
            abort_waits(waiting_group)
            ranks_without_note(waiting_group, note="gave up in a group of its own", grace=0.0)
        raise


def agree_in_group(error: Exception | None, *, group: dist.ProcessGroup | None) -> None:
    """As `agree`, in a group of `LayoutGroups`: None is this rank alone."""
    if group is not None:
        agree(error, group=group)
    elif error is not None:
        raise error


class RunGroups:
    """The groups of all ranks, as long as a run lasts; None in both where torch.distributed is not
    running. A collective.

    Args:
        patience: Seconds that a rank waits in `waiting_group`; in `control_group` it is as long as
            in the default group.
    """

    def __init__(self, *, patience: float) -> None:
        self.waiting_group, self.control_group = (
            make_control_group(patience=patience),
            make_control_group(patience=None),
        )

    def barrier(self, what: str, error: Exception | None = None, *, is_idle: bool = False) -> None:
        """Wait for all ranks, and raise on all what went wrong on one. A collective, for `what`:
        RuntimeError, on every rank, where that differs.

        Idle ranks come long before the others, and wait so long nowhere else; active ones come
        together, and wait only as long as in the default group. Whoever notices first that one is
        missing calls off the others' waits.
        """
        if self.waiting_group is None:
            agree(error)
            return
        with (
            abort_on_failure(self.waiting_group),
            watched(self.waiting_group, seconds=None if is_idle else _limit(None).total_seconds()),
        ):
            calls = gather(what, group=self.waiting_group, grace=GRACE)
        agree(error, group=self.control_group)
        for rank, other in enumerate(calls):
            if other != calls[0]:
                raise RuntimeError(
                    f"rank 0 called {calls[0]}, but rank {rank} {other}; call the same "
                    "on all ranks, and end the run after an "
                    "error that idle ranks have not heard of"
                )

    def close(self) -> None:
        """Destroy them. Not a collective; a second time it does nothing."""
        for group in (self.waiting_group, self.control_group):
            if group is not None:
                release(group)
                dist.destroy_process_group(group)
        self.waiting_group = self.control_group = None


class LayoutGroups:
    """This rank's groups in `layout`. A collective: every rank of `control_group` calls it,
    those that are idle too.

    Of each group an address for each member stays in the store by which they found one another, for
    as long as that lives.

    Args:
        control_group: Of all ranks, in their order; None: one process alone.
        timeout: Of the groups' collectives in seconds, by default that of the default group.
        pp_group: Of this rank's replica, by stage; with a context, of its part of that. None with
            one stage, and on an idle rank.
        dp_group: Of the ranks that hold this rank's stage, by replica and by part; None with one
            rank, and on an idle one.
        tp_group: Of the neighbors that share this rank's weights; None where none do.
        cp_group: Of the neighbors that share out the tokens of its samples; None where none do.

    Raises:
        ValueError: On every rank alike, for another number of ranks, and for layouts that differ
            between ranks.
    """

    pp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    tp_group: dist.ProcessGroup | None = None
    cp_group: dist.ProcessGroup | None = None

    def __init__(
        self,
        layout: Layout,
        *,
        control_group: dist.ProcessGroup | None,
        timeout: float | None = None,
    ) -> None:
        size = 1 if control_group is None else dist.get_world_size(control_group)
        if size != layout.ranks or (control_group is not None and size != dist.get_world_size()):
            raise ValueError(
                f"the layout is of {layout.ranks} ranks, but the control group has "
                f"{size}; it must have all ranks"
            )
        if control_group is None:
            return
        layouts = gather(layout, group=control_group)
        if (
            other := next((rank for rank, each in enumerate(layouts) if each != layouts[0]), None)
        ) is not None:
            raise ValueError(
                f"rank 0 has {layouts[0]}, but rank {other} {layouts[other]}; give all "
                "ranks the same"
            )
        limit, rank = _limit(timeout), dist.get_rank(control_group)
        error: Exception | None = None
        try:
            # Every rank makes all of them in one order: torch numbers them, and a group that only
            # its members make has a name that may have been another one's before, with addresses
            # that are out of date.
            pipelines = layout.replicas * layout.parts
            for number in range(pipelines if layout.stages > 1 else 0):
                members = layout.pp_ranks(*divmod(number, layout.parts))
                self.pp_group = self._made(members, rank, limit) or self.pp_group
            copies = layout.replicas * layout.context
            for number in range(layout.stages * layout.tensor if copies > 1 else 0):
                members = layout.dp_ranks(*divmod(number, layout.tensor))
                self.dp_group = self._made(members, rank, limit) or self.dp_group
            for first in range(0, layout.active if layout.tensor > 1 else 0, layout.tensor):
                self.tp_group = self._made(layout.tp_ranks(first), rank, limit) or self.tp_group
            if layout.context > 1:
                for members in dict.fromkeys(map(layout.cp_ranks, range(layout.active))):
                    self.cp_group = self._made(members, rank, limit) or self.cp_group
        except RuntimeError as caught:
            error = caught
        agree(error, group=control_group)

    @staticmethod
    def _made(members: tuple[int, ...], rank: int, limit: timedelta) -> dist.ProcessGroup | None:
        made: dist.ProcessGroup = dist.new_group(list(members), timeout=limit)
        return made if rank in members else None

    def close(self) -> None:
        """Destroy the groups, and let go of the threads and the shared memory that collectives made
        for them. What else uses them (Pipeline, ZeroOptimizer) is to be closed before. Not a
        collective; a second time it does nothing."""
        for group in (self.pp_group, self.dp_group, self.tp_group, self.cp_group):
            if group is not None:
                release(group)
                dist.destroy_process_group(group)
        self.pp_group = self.dp_group = self.tp_group = self.cp_group = None

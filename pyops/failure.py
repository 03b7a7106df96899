"""What can go wrong between ranks, in words: who, in which collective, and what to do.

A connection tells a rank only about its own neighbour. So after a failure every rank leaves a note
in the group's store, wakes its neighbours, and waits a moment for the notes of the others: a rank
without a note is the one that is lost. A copy of the note is in the store of all ranks: who waits
in one group while the others fail in another must not take them for lost.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from pyops.torch_private import default_store, group_store

__all__ = [
    "GRACE",
    "PATIENCE",
    "CommunicationError",
    "lost_peer",
    "naming_lost_ranks",
    "ranks_without_note",
    "wake_neighbours",
]

GRACE = 3.0  # seconds that a rank waits for the others' notes
PATIENCE = (
    2 * GRACE + 1
)  # the same, where others may come only when they have waited for each other elsewhere


class CommunicationError(RuntimeError):
    """A collective did not come about. `ranks`: the group ranks to blame, empty where that is
    unknown."""

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def ranks_without_note(
    group: dist.ProcessGroup, *, note: str, grace: float = GRACE
) -> list[int] | None:
    """Leave this rank's note; the ranks that left none within `grace` seconds, or None when the
    store is gone too.

    Args:
        group: The ranks that are asked.
        note: What each of them writes to the store of the group.
        grace: Seconds to wait for it.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    keys = [f"pyops/failure/{r}" for r in range(size)]
    anywhere = [f"pyops/failure/of rank {r}" for r in dist.get_process_group_ranks(group)]
    try:
        store = group_store(group)
        of_all = default_store()
        store.set(keys[rank], note)
        of_all.set(anywhere[rank], note)
        wake_neighbours(group)
        end = time.monotonic() + grace
        while True:
            missing = [
                r
                for r in range(size)
                if not store.check([keys[r]]) and not of_all.check([anywhere[r]])
            ]
            if not missing or time.monotonic() > end:
                return missing
            time.sleep(0.05)
    except RuntimeError:
        return None


def wake_neighbours(group: dist.ProcessGroup) -> None:
    """Make every exchange of the others with this rank fail now, not after their timeout.

    Gloo closes all connections of a group when one receive is late, so ask for one that can't come.
    """
    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
    for peer in range(dist.get_world_size(group)):
        if peer != dist.get_rank(group):
            with contextlib.suppress(RuntimeError):
                group.recv([nothing], peer, 0x7FFFFFF1).wait(datetime.timedelta(milliseconds=1))


def lost_peer(
    what: str, *, group: dist.ProcessGroup, cause: Exception, sequence: int, grace: float = GRACE
) -> CommunicationError:
    """The error to raise for a collective whose exchange failed with `cause`; names the ranks that
    gave no sign of life within `grace` seconds.

    Args:
        what: The collective, for the message.
        group: Its ranks.
        cause: What the exchange raised.
        sequence: The number of the collective.
        grace: Seconds to wait for signs of life.
    """
    me = dist.get_rank(group)
    silent = ranks_without_note(group, note=f"gave up in collective {sequence}", grace=grace)
    reason = (str(cause).splitlines() or [type(cause).__name__])[0]
    if silent:
        names = ", ".join(str(r) for r in silent)
        message = f"rank {me}: {what} failed because rank {names} died or stalled ({reason})"
        return CommunicationError(message, ranks=silent)
    if silent is None:
        suspects = [cause.peer] if hasattr(cause, "peer") else []
        hint = (
            f"the exchange with rank {suspects[0]} failed first"
            if suspects
            else "no rank could be named"
        )
        message = (
            f"rank {me}: {what} failed, and the group's store, which a rank or torchrun "
            f"holds, is gone: {hint} ({reason})"
        )
        return CommunicationError(message, ranks=suspects)
    message = (
        f"rank {me}: {what} failed although every rank is alive; one came later than the "
        f"group's timeout ({reason})"
    )
    return CommunicationError(message)


@contextlib.contextmanager
def naming_lost_ranks(
    what: str, *, group: dist.ProcessGroup | None = None, grace: float | None = None
) -> Iterator[None]:
    """Within, an error of torch's own collectives becomes a CommunicationError that names the ranks
    that are lost.

    Args:
        what: For the message.
        grace: As for `lost_peer`, by default PATIENCE seconds.
    """
    try:
        yield
    except (CommunicationError, NotImplementedError):
        raise
    except RuntimeError as error:
        whole = dist.group.WORLD if group is None else group
        assert whole is not None
        seconds = PATIENCE if grace is None else grace
        raise lost_peer(what, group=whole, cause=error, sequence=0, grace=seconds) from error

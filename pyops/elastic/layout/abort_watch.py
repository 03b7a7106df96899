"""Watch: ends a wait in a group of all ranks when some rank gave up elsewhere, though none of its
neighbours has.

rank 3  waits for rank 0's connection  --.
rank 2  waits for rank 1's               |     a ring, in which rank 0 hangs: a rank that
                                               waits for it learns of nothing else
rank 1  gave up  --------> store --> watch of rank 3 --> closes rank 3's connections, and its wait
ends with an error
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from pyops.comm.failure import wake_neighbours
from pyops.torch_private import group_store

__all__ = ["abort_waits", "watched"]

KEY = "called off"  # in the group's part of the store
EVERY = 0.5  # seconds between two looks


def abort_waits(group: dist.ProcessGroup) -> None:
    """End the waits of the other ranks within `watched`, now and from now on: the group is of no
    use any more."""
    with contextlib.suppress(
        RuntimeError
    ):  # the store went with the rank that held it, and their watches see that
        group_store(group).set(KEY, "")


@contextlib.contextmanager
def watched(group: dist.ProcessGroup | None, *, seconds: float | None = None) -> Iterator[None]:
    """Around a collective of `group`, which fails soon after a rank called it off, or after
    `seconds` on this one."""
    if group is None:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(group, over, seconds), name="pyops watch", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=EVERY)  # not for ever: a store that hangs holds it up


def _watch(group: dist.ProcessGroup, over: threading.Event, seconds: float | None) -> None:
    store = group_store(group)
    begin = time.monotonic()
    while not over.wait(EVERY):
        if seconds is not None and time.monotonic() - begin > seconds:
            wake_neighbours(group)  # before the store is asked, which may hang as well
            abort_waits(group)  # for whom that did not wake
            return
        try:
            off = store.check([KEY])
        except RuntimeError:  # the store is gone, and with it whoever held it
            off = True
        if off and not over.is_set():
            wake_neighbours(group)
            return

"""Watch: ends a wait in a group of all ranks when some rank gave up elsewhere, though none of its neighbours has.

rank 3  waits for rank 0's connection  --.
rank 2  waits for rank 1's               |     a ring, in which rank 0 hangs: who waits for it hears of nothing else
rank 1  gave up  --------> store --> watch of rank 3 --> closes rank 3's connections, and its wait ends with an error
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from pyops.comm.failure import wake_neighbours

__all__ = ["call_off", "forget_calls", "watched"]

KEY = "pyops/elastic/called off"  # in the store of all ranks
EVERY = 0.5  # seconds between two looks


def forget_calls() -> None:
    """Nothing that was called off before counts any more. For one rank, before the group is made that others wait in."""
    with contextlib.suppress(RuntimeError):  # of a store that forgets nothing, which has forgotten nothing to begin with
        dist.distributed_c10d._get_default_store().delete_key(KEY)


def call_off() -> None:
    """End the waits of all other ranks within `watched`, now and from now on."""
    with contextlib.suppress(RuntimeError):  # the store went with the rank that held it: everyone hears of that
        dist.distributed_c10d._get_default_store().set(KEY, "")


@contextlib.contextmanager
def watched(group: dist.ProcessGroup | None, *, seconds: float | None = None) -> Iterator[None]:
    """Around a collective of `group`, which fails soon after a rank called it off, or after `seconds` on this one."""
    if group is None:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(group, over, seconds), name="pyops watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch(group: dist.ProcessGroup, over: threading.Event, seconds: float | None) -> None:
    store = dist.distributed_c10d._get_default_store()
    begin = time.monotonic()
    while not over.wait(EVERY):
        try:
            off = store.check([KEY])
        except RuntimeError:  # the store is gone
            return
        if late := seconds is not None and time.monotonic() - begin > seconds:
            call_off()  # whoever is not woken by the next line is by this
        if off or late:
            wake_neighbours(group)
            return

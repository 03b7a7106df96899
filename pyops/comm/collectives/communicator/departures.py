"""Notes in a group's store of the ranks that left it in the place of a collective, and why."""

from __future__ import annotations

import torch.distributed as dist

from pyops.torch_private import group_store

__all__ = ["departed", "note_departure"]


def _key(number: int, rank: int) -> str:
    return f"pyops/left/{number}/{rank}"


def note_departure(group: dist.ProcessGroup, *, number: int, rank: int, error: Exception) -> None:
    """Leave a note, which the other ranks can read as soon as this returns.

    Args:
        group: The group that the rank leaves.
        number: Of the collective in whose place it leaves.
        rank: This rank.
        error: Why it leaves.
    """
    store: dist.Store = group_store(group)
    store.set(_key(number, rank), f"{type(error).__name__}: {error}")
    # A TCPStore does not wait until the server has what is set; an answer comes after it. The
    # other ranks look for the note as soon as they have heard of this rank.
    store.check([_key(number, rank)])


def departed(group: dist.ProcessGroup, *, number: int, size: int) -> tuple[list[int], str] | None:
    """Which ranks have left in the place of a collective, and why, in words. None: none.

    Args:
        group: The group.
        number: Of the collective.
        size: Ranks of the group.
    """
    store: dist.Store = group_store(group)
    ranks = [rank for rank in range(size) if store.check([_key(number, rank)])]
    if not ranks:
        return None
    why = "; ".join(f"rank {rank} left: {store.get(_key(number, rank)).decode()}" for rank in ranks)
    return ranks, f"{why}; start the ranks anew, or make new groups"

"""Ranks fail together: what went wrong on one rank is raised on all of them, so none waits for a
rank that left.

rank 0: CorpusError("...")  --.                      .--  CorpusError("...")
rank 1: fine                --+-- gather, compare ---+--  CorpusError("...")
rank 2: fine                --'                      '--  CorpusError("...")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from pyops.failure import naming_lost_ranks
from pyops.mesh import check_initialized

__all__ = ["agree", "gather", "naming_lost_ranks", "on_all_ranks", "on_first_rank"]

T = TypeVar("T")


def gather(
    value: T, *, group: dist.ProcessGroup | None = None, grace: float | None = None
) -> list[T]:
    """Every rank's value, in rank order, on every rank; [value] where torch.distributed is not
    running.

    CommunicationError, which names it, for a rank that is lost: one that gives no sign of life
    within `grace` seconds, by default pyops.failure.PATIENCE.
    """
    check_initialized("what ranks tell one another", group)
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    with naming_lost_ranks("telling one another", group=group, grace=grace):
        dist.all_gather_object(values, value, group=group)
    return values


def agree(error: Exception | None, *, group: dist.ProcessGroup | None = None) -> None:
    """Return if no rank has an error; else raise that of the first rank that has one, alike on
    every rank."""
    if error is not None and not dist.is_initialized():
        raise error
    message = None if error is None else (type(error), str(error))
    for rank, failure in enumerate(gather(message, group=group)):
        if failure is None:
            continue
        if error is not None and rank == dist.get_rank(group):
            raise error
        kind, text = failure
        try:
            raised = kind(text)
        except TypeError:  # an exception that is not made from one text
            raised = RuntimeError(f"{kind.__name__}: {text}")
        raise raised


def on_all_ranks(function: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Run `function`, which communicates nothing, on every rank; each one's own result, or on all
    the error of any."""
    check_initialized("what ranks do together", group)
    error: Exception | None = None
    result: Any = None
    try:
        result = function()
    except Exception as caught:
        error = caught
    agree(error, group=group)
    found: T = result
    return found


def on_first_rank(function: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Run `function` on rank 0 of the group while the others wait; its result, or its error, on
    every rank."""
    check_initialized("what the first rank does for all", group)
    error: Exception | None = None
    result: Any = None
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        try:
            result = function()
        except Exception as caught:
            error = caught
    agree(error, group=group)
    return gather(result, group=group)[0]

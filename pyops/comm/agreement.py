"""Ranks fail together: the error of one rank is raised on all of them, so none waits for a rank
that left.

rank 0: CorpusError("...")  --.                      .--  CorpusError("...")
rank 1: fine                --+-- gather, compare ---+--  CorpusError("...")
rank 2: fine                --'                      '--  CorpusError("...")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pyops.failure import naming_lost_ranks
from pyops.mesh import Alone, ProcessGroupLike, resolve

__all__ = [
    "agree",
    "check_same",
    "gather",
    "gather_numbers",
    "naming_lost_ranks",
    "on_all_ranks",
    "on_first_rank",
    "ranks_agree",
]

T = TypeVar("T")


def gather(value: T, *, group: ProcessGroupLike = None, grace: float | None = None) -> list[T]:
    """Every rank's value, in rank order, on every rank. Collective: every rank must call it.

    Args:
        value: anything that can be pickled.
        group: the ranks; see `pyops.mesh.resolve`. One process gets [value].
        grace: seconds within which a rank must give a sign of life, once another is found to be
            lost; by default pyops.failure.PATIENCE.

    Raises:
        CommunicationError: a rank is lost; the error names it.
    """
    ranks = resolve(group, "what ranks tell one another")
    if ranks is None or ranks.size() == 1:
        return [value]
    values: list[Any] = [None] * ranks.size()
    with naming_lost_ranks("telling one another", group=ranks, grace=grace):
        dist.all_gather_object(values, value, group=ranks)
    return values


def gather_numbers(
    values: Sequence[float], *, device: torch.device, group: ProcessGroupLike = None
) -> list[list[float]]:
    """Every rank's numbers, in rank order, on every rank: as `gather`, in a quarter of its time.
    Collective: every rank must call it.

    Args:
        values: as many on every rank.
        device: where the message lies; one that the group's backend sends from.
        group: the ranks; see `pyops.mesh.resolve`. One process gets [values].

    Raises:
        CommunicationError: a rank is lost; the error names it.
    """
    ranks = resolve(group, "what ranks tell one another")
    if ranks is None or ranks.size() == 1:
        return [list(values)]
    own = torch.tensor(values, dtype=torch.float64, device=device)
    everyone = [torch.empty_like(own) for _ in range(ranks.size())]
    with naming_lost_ranks("telling one another", group=ranks):
        dist.all_gather(everyone, own, group=ranks)
    found: list[list[float]] = torch.stack(everyone).tolist()
    return found


def agree(error: Exception | None, *, group: ProcessGroupLike = None) -> None:
    """Return if no rank has an error; otherwise raise that of the first rank that has one, on every
    rank. Collective: every rank must call it.

    `ranks_agree` does this for a block of code.
    """
    if error is not None and (isinstance(group, Alone) or not dist.is_initialized()):
        raise error  # which says more than that of `resolve`, where ranks are not joined yet
    ranks = resolve(group, "what ranks agree on")
    message = None if error is None else (type(error), str(error))
    for rank, failure in enumerate(gather(message, group=group)):
        if failure is None:
            continue
        if error is not None and rank == dist.get_rank(ranks):
            raise error
        kind, text = failure
        try:
            raised = kind(text)
        except TypeError:  # an exception that is not made from one text
            raised = RuntimeError(f"{kind.__name__}: {text}")
        raise raised


@contextmanager
def ranks_agree(group: ProcessGroupLike = None) -> Iterator[None]:
    """All ranks leave the block, or all raise: an Exception of the block on any rank is raised on
    every rank. Collective, once, at the end of the block.

        with ranks_agree(group):
            layers = read(folder)        # communicates nothing

    The block must communicate nothing: a rank that raises leaves it early. A KeyboardInterrupt and
    others that are no Exception leave at once and tell the other ranks nothing.

    Args:
        group: the ranks; see `pyops.mesh.resolve`. One process raises its own error.

    Raises:
        Exception: the error of the first rank that has one: on that rank the very object, on the
            others one of its type with its text, or a RuntimeError where no such one can be made.
    """
    resolve(group, "what ranks do together")
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    agree(error, group=group)


def check_same(
    options: Mapping[str, str], *, group: ProcessGroupLike = None, who: str = ""
) -> None:
    """Checks that all ranks were given the same. Collective.

    Args:
        options: name -> value, as text.
        group: the ranks; see `pyops.mesh.resolve`.
        who: the class or function that was given them, for the error.

    Raises:
        ValueError: on every rank, for an option that differs between ranks: its name, and its value
            on rank 0 and on another rank.
    """
    everyone = gather(dict(options), group=group)
    for rank, others in enumerate(everyone):
        for name in {**everyone[0], **others}:
            first, other = everyone[0].get(name, "not there"), others.get(name, "not there")
            if first != other:
                raise ValueError(
                    f"{who}{': ' if who else ''}{name} is {first} on rank 0, but {other} on rank "
                    f"{rank}; give all ranks the same"
                )


def on_all_ranks(function: Callable[[], T], *, group: ProcessGroupLike = None) -> T:
    """The result of `function` on this rank, within `ranks_agree`."""
    with ranks_agree(group):
        return function()


def on_first_rank(function: Callable[[], T], *, group: ProcessGroupLike = None) -> T:
    """The result of `function` on rank 0 of the group, or its error, on every rank; the others wait
    meanwhile. Collective: every rank must call it."""
    ranks = resolve(group, "what the first rank does for all")
    result: list[T] = []
    error: Exception | None = None
    if ranks is None or ranks.rank() == 0:
        try:
            result.append(function())
        except Exception as caught:
            error = caught
    agree(error, group=group)
    return gather(result, group=group)[0][0]

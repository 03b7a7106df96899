"""What the ranks of a pipeline agree on: that they make the same one, under which tags it talks,
and how a step went wrong.

rank 0   cut, digest --.                       .-- the same digest on all?  -- tags
rank 1   cut, digest --+-- gather, compare  ---+--
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from pyops.comm.agreement import agree, gather
from pyops.pipeline.partition.balance import balance
from pyops.pipeline.runtime.skips import SkipEdges, skip_edges, skip_pairs
from pyops.pipeline.schedules.action import Action
from pyops.pipeline.schedules.schedule import Schedule
from pyops.torch_private import group_store

__all__ = ["agreed", "raise_first_error"]

TAGS = 0x506970  # the first tag of the first pipeline of a group
REDUCTIONS = ("mean", "sum")


def agreed(
    schedule: Schedule,
    layers: list[nn.Module],
    boundaries: Sequence[int] | None,
    reduction: str,
    group: dist.ProcessGroup | None,
) -> tuple[int, list[int], SkipEdges]:
    """The first tag of this pipeline's messages, the boundaries, and what skips stages.

    ValueError on every rank for what is wrong on any.
    """
    error: Exception | None = None
    found: list[int] = []
    edges: SkipEdges = {}
    try:
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction is {reduction!r}; choose one of {', '.join(REDUCTIONS)}")
        if group is not None and dist.get_world_size(group) != schedule.num_ranks:
            raise ValueError(
                f"the schedule is of {schedule.num_ranks} ranks, but the group has "
                f"{dist.get_world_size(group)}; make it with "
                f"num_stages={dist.get_world_size(group)}"
            )
        found = _boundaries(layers, boundaries, schedule.num_stages)
        edges = skip_edges(skip_pairs(layers), found)
    except Exception as caught:
        error = caught
    agree(error, group=group) if group is not None else _raise_if(error)
    if group is None:
        return 0, found, edges
    card = hashlib.blake2b(
        f"{schedule.name} {schedule.weights} {schedule} {found} {reduction} {edges}".encode()
    ).hexdigest()
    cards = gather(card, group=group)
    if (
        other := next((rank for rank, each in enumerate(cards) if each != cards[0]), None)
    ) is not None:
        raise ValueError(
            f"rank {other} made a pipeline of another schedule, other boundaries or "
            "another reduction than rank 0; give all "
            "the same"
        )
    first = None
    if dist.get_rank(group) == 0:
        first = TAGS + 32 * group_store(group).add("pyops/pipeline", 1)
    return next(each for each in gather(first, group=group) if each is not None), found, edges


def _boundaries(
    layers: Sequence[nn.Module], boundaries: Sequence[int] | None, num_stages: int
) -> list[int]:
    for i, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layer {i} is a {type(layer).__name__}; give torch.nn.Modules")
    if boundaries is None:
        sizes = [float(sum(p.numel() for p in layer.parameters())) for layer in layers]
        return balance(sizes, num_stages=num_stages)
    found = list(boundaries)
    rising = all(a < b for a, b in itertools.pairwise(found))
    if len(found) != num_stages + 1 or found[0] != 0 or found[-1] != len(layers) or not rising:
        raise ValueError(
            f"boundaries is {found}; expected {num_stages + 1} rising numbers from 0 to "
            f"{len(layers)}: the first layer of each "
            f"of the {num_stages} stages, and the number of layers"
        )
    return found


def _raise_if(error: Exception | None) -> None:
    if error is not None:
        raise error


def raise_first_error(
    error: BaseException | None, where: Action | None, *, group: dist.ProcessGroup | None
) -> None:
    """Raise this rank's error, or that of the first rank that has one. where: the action that
    failed, None before the first."""
    place = "before the first action" if where is None else f"in {where}"
    card = None if error is None else (type(error), f"{place}: {error}")
    cards = gather(card, group=group) if group is not None else [card]
    if error is not None:
        if hasattr(error, "add_note"):
            error.add_note(f"({place} of the pipeline's step)")
        raise error
    rank, (kind, text) = next((rank, each) for rank, each in enumerate(cards) if each is not None)
    known = kind if kind in (ValueError, TypeError) else RuntimeError
    raise known(
        f"rank {rank} of the pipeline failed {text}"
        if kind is not KeyboardInterrupt
        else f"rank {rank} of the pipeline was interrupted"
    )

"""What the ranks of a pipeline agree on: that they make the same one, under which tags it talks,
and how a step went wrong.

rank 0   boundaries, fingerprint --.                       .-- the same on all?  -- tags
rank 1   boundaries, fingerprint --+-- gather, compare  ---+--
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from pyops.comm.agreement import gather, ranks_agree
from pyops.mesh import Alone, ProcessGroupLike
from pyops.pipeline.partition.balance import balance
from pyops.pipeline.runtime.pipeline_config import REDUCTIONS, PipelineConfig, PipeMareOptions
from pyops.pipeline.runtime.skips import SkipEdges, skip_edges, skip_pairs
from pyops.pipeline.schedules.action import Action
from pyops.pipeline.schedules.schedule import Schedule
from pyops.torch_private import group_store

__all__ = ["PipelineSetup", "agree_on_setup", "raise_first_error"]

FIRST_TAG = 0x506970  # of the first pipeline of a group
TAGS_PER_PIPELINE = 32


class PipelineSetup(NamedTuple):
    """What is alike on all ranks of a pipeline.

    Attributes:
        tag: The first of its messages.
    """

    tag: int
    boundaries: list[int]
    skips: SkipEdges


def agree_on_setup(
    schedule: Schedule,
    layers: list[nn.Module],
    config: PipelineConfig,
    group: dist.ProcessGroup | Alone,
    *,
    pipemare: PipeMareOptions | None = None,
) -> PipelineSetup:
    """The setup of a pipeline. Collective.

    Raises:
        ValueError: On every rank, for what is wrong on any, or differs between two.
        TypeError: On every rank, for a layer that is no module.
    """
    with ranks_agree(group):
        _check(schedule, config, group)
        if pipemare is not None:
            pipemare.validate()
        boundaries = _boundaries(layers, config.boundaries, schedule.num_stages)
        edges = skip_edges(skip_pairs(layers), boundaries)
    if isinstance(group, Alone):
        return PipelineSetup(0, boundaries, edges)
    fingerprint = hashlib.blake2b(
        f"{schedule.name} {schedule.weights} {schedule} {boundaries} {config.reduction} "
        f"{edges}".encode()
    ).hexdigest()
    fingerprints = gather(fingerprint, group=group)
    other = next((rank for rank, each in enumerate(fingerprints) if each != fingerprints[0]), None)
    if other is not None:
        raise ValueError(
            f"rank {other} made a pipeline of another schedule, other boundaries or "
            "another reduction than rank 0; give all the same"
        )
    return PipelineSetup(_free_tag(group), boundaries, edges)


def _check(schedule: Schedule, config: PipelineConfig, group: dist.ProcessGroup | Alone) -> None:
    if config.reduction not in REDUCTIONS:
        raise ValueError(
            f"reduction is {config.reduction!r}; choose one of {', '.join(REDUCTIONS)}"
        )
    num_ranks = schedule.num_ranks if isinstance(group, Alone) else dist.get_world_size(group)
    if num_ranks != schedule.num_ranks:
        raise ValueError(
            f"the schedule is of {schedule.num_ranks} ranks, but the group has {num_ranks}; "
            f"make the schedule with num_stages={num_ranks}, or give group=pyops.mesh.ALONE for "
            "all stages in this process"
        )


def _free_tag(group: dist.ProcessGroup) -> int:
    """The first tag of a new pipeline: rank 0 counts them in the store of the group."""
    first: int | None = None
    if dist.get_rank(group) == 0:
        number = group_store(group).add("pyops/pipeline", 1)
        first = FIRST_TAG + TAGS_PER_PIPELINE * number
    return next(each for each in gather(first, group=group) if each is not None)


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
            f"{len(layers)}: the first layer of each of the {num_stages} stages, and the number "
            "of layers"
        )
    return found


def raise_first_error(
    error: BaseException | None, action: Action | None, *, group: ProcessGroupLike
) -> None:
    """Raise this rank's error or, where it has none, that of the first rank that has one.

    Unlike `agree`, a rank that has an error of its own raises that: its traceback is the useful
    one. Collective, on every rank once one has failed.

    Args:
        error: What this rank raised; None if it only stopped because another failed.
        action: The action that failed; None before the first.
        group: The ranks of the pipeline.
    """
    place = "before the first action" if action is None else f"in {action}"
    failure = None if error is None else (type(error), f"{place}: {error}")
    failures = gather(failure, group=group)
    if error is not None:
        if hasattr(error, "add_note"):
            error.add_note(f"({place} of the pipeline's step)")
        raise error
    rank, (kind, text) = next((rank, each) for rank, each in enumerate(failures) if each)
    known = kind if kind in (ValueError, TypeError) else RuntimeError
    raise known(
        f"rank {rank} of the pipeline failed {text}"
        if kind is not KeyboardInterrupt
        else f"rank {rank} of the pipeline was interrupted"
    )

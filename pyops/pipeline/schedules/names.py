"""schedule(name, ...): the families by their names, and orders that somebody wrote down."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from pyops.pipeline.schedules.action import Action
from pyops.pipeline.schedules.asynchronous import pipedream, pipedream_2bw, pipemare
from pyops.pipeline.schedules.families import (
    gpipe,
    interleaved,
    interleaved_zb,
    one_f_one_b,
    zb1p,
    zbv,
)
from pyops.pipeline.schedules.schedule import Schedule

__all__ = ["NAMES", "custom", "schedule"]

NAMES: MappingProxyType[str, Callable[..., Schedule]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": interleaved,
        "zb1p": zb1p,
        "interleaved_zb": interleaved_zb,
        "zbv": zbv,
        "pipedream": pipedream,
        "pipedream_2bw": pipedream_2bw,
        "pipemare": pipemare,
    }
)


def schedule(name: str, *, num_stages: int, num_microbatches: int, **options: Any) -> Schedule:
    """The schedule `name`, of NAMES, for `num_stages` ranks of a pipeline and `num_microbatches`
    micro-batches, any of both.

    Args:
        options: What the family takes, such as v=2 of "interleaved" (stages on each rank) or
            warmup="b" of "1f1b".

    Raises:
        ValueError: For names, numbers or options that it does not know.
    """
    if name not in NAMES:
        raise ValueError(
            f"there is no schedule {name!r}; there are {', '.join(NAMES)}, and "
            "custom(orders) for your own"
        )
    for what, value in (
        ("num_stages", num_stages),
        ("num_microbatches", num_microbatches),
        ("v", options.get("v", 1)),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{what} is {value!r}; it must be a whole number, 1 or more")
    family = NAMES[name]
    known = [
        p.name for p in inspect.signature(family).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]
    if strange := sorted(set(options) - set(known)):
        raise ValueError(
            f"{name} has no option {strange[0]!r}; it has {', '.join(known) or 'none'}"
        )
    return family(num_stages, num_microbatches, **options)


def custom(
    orders: Sequence[str | Sequence[Action | str]],
    *,
    rank_of: Sequence[int] | None = None,
    name: str = "custom",
    weights: str = "flush",
    **options: Any,
) -> Schedule:
    """A schedule of your own: for each rank its actions, as "0F0 0F1 0B0 0B1" or one by one.

    Args:
        rank_of: The rank of each stage; by default that on whose order the stage's actions are.
        weights: See WEIGHTS.
        options: Accumulate, for weights="two".

    Raises:
        ValueError: For an order that is not complete, or that deadlocks: it names the cycle.
    """
    split = [order.split() if isinstance(order, str) else list(order) for order in orders]
    ranks = tuple(
        tuple(a if isinstance(a, Action) else Action.parse(a) for a in order) for order in split
    )
    if rank_of is None:
        owners = {action.stage: rank for rank, order in enumerate(ranks) for action in order}
        missing = [stage for stage in range(max(owners, default=-1) + 1) if stage not in owners]
        if missing:
            raise ValueError(
                f"stage {missing[0]} is on no rank, though there are stages up to "
                f"{max(owners)}; number them from 0"
            )
        rank_of = [owners[stage] for stage in range(len(owners))]
    microbatches = 1 + max(
        (a.number for order in ranks for a in order if a.kind != "U"), default=-1
    )
    return Schedule(name, microbatches, ranks, tuple(rank_of), weights, options)

"""The asynchronous schedules: no flush, so no bubble; micro-batches in flight meet different
weights.

    rank 0   0F0 0F1 0F2 0B0 0U0 0F3 0B1 0U1 0F4 ...   M micro-batches are the whole run, with one
                                                       start and one end

    n ranks, step t       the gradient that makes w_{t+1} from w_t
    pipedream             of f(w_1^{t-n+1}, ..., w_n^t): a micro-batch's backward meets the weights
                          of its forward
    pipedream, vertical   of f(w^{t-n+1}): and all ranks those that the first one had
    pipedream_2bw         of f(w^{t-1}), over micro-batches m A .. (m + 1) A - 1 with A >= n: two
                          versions are enough
    pipemare              forward with what is newest then, backward with what is newest then: one
                          version

Sources: PipeDream, Narayanan et al., SOSP 2019, section 3.3; PipeDream-2BW, Narayanan et al., ICML
2021, section 3.1; PipeMare, Yang et al., MLSys 2021, section 3.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from pyops.pipeline.schedules.action import Action
from pyops.pipeline.schedules.families import alternate
from pyops.pipeline.schedules.schedule import Schedule

__all__ = ["pipedream", "pipedream_2bw", "pipemare", "step_groups", "synchronous"]


def pipedream(ranks: int, microbatches: int, *, vertical_sync: bool = False) -> Schedule:
    """A step after every backward; rank s keeps K - s versions of its weights, with vertical_sync K
    of them."""
    return _continuous(
        "pipedream",
        ranks,
        microbatches,
        accumulate=1,
        weights="vertical" if vertical_sync else "stash",
        options={"vertical_sync": vertical_sync},
    )


def pipedream_2bw(ranks: int, microbatches: int, *, accumulate: int | None = None) -> Schedule:
    """A step after every `accumulate` backwards (default: K, the fewest), with the gradient of the
    weights before the last."""
    accumulate = ranks if accumulate is None else accumulate
    if accumulate < ranks:
        raise ValueError(
            f"accumulate is {accumulate}, but {ranks} ranks have up to {ranks} "
            "micro-batches in flight, which need a third "
            f"version of the weights; set it to {ranks} or more"
        )
    return _continuous("pipedream_2bw", ranks, microbatches, accumulate=accumulate, weights="two")


def pipemare(ranks: int, microbatches: int, *, accumulate: int = 1, warmup: str = "a") -> Schedule:
    """A step after every `accumulate` backwards, with whatever weights there are; `Schedule.delay`
    tells how old they are.

    Args:
        warmup: As in `one_f_one_b`; "b" has as many micro-batches in flight as a pipeline of
            separate forward and backward.
    """
    if accumulate < 1:
        raise ValueError(f"accumulate is {accumulate}; give the micro-batches of a step, 1 or more")
    return _continuous(
        "pipemare", ranks, microbatches, accumulate=accumulate, weights="newest", warmup=warmup
    )


def _continuous(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    accumulate: int,
    weights: str,
    warmup: str = "a",
    options: dict[str, object] | None = None,
) -> Schedule:
    if warmup not in ("a", "b"):
        raise ValueError(
            f"warmup is {warmup!r}; give 'a', as many micro-batches in flight as ranks, "
            "or 'b', twice that"
        )
    orders = []
    for s in range(ranks):
        forwards = [Action(s, "F", m) for m in range(microbatches)]
        backwards = [Action(s, "B", m) for m in range(microbatches)]
        order: list[Action] = []
        for action in alternate(
            forwards, backwards, ranks - s if warmup == "a" else 2 * (ranks - s) - 1
        ):
            order.append(action)
            step, rest = divmod(action.number + 1, accumulate)
            if action.kind == "B" and (not rest or action.number + 1 == microbatches):
                order.append(Action(s, "U", step - 1 if not rest else step))
        orders.append(tuple(order))
    return Schedule(
        name,
        microbatches,
        tuple(orders),
        tuple(range(ranks)),
        weights,
        {"accumulate": accumulate, "warmup": warmup, **(options or {})},
    )


def step_groups(schedule: Schedule) -> list[tuple[int, ...]]:
    """The micro-batches whose gradients make each step, in the order in which they come; none where
    no steps are taken.

    Raises:
        ValueError: Where stages disagree, or gradients are left that no step takes: a step's
            gradient is the mean over its micro-batches, which only has a meaning if they are the
            same ones everywhere.
    """
    if not schedule.takes_steps:
        return []
    found: list[list[tuple[int, ...]]] = []
    for stage, rank in enumerate(schedule.rank_of):
        groups: list[tuple[int, ...]] = []
        waiting: list[int] = []
        for action in schedule.ranks[rank]:
            if action.stage == stage and action.ends_activations:
                waiting.append(action.number)
            elif action.stage == stage and action.kind == "U":
                groups.append(tuple(sorted(waiting)))
                waiting.clear()
        if waiting:
            raise ValueError(
                f"stage {stage} takes no step after its backward of "
                f"{', '.join(map(str, waiting))}; end its order with "
                f"{Action(stage, 'U', len(groups))}"
            )
        found.append(groups)
    for stage, groups in enumerate(found):
        for step, (ours, theirs) in enumerate(itertools.zip_longest(groups, found[0])):
            if ours != theirs or not ours:
                raise ValueError(
                    f"step {step} is of micro-batches {list(theirs or ())} on stage 0, "
                    f"of {list(ours or ())} on stage {stage}; "
                    "let all stages take their steps after the same micro-batches, one or more"
                )
    return found[0]


def synchronous(schedule: Schedule) -> Schedule:
    """The same steps, of the same micro-batches, with none under way in any: GPipe, one step after
    the other."""
    groups = step_groups(schedule)
    step_of = {number: step for step, group in enumerate(groups) for number in group}
    orders = []
    for rank, order in enumerate(schedule.ranks):
        parts: list[list[Action]] = [[] for _ in groups]
        stages = schedule.stages_of(rank)
        for kinds, several in (("F", stages), ("RBIW", stages[::-1]), ("U", stages)):
            for stage in several:
                for action in order:
                    if action.stage == stage and action.kind in kinds:
                        parts[action.number if kinds == "U" else step_of[action.number]].append(
                            action
                        )
        orders.append(tuple(itertools.chain(*parts)))
    return replace(
        schedule, name=f"{schedule.name}, synchronous", ranks=tuple(orders), weights="flush"
    )

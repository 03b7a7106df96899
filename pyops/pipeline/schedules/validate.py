"""What a schedule must be before it runs: complete, in order, free of deadlock, and of lawful
weights. Linear in its length.

complete     each stage has one F and one B, or one I and one W, of every micro-batch, on its own
             rank
in order     what an action takes from its own rank stands before it there
no deadlock  values and the orders of all ranks and channels together have no cycle: then whatever
             takes how long, and whether or not a send waits for its receive, some rank can always
             go on
weights      versions that backward meets are those that the schedule's rule promises
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pyops.pipeline.schedules.action import KINDS, Action
from pyops.pipeline.schedules.orders import Orders, Transfer

__all__ = ["WEIGHTS", "validate"]

Node = Action | Transfer

# Which weights a micro-batch meets: one version between flushes; those of its forward again in
# backward; those that its forward met at stage 0; the version before the newest; whatever is
# newest, in forward and in backward.
WEIGHTS = ("flush", "stash", "vertical", "two", "newest")


def validate(schedule: Orders) -> tuple[tuple[Node, tuple[Node, ...]], ...]:
    """All actions and transfers in an order that keeps to what each needs, which stands beside it.

    ValueError names the action that is wrong and what stands beside it.
    """
    if schedule.num_microbatches < 1 or not schedule.ranks or not schedule.rank_of:
        raise ValueError(
            "a schedule needs a rank, a stage and a micro-batch, got "
            f"{len(schedule.ranks)} ranks, {len(schedule.rank_of)} "
            f"stages, {schedule.num_microbatches} micro-batches"
        )
    strange = [rank for rank in schedule.rank_of if not 0 <= rank < len(schedule.ranks)]
    if strange or set(schedule.rank_of) != set(range(len(schedule.ranks))):
        raise ValueError(
            f"rank_of is {list(schedule.rank_of)}; each of the {len(schedule.ranks)} "
            "ranks must have a stage"
        )
    _check_skips(schedule)
    _check_complete(schedule)
    _check_order(schedule)
    found = _in_order(schedule)
    _check_weights(schedule)
    return found


def _beside(order: Sequence[Action], place: int) -> str:
    """The neighbours of an action, itself marked."""
    around = [
        f"[{a}]" if i == place else str(a) for i, a in enumerate(order) if abs(i - place) <= 3
    ]
    return (
        ("... " if place > 3 else "")
        + " ".join(around)
        + (" ..." if place + 4 < len(order) else "")
    )


def _check_skips(schedule: Orders) -> None:
    for edge in schedule.skips:
        source, target = edge
        if not 0 <= source < target < schedule.num_stages or schedule.skips.count(edge) > 1:
            raise ValueError(
                f"skips has {edge}; expected pairs (stage, later stage) of the "
                f"{schedule.num_stages} stages, each once"
            )
    if list(schedule.skips) != sorted(schedule.skips):
        raise ValueError(f"skips is {schedule.skips}; give the pairs in rising order")


def _check_complete(schedule: Orders) -> None:
    for rank, order in enumerate(schedule.ranks):
        seen: dict[Action, int] = {}
        for place, action in enumerate(order):
            if action.kind not in KINDS or action.number < 0:
                raise ValueError(
                    f"rank {rank}: {action} is no action; kinds are {', '.join(KINDS)}: "
                    f"{_beside(order, place)}"
                )
            if (
                not 0 <= action.stage < schedule.num_stages
                or schedule.rank_of[action.stage] != rank
            ):
                raise ValueError(
                    f"rank {rank} does {action}, but its stages are "
                    f"{list(schedule.stages_of(rank))}: {_beside(order, place)}"
                )
            if action.kind != "U" and action.number >= schedule.num_microbatches:
                raise ValueError(
                    f"rank {rank} does {action}, but there are only "
                    f"{schedule.num_microbatches} micro-batches: "
                    f"{_beside(order, place)}"
                )
            if action in seen:
                raise ValueError(f"rank {rank} does {action} twice: {_beside(order, place)}")
            seen[action] = place
        split = schedule.splits_backward
        for stage in schedule.stages_of(rank):
            for index in range(schedule.num_microbatches):
                for kind in "FIW" if split else "FB":
                    if Action(stage, kind, index) not in seen:
                        raise ValueError(
                            f"rank {rank} never does {Action(stage, kind, index)}; it "
                            f"does {Counter(a.kind for a in order)}"
                        )
                wrong = Action(stage, "B", index)
                if split and wrong in seen:
                    raise ValueError(
                        f"rank {rank} does {wrong} in a schedule that has I and W: "
                        f"{_beside(order, seen[wrong])}; write one or "
                        "the other everywhere"
                    )


def _check_order(schedule: Orders) -> None:
    for rank, order in enumerate(schedule.ranks):
        place_of = {action: place for place, action in enumerate(order)}
        for place, action in enumerate(order):
            for need in schedule.needs(action):
                if schedule.rank_of[need.stage] == rank and place_of[need] > place:
                    raise ValueError(
                        f"rank {rank} does {action} before {need}, whose value it takes: "
                        f"{_beside(order, place)}"
                    )
            again = Action(action.stage, "R", action.number)
            if action.kind in "BI" and again in place_of and place_of[again] > place:
                raise ValueError(
                    f"rank {rank} does {action} before {again}, whose value it takes: "
                    f"{_beside(order, place)}"
                )


def _dependences(schedule: Orders) -> dict[Node, list[Node]]:
    """{action or transfer: what must be over before it begins}: values, ranks' orders, channels'
    orders."""
    before: dict[Node, list[Node]] = {}
    for order in schedule.ranks:
        for place, action in enumerate(order):
            before[action] = [order[place - 1]] if place else []
    backward = "I" if schedule.splits_backward else "B"
    for channel in schedule.transfers.values():
        for place, transfer in enumerate(channel):
            kind = "F" if transfer.kind[0] == "F" else backward
            before[transfer] = [Action(transfer.source, kind, transfer.number)]
            if place:
                before[transfer].append(channel[place - 1])
            before[Action(transfer.target, kind, transfer.number)].append(transfer)
    for rank, action in schedule:
        before[action] += [
            need for need in schedule.needs(action) if schedule.rank_of[need.stage] == rank
        ]
    return before


def _in_order(schedule: Orders) -> tuple[tuple[Node, tuple[Node, ...]], ...]:
    """Every action and transfer with what must be over before it, in an order that keeps to that.

    ValueError shows the cycle of a schedule that deadlocks.
    """
    before = _dependences(schedule)
    after: dict[Node, list[Node]] = {}
    waiting = {node: len(needs) for node, needs in before.items()}
    for node, needs in before.items():
        for need in needs:
            after.setdefault(need, []).append(node)
    found = [node for node, count in waiting.items() if not count]
    for node in found:  # grows meanwhile
        for following in after.get(node, ()):
            waiting[following] -= 1
            if not waiting[following]:
                found.append(following)
    if len(found) < len(before):
        raise _deadlock(schedule, before, set(before) - set(found))
    return tuple((node, tuple(before[node])) for node in found)


def _deadlock(schedule: Orders, before: dict[Node, list[Node]], stuck: set[Node]) -> ValueError:
    # Whatever is stuck waits for something that is stuck: going back from any of it must come
    # round.
    node = min(stuck, key=str)
    path: list[Node] = []
    seen: dict[Node, int] = {}
    while node not in seen:
        seen[node] = len(path)
        path.append(node)
        node = next(need for need in before[node] if need in stuck)
    cycle = path[seen[node] :]
    shown = " <- ".join(
        str(each) for each in [*cycle[:8], *(["..."] if len(cycle) > 8 else []), cycle[0]]
    )
    action = next((each for each in cycle if isinstance(each, Action)), None)
    beside = ""
    if action is not None:
        rank = schedule.rank_of[action.stage]
        beside = (
            f"; on rank {rank}: {_beside(schedule.ranks[rank], schedule.ranks[rank].index(action))}"
        )
    return ValueError(f"the schedule deadlocks, each waits for the next: {shown}{beside}")


def _check_weights(schedule: Orders) -> None:
    if schedule.weights not in WEIGHTS:
        raise ValueError(f"weights is {schedule.weights!r}; choose one of {', '.join(WEIGHTS)}")
    if schedule.weights == "two" and not isinstance(schedule.options.get("accumulate"), int):
        raise ValueError(
            "weights 'two' needs the option accumulate: how many micro-batches make a step"
        )
    for rank, order in enumerate(schedule.ranks):
        steps = dict.fromkeys(schedule.stages_of(rank), 0)
        in_flight = dict.fromkeys(schedule.stages_of(rank), 0)
        for place, action in enumerate(order):
            stage, newest = action.stage, steps[action.stage]
            if action.kind == "U":
                if action.number != newest:
                    raise ValueError(
                        f"rank {rank}: {action} should be step {newest}: {_beside(order, place)}"
                    )
                if schedule.flushes and in_flight[stage]:
                    raise ValueError(
                        f"rank {rank} steps stage {stage} while {in_flight[stage]} "
                        "micro-batches are between forward and "
                        "backward, but one version of the weights is promised: "
                        f"{_beside(order, place)}"
                    )
                steps[stage] = newest + 1
                continue
            in_flight[stage] += (action.kind == "F") - action.ends_activations
            if schedule.flushes or action.kind == "R":
                continue
            version = schedule.version(action)
            if version > newest:
                raise ValueError(
                    f"rank {rank} does {action} with version {version} of the weights, "
                    f"when they have taken {newest} steps: "
                    f"{_beside(order, place)}"
                )
            if schedule.weights == "two" and newest - version > 1:
                raise ValueError(
                    f"rank {rank} does {action} with version {version} of the weights, "
                    f"when they have taken {newest} steps, "
                    f"but only the last two versions are kept: {_beside(order, place)}"
                )

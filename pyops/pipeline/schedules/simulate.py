"""The simulator: when every action and transfer of a schedule begins and ends, given how long each
takes; bubble and memory.

    rank 0   |0F0 0F1 0F2 . . 0B0 ...   an action begins when its rank is free and its values are
                                        there
    channel  |  -0- -1- -2-             a transfer takes the channel for bytes / bandwidth, and
                                        arrives `latency` later

Every resource works in one order, so times follow in one pass along the dependences: nothing is
guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pyops.pipeline.schedules.action import Action
from pyops.pipeline.schedules.orders import Transfer
from pyops.pipeline.schedules.schedule import Schedule

__all__ = ["Costs", "Timeline", "simulate"]

PerStage = float | Sequence[float]
Times = tuple[float, float]  # begin, end


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) and bytes; a number is the same for every stage.

    Attributes:
        forward, input_gradient, weight_gradient: Of a micro-batch; B takes the last two together, R
            as long as a forward.
        step: Of the optimizer.
        latency: Until what was sent arrives.
        activation: Bytes that travel from a stage to the next, and back as a gradient.
        bandwidth: Bytes a second, of each channel.
        kept: Bytes that a micro-batch keeps at a stage between forward and backward.
        kept_input: Where it is recomputed.
        deferred_weight_grad: Between I and W, None if as before.
        skipped: Bytes that travel along a skip, or {(stage, later stage): bytes}.
        weights: Bytes of a stage's weights, gradients and states.
    """

    forward: PerStage = 1.0
    input_gradient: PerStage = 1.0
    weight_gradient: PerStage = 1.0
    step: PerStage = 0.0
    latency: float = 0.0
    activation: PerStage = 0.0
    bandwidth: float = math.inf
    kept: PerStage = 1.0
    kept_input: PerStage = 0.0
    deferred_weight_grad: PerStage | None = None
    skipped: float | Mapping[tuple[int, int], float] = 0.0
    weights: PerStage = 0.0

    def of(self, what: str, stage: int) -> float:
        """The field `what` of a stage."""
        value = getattr(self, what)
        if isinstance(value, Sequence):
            if not 0 <= stage < len(value):
                raise ValueError(
                    f"costs.{what} has {len(value)} numbers, but there is a stage "
                    f"{stage}; give one for each stage"
                )
            return float(value[stage])
        return float(value)

    def nbytes(self, transfer: Transfer) -> float:
        """What a transfer moves."""
        edge = min(transfer.source, transfer.target), max(transfer.source, transfer.target)
        if transfer.kind in "FB":
            return self.of("activation", edge[0])
        return float(
            self.skipped.get(edge, 0.0) if isinstance(self.skipped, Mapping) else self.skipped
        )

    def duration(self, action: Action) -> float:
        """How long an action takes."""
        parts = {
            "F": ("forward",),
            "R": ("forward",),
            "I": ("input_gradient",),
            "W": ("weight_gradient",),
            "U": ("step",),
            "B": ("input_gradient", "weight_gradient"),
        }[action.kind]
        return sum(self.of(part, action.stage) for part in parts)


@dataclass(frozen=True)
class Timeline:
    """What a run of `schedule` looks like: (begin, end) of every action and transfer; of a
    transfer, until it has arrived.

    Attributes:
        schedule: What was run.
        actions: (begin, end) of each action.
        transfers: (begin, end) of each transfer.
        memory: The peak of each rank, in bytes; empty where no costs give them.
    """

    schedule: Schedule
    actions: Mapping[Action, Times]
    transfers: Mapping[Transfer, Times] = field(default_factory=dict)
    memory: tuple[float, ...] = ()

    @property
    def makespan(self) -> float:
        """From the first beginning to the last end."""
        return max(end for _, end in self.actions.values()) - min(
            begin for begin, _ in self.actions.values()
        )

    def busy(self, rank: int) -> float:
        """How long the rank computes."""
        return sum(
            end - begin
            for action, (begin, end) in self.actions.items()
            if self.schedule.rank_of[action.stage] == rank
        )

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which nothing is computed."""
        ranks = self.schedule.num_ranks
        return 1.0 - sum(self.busy(rank) for rank in range(ranks)) / (ranks * self.makespan)

    @property
    def overhead(self) -> float:
        """How much longer it takes than the rank with most to do would need by itself."""
        return self.makespan / max(self.busy(rank) for rank in range(self.schedule.num_ranks)) - 1.0


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    duration: Callable[[Action], float] | None = None,
) -> Timeline:
    """The timeline of `schedule`.

    Args:
        duration: Of each action, in place of the costs'.

    Raises:
        ValueError: For costs that make no sense.
    """
    costs = costs or Costs()
    duration = duration or costs.duration
    _check(costs, schedule)
    actions: dict[Action, Times] = {}
    transfers: dict[Transfer, Times] = {}
    free: dict[tuple[int, int, str], float] = {}  # when a channel may take the next transfer
    for node, needs in schedule.order:
        if isinstance(node, Action):
            begin = max(
                (actions[n][1] if isinstance(n, Action) else transfers[n][1] for n in needs),
                default=0.0,
            )
            actions[node] = (begin, begin + duration(node))
        else:
            channel = (schedule.rank_of[node.source], schedule.rank_of[node.target], node.kind)
            made = next(actions[n][1] for n in needs if isinstance(n, Action))
            begin = max(made, free.get(channel, 0.0))
            free[channel] = begin + costs.nbytes(node) / costs.bandwidth
            transfers[node] = (begin, free[channel] + costs.latency)
    memory = tuple(_peak(schedule, rank, costs) for rank in range(schedule.num_ranks))
    return Timeline(schedule, actions, transfers, memory)


def _check(costs: Costs, schedule: Schedule) -> None:
    parts = [
        "forward",
        "input_gradient",
        "weight_gradient",
        "step",
        "activation",
        "kept",
        "kept_input",
        "weights",
    ]
    for stage in range(schedule.num_stages):
        for what in (
            parts if costs.deferred_weight_grad is None else [*parts, "deferred_weight_grad"]
        ):
            if not costs.of(what, stage) >= 0:
                raise ValueError(
                    f"costs.{what} of stage {stage} is {costs.of(what, stage)}; it must "
                    "be 0 or more"
                )
    if not costs.latency >= 0 or not costs.bandwidth > 0:
        raise ValueError(
            f"latency is {costs.latency}, bandwidth {costs.bandwidth}; expected 0 or "
            "more, and more than 0"
        )


def _peak(schedule: Schedule, rank: int, costs: Costs) -> float:
    """The most that a rank keeps: weights, and of each micro-batch in flight its activations, or
    its input and then these."""
    again = {(a.stage, a.number) for a in schedule.ranks[rank] if a.kind == "R"}
    now = peak = 0.0
    for action in schedule.ranks[rank]:
        stage, recomputed = action.stage, (action.stage, action.number) in again
        whole, small = costs.of("kept", stage), costs.of("kept_input", stage)
        deferred_weight_grad = (
            whole if costs.deferred_weight_grad is None else costs.of("deferred_weight_grad", stage)
        )
        if action.kind == "F":
            # A forward that keeps only its input still makes all of its activations, one after the
            # other.
            now += small if recomputed else whole
        elif action.kind == "R":
            now += whole - small
        peak = max(peak, now)
        if action.kind == "I":
            now += deferred_weight_grad - whole
        elif action.kind == "W":
            now -= deferred_weight_grad
        elif action.kind == "B":
            now -= whole
        peak = max(peak, now)
    return peak + sum(costs.of("weights", stage) for stage in schedule.stages_of(rank))

"""Schedule: what every rank computes, in its order; all else follows from it.

    1f1b of 3 stages and 4 micro-batches       rank 0   0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
                                               rank 1   1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
                                               rank 2   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

Values go along: F at a stage needs the activation of the stage before, B (or I) the gradient of the
stage after. Between ranks they travel on one FIFO channel for each (source, destination, activation
or gradient), in the order in which they are made. Values that skip stages (`with_skips`) have
channels of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pyops.pipeline.schedules.action import Action
from pyops.pipeline.schedules.orders import Orders, Transfer
from pyops.pipeline.schedules.validate import validate

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule(Orders):
    """The compute order of every rank.

    Attributes:
        name: Of the family, for titles.
        ranks: ranks[r] is what rank r does.
        rank_of: rank_of[s] is the rank of stage s; consecutive stages may share a rank.
        weights: Of pyops.pipeline.schedules.validate.WEIGHTS.
        options: What the family was called with.
        skips: Pairs (stage, later stage), rising, between which values go that the stages between
            do not see.

    Raises:
        ValueError: When it is made (see `pyops.pipeline.schedules.validate`): names the action that
            is wrong, and its neighbours.
    """

    def __post_init__(self) -> None:
        _ = self.order

    @cached_property
    def order(self) -> tuple[tuple[Action | Transfer, tuple[Action | Transfer, ...]], ...]:
        """All actions and transfers, each after what must be over before it begins, which stands
        beside it."""
        return validate(self)

    @cached_property
    def last_gradients(self) -> tuple[int, ...]:
        """For each stage, the place in its rank's order of the last action that adds to its
        weights' gradients.

        Its gradients can be reduced over data-parallel ranks from there on.
        """
        found = [-1] * self.num_stages
        for order in self.ranks:
            for place, action in enumerate(order):
                if action.ends_activations:
                    found[action.stage] = place
        return tuple(found)

    def with_recompute(self, mode: str) -> Schedule:
        """With an R before each backward whose forward keeps nothing: "always", "except_last"
        (micro-batch), "never".

        R stands right before the backward, and needs no gradient: a rank that waits for one
        recomputes meanwhile.
        """
        stops = {
            "always": self.num_microbatches,
            "except_last": self.num_microbatches - 1,
            "never": 0,
        }
        if mode not in stops:
            raise ValueError(f"recompute is {mode!r}; choose one of {', '.join(stops)}")
        orders = [
            tuple(
                each
                for action in order
                if action.kind != "R"
                for each in (
                    (Action(action.stage, "R", action.number), action)
                    if action.kind in "BI" and action.number < stops[mode]
                    else (action,)
                )
            )
            for order in self.ranks
        ]
        return replace(self, ranks=tuple(orders), options={**self.options, "recompute": mode})

    def with_skips(self, edges: Iterable[tuple[int, int]]) -> Schedule:
        """With values that go from a stage to a later one directly, and their gradients back. Those
        of an edge go together."""
        return replace(self, skips=tuple(sorted(set(edges))))

    def forward_only(self) -> Orders:
        """Its forwards alone, each rank's in the same order: for evaluation."""
        orders = tuple(
            tuple(action for action in order if action.kind == "F") for order in self.ranks
        )
        return Orders(self.name, self.num_microbatches, orders, self.rank_of, skips=self.skips)

    def live(self, rank: int, *, bytes_of: Sequence[float] | None = None) -> list[float]:
        """After each action of the rank, what its stages keep of micro-batches: 1 for each forward
        until its last backward.

        Args:
            bytes_of: For each stage, what it keeps of a micro-batch (default: 1).
        """
        kept, now = [], 0.0
        for action in self.ranks[rank]:
            size = 1.0 if bytes_of is None else bytes_of[action.stage]
            if action.kind == "F":
                now += size
            kept.append(now)
            if action.ends_activations:
                now -= size
        return kept

    def peak(self, rank: int) -> int:
        """How many micro-batches' activations the rank keeps at most, those of each of its stages
        counted."""
        return int(max(self.live(rank), default=0))

    def versions_kept(self, stage: int) -> int:
        """The most versions of the stage's weights that are needed at one time, the newest among
        them."""
        if self.flushes:
            return 1
        order = [a for a in self.ranks[self.rank_of[stage]] if a.stage == stage]
        last_use: dict[int, int] = {}
        for place, action in enumerate(order):
            if action.kind in "FBIW":
                last_use[self.version(action)] = place
        most = 1
        for place, action in enumerate(order):
            newest = self._steps_before[action]
            old = [v for v, last in last_use.items() if v < newest and last >= place]
            most = max(most, 1 + len(old))
        return most

    def delay(self, stage: int) -> float:
        """By how many steps the weights of a forward are older than those that its gradient is
        applied to, on the whole run's average over micro-batches from the pipeline's full state
        on."""
        order = [a for a in self.ranks[self.rank_of[stage]] if a.stage == stage]
        ages: list[int] = []
        waiting: list[Action] = []
        for action in order:
            if action.ends_activations:
                waiting.append(action)
            elif action.kind == "U":
                ages += [
                    action.number - self.version(Action(stage, "F", each.number))
                    for each in waiting
                ]
                waiting.clear()
        settled = ages[len(ages) // 2 :]
        return sum(settled) / len(settled) if settled else 0.0

    def slots(self, stage: int) -> dict[int, int]:
        """{micro-batch: the buffer that its activations may use at the stage}: a buffer is used
        again once it is free."""
        free: list[int] = []
        found: dict[int, int] = {}
        buffers = 0
        for action in self.ranks[self.rank_of[stage]]:
            if action.stage != stage:
                continue
            if action.kind == "F":
                if not free:
                    free, buffers = [buffers], buffers + 1
                found[action.number] = free.pop()
            elif action.ends_activations:
                free.append(found[action.number])
        return found

"""Schedule: what every rank computes, in its order; all else follows from it.

    1f1b of 3 stages and 4 micro-batches       rank 0   0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
                                               rank 1   1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
                                               rank 2   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

Values go along: F at a stage needs the activation of the stage before, B (or I) the gradient of the stage after. Between ranks
they travel on one FIFO channel for each (source, destination, activation or gradient), in the order in which they are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from pyops.pipeline.action import Action
from pyops.pipeline.validate import in_order, validate

__all__ = ["Schedule", "Transfer"]


class Transfer(NamedTuple):
    """The activation (kind "F") or the gradient (kind "B") of micro-batch `number` that `source` makes and `target` needs."""

    kind: str
    source: int
    target: int
    number: int

    def __str__(self) -> str:
        return f"{'activation' if self.kind == 'F' else 'gradient'} {self.source}->{self.target} of {self.number}"


@dataclass(frozen=True)
class Schedule:
    """The compute order of every rank.

    name: of the family, for titles. ranks[r]: what rank r does. rank_of[s]: where stage s is; consecutive stages may share a
    rank. weights: of pyops.pipeline.validate.WEIGHTS. options: what the family was called with.

    Checked when made (see `pyops.pipeline.validate`): ValueError names the action that is wrong, and its neighbours.
    """

    name: str
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    rank_of: tuple[int, ...]
    weights: str = "flush"
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        validate(self)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Of all ranks together: a rank may have several."""
        return len(self.rank_of)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are separate actions."""
        return any(action.kind == "I" for order in self.ranks for action in order)

    @property
    def flushes(self) -> bool:
        """Whether all micro-batches meet one version of the weights."""
        return self.weights == "flush"

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The rank's stages, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        """(rank, action), rank by rank."""
        return ((rank, action) for rank, order in enumerate(self.ranks) for action in order)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, order)) for order in self.ranks)

    # ------------------------------------------------------------------------------------------------ what follows

    @cached_property
    def transfers(self) -> Mapping[tuple[int, int, str], tuple[Transfer, ...]]:
        """{(source rank, target rank, kind): what travels on that channel, in the order in which it is made}."""
        last = self.num_stages - 1
        found: dict[tuple[int, int, str], list[Transfer]] = {}
        for rank, action in self:
            neighbour, kind = None, ""
            if action.kind == "F" and action.stage < last:
                neighbour, kind = action.stage + 1, "F"
            elif action.kind in "BI" and action.stage > 0:
                neighbour, kind = action.stage - 1, "B"
            if neighbour is not None and self.rank_of[neighbour] != rank:
                channel = (rank, self.rank_of[neighbour], kind)
                found.setdefault(channel, []).append(Transfer(kind, action.stage, neighbour, action.number))
        return MappingProxyType({channel: tuple(several) for channel, several in found.items()})

    @cached_property
    def order(self) -> tuple[tuple[Action | Transfer, tuple[Action | Transfer, ...]], ...]:
        """All actions and transfers, each after what must be over before it begins, which stands beside it."""
        return in_order(self)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The actions whose values this one takes, on whatever rank."""
        stage, kind, index = action.stage, action.kind, action.number
        backward = "I" if self.splits_backward else "B"
        if kind == "F":
            return (Action(stage - 1, "F", index),) if stage else ()
        if kind in "BI":
            after = (Action(stage + 1, backward, index),) if stage + 1 < self.num_stages else ()
            return (Action(stage, "F", index), *after)
        if kind == "W":
            return (Action(stage, "I", index),)
        return (Action(stage, "F", index),) if kind == "R" else ()

    @cached_property
    def last_gradients(self) -> tuple[int, ...]:
        """For each stage, the place in its rank's order of the last action that adds to its weights' gradients.

        Its gradients can be reduced over data-parallel ranks from there on.
        """
        found = [-1] * self.num_stages
        for order in self.ranks:
            for place, action in enumerate(order):
                if action.ends_activations:
                    found[action.stage] = place
        return tuple(found)

    def with_recompute(self, mode: str) -> Schedule:
        """With an R before each backward whose forward keeps nothing: "always", "except_last" (micro-batch), "never".

        R stands right before the backward, and needs no gradient: a rank that waits for one recomputes meanwhile.
        """
        stops = {"always": self.num_microbatches, "except_last": self.num_microbatches - 1, "never": 0}
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

    def live(self, rank: int, *, bytes_of: Sequence[float] | None = None) -> list[float]:
        """After each action of the rank, what its stages keep of micro-batches: 1 for each forward until its last backward.

        bytes_of: for each stage, what it keeps of a micro-batch (default: 1).
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
        """How many micro-batches' activations the rank keeps at most, those of each of its stages counted."""
        return int(max(self.live(rank), default=0))

    def version(self, action: Action) -> int:
        """How many steps the weights have taken that an F, B, I or W meets at its stage, by the rule of `weights`."""
        if self.weights == "flush":
            return 0
        if self.weights == "two":
            return max(0, action.number // int(self.options["accumulate"]) - 1)
        stage = 0 if self.weights == "vertical" else action.stage
        kind = action.kind if self.weights == "newest" else "F"
        return self._steps_before[Action(stage, kind, action.number)]

    @cached_property
    def _steps_before(self) -> Mapping[Action, int]:
        """For each action, the steps that its stage has taken."""
        found: dict[Action, int] = {}
        for order in self.ranks:
            taken = dict.fromkeys(range(self.num_stages), 0)
            for action in order:
                found[action] = taken[action.stage]
                taken[action.stage] += action.kind == "U"
        return found

    def versions_kept(self, stage: int) -> int:
        """The most versions of the stage's weights that are needed at one time, the newest among them."""
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
        """By how many steps the weights of a forward are older than those that its gradient is applied to, on the whole run's
        average over micro-batches from the pipeline's full state on."""
        order = [a for a in self.ranks[self.rank_of[stage]] if a.stage == stage]
        ages: list[int] = []
        waiting: list[Action] = []
        for action in order:
            if action.kind == "B":
                waiting.append(action)
            elif action.kind == "U":
                ages += [action.number - self.version(Action(stage, "F", each.number)) for each in waiting]
                waiting.clear()
        settled = ages[len(ages) // 2 :]
        return sum(settled) / len(settled) if settled else 0.0

    def slots(self, stage: int) -> dict[int, int]:
        """{micro-batch: the buffer that its activations may use at the stage}: a buffer is used again once it is free."""
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

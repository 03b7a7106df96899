"""Orders: what every rank computes, in its order, and which values go from action to action; nothing is checked here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from pyops.pipeline.action import Action

__all__ = ["Orders", "Transfer"]


class Transfer(NamedTuple):
    """The activation (kind "F") or the gradient (kind "B") of micro-batch `number` that `source` makes and `target` needs."""

    kind: str
    source: int
    target: int
    number: int

    def __str__(self) -> str:
        return f"{'activation' if self.kind == 'F' else 'gradient'} {self.source}->{self.target} of {self.number}"


@dataclass(frozen=True)
class Orders:
    """The fields of a Schedule, and what follows from them without any rule: see there."""

    name: str
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    rank_of: tuple[int, ...]
    weights: str = "flush"
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

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

    @cached_property
    def takes_steps(self) -> bool:
        """Whether optimizer steps are actions of it."""
        return any(action.kind == "U" for order in self.ranks for action in order)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The rank's stages, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        """(rank, action), rank by rank."""
        return ((rank, action) for rank, order in enumerate(self.ranks) for action in order)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, order)) for order in self.ranks)

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

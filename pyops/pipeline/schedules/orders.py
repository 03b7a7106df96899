"""Orders: what every rank computes, in its order, and which values go from action to action;
nothing is checked here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from pyops.pipeline.schedules.action import Action

__all__ = ["Orders", "Transfer"]

WHAT = MappingProxyType(
    {"F": "activation", "B": "gradient", "FS": "skip", "BS": "gradient of skip"}
)


class Transfer(NamedTuple):
    """What stage `source` makes of micro-batch `number` and stage `target` needs.

    Attributes:
        kind: "F" an activation, "B" its gradient, "FS" what skips the stages between, "BS" its
            gradient.
    """

    kind: str
    source: int
    target: int
    number: int

    @property
    def edge(self) -> tuple[str, int, int]:
        """Kind, source and target: of all micro-batches."""
        return self[:3]

    def __str__(self) -> str:
        return f"{WHAT[self.kind]} {self.source}->{self.target} of {self.number}"


@dataclass(frozen=True)
class Orders:
    """The fields of a Schedule, and what follows from them without any rule: see there."""

    name: str
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    rank_of: tuple[int, ...]
    weights: str = "flush"
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    skips: tuple[tuple[int, int], ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles: what follows from the fields is found anew, and a mapping proxy can't
        # be copied.
        return {each.name: getattr(self, each.name) for each in fields(self)} | {
            "options": dict(self.options)
        }

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
        """{(source rank, target rank, kind): what travels on that channel, in the order in which it
        is made}."""
        found: dict[tuple[int, int, str], list[Transfer]] = {}
        for rank, action in self:
            for transfer in self.leaving(action):
                target = self.rank_of[transfer.target]
                if target != rank:
                    found.setdefault((rank, target, transfer.kind), []).append(transfer)
        return MappingProxyType({channel: tuple(several) for channel, several in found.items()})

    def arriving(self, action: Action) -> list[Transfer]:
        """The values of other stages that an action takes: that of its neighbour, and those that
        skip, by their stage."""
        stage, kind, number = action
        if kind == "F":
            found = [Transfer("F", stage - 1, stage, number)] if stage else []
            found += [
                Transfer("FS", source, stage, number)
                for source, target in self.skips
                if target == stage
            ]
        elif kind in "BI":
            found = [Transfer("B", stage + 1, stage, number)] if stage + 1 < self.num_stages else []
            found += [
                Transfer("BS", target, stage, number)
                for source, target in self.skips
                if source == stage
            ]
        else:
            found = []
        return found

    def leaving(self, action: Action) -> list[Transfer]:
        """The values that an action makes for other stages: that for its neighbour, and those that
        skip, by their stage."""
        stage, kind, number = action
        if kind == "F":
            found = [Transfer("F", stage, stage + 1, number)] if stage + 1 < self.num_stages else []
            found += [
                Transfer("FS", stage, target, number)
                for source, target in self.skips
                if source == stage
            ]
        elif kind in "BI":
            found = [Transfer("B", stage, stage - 1, number)] if stage else []
            found += [
                Transfer("BS", stage, source, number)
                for source, target in self.skips
                if target == stage
            ]
        else:
            found = []
        return found

    def needs(self, action: Action) -> list[Action]:
        """The actions whose values this one takes, on whatever rank."""
        stage, kind, index = action
        if kind == "W":
            return [Action(stage, "I", index)]
        if kind == "R":
            return [Action(stage, "F", index)]
        made_by = "F" if kind == "F" else "I" if self.splits_backward else "B"
        found = [Action(transfer.source, made_by, index) for transfer in self.arriving(action)]
        return [Action(stage, "F", index), *found] if kind in "BI" else found

    def version(self, action: Action) -> int:
        """How many steps the weights have taken that an F, B, I or W meets at its stage, by the
        rule of `weights`."""
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

"""StageOptimizer: the optimizer of a stage whose steps are actions of the schedule, and PipeMare's
remedies for stale weights.

    schedule   ... 0B3 0U1 0F6 0B4 ...          U: gradients since the last U -> optimizer.step() -> gradients gone
    pipeline   optimizer=lambda parameters: SGD(parameters, lr=0.1)           one for every stage that has parameters

Sources: PipeMare, Yang et al., MLSys 2021, section 3 (T1 and T2), section 4 (T3).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pyops.pipeline.runtime.stage import Stage
from pyops.pipeline.runtime.weight_versions import CorrectedWeights, StashedWeights, WeightVersions
from pyops.pipeline.schedules.action import Action
from pyops.pipeline.schedules.schedule import Schedule

__all__ = ["MakeOptimizer", "PipeMareOptions", "StageOptimizer"]

MakeOptimizer = Callable[[list[Tensor]], Optimizer]


@dataclass(frozen=True)
class PipeMareOptions:
    """What is done about weights that are older than the step that their gradient makes (PipeMare's
    T1, T2, T3).

    anneal: T1, in steps: step k of a stage whose weights are `delay` steps old (`Schedule.delay`)
    has its learning rate divided
        by delay ** (1 - min(k / anneal, 1)); by nothing where delay is less than 1. 0: none.
    decay: T2, for schedules of weights "newest": backward meets an estimate of the weights that
    forward met, see
        `pyops.pipeline.runtime.weight_versions.CorrectedWeights`; the paper has exp(-2). None: the newest weights as they are.
    synchronous: T3: so many calls of `step` at the beginning have no micro-batch under way during a
    step; math.inf: all.
        Steps of theirs don't count for anneal.
    """

    anneal: int = 0
    decay: float | None = None
    synchronous: float = 0

    def __post_init__(self) -> None:
        if isinstance(self.anneal, bool) or not isinstance(self.anneal, int) or self.anneal < 0:
            raise ValueError(
                f"anneal is {self.anneal!r}; give the steps until the learning rate is "
                "whole, 0 or more"
            )
        if self.decay is not None and not 0 < self.decay < 1:
            raise ValueError(
                f"decay is {self.decay!r}; give a number between 0 and 1, such as exp(-2), or None"
            )
        if not self.synchronous >= 0:
            raise ValueError(
                f"synchronous is {self.synchronous!r}; give the calls of step, 0 or "
                "more, that are synchronous"
            )


class StageOptimizer:
    """What makes the steps of one stage. optimizer: None for a stage without parameters to train.

    steps: how many were taken while micro-batches were under way. names: of the parameters, in the
    optimizer's order.
    """

    def __init__(
        self,
        stage: Stage,
        schedule: Schedule,
        *,
        optimizer: MakeOptimizer,
        remedies: PipeMareOptions,
    ) -> None:
        named = {
            f"{stage.first + i}.{name}": p
            for i, layer in enumerate(stage.layers)
            for name, p in layer.named_parameters()
            if p.requires_grad
        }
        # A layer that stands in the stage twice has its parameters once.
        unique = {id(p): name for name, p in reversed(named.items())}
        self.index, self.names = (
            stage.index,
            [name for name, p in named.items() if unique[id(p)] == name],
        )
        parameters: list[Tensor] = [named[name] for name in self.names]
        self.optimizer = (
            _made(optimizer, stage.index, dict(zip(self.names, parameters, strict=True)))
            if parameters
            else None
        )
        self.versions = _versions(parameters, schedule, stage.index, remedies)
        if isinstance(self.versions, StashedWeights):
            _check_apart(self.names, parameters)
        self.steps = 0
        self._delay, self._anneal = max(1.0, schedule.delay(stage.index)), remedies.anneal
        self._synchronous = False

    def begin(self, *, synchronous: bool) -> None:
        """A stretch of the stream begins; gradients that are there are no part of it."""
        self._synchronous = synchronous
        self.versions.begin(synchronous=synchronous)
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def end(self) -> None:
        """The stretch is over, or has failed."""
        self._synchronous = False
        self.versions.end()

    def step(self, action: Action) -> None:
        """The U `action`."""
        if self.optimizer is None:
            return
        with self.versions.stepping(action), self._rescaled(self.optimizer):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += not self._synchronous

    @property
    def rate(self) -> float:
        """What the learning rate of the next step is multiplied by."""
        if not self._anneal or self._synchronous:
            return 1.0
        return float(self._delay ** (min(self.steps / self._anneal, 1.0) - 1.0))

    @contextlib.contextmanager
    def _rescaled(self, optimizer: Optimizer) -> Iterator[None]:
        factor = self.rate
        if factor == 1.0:
            yield
            return
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        try:
            yield
        finally:
            for group, lr in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = lr

    def state(self) -> dict[str, Any]:
        """Tensors, numbers, strings, in dicts and lists; the tensors are those in use."""
        found: dict[str, Any] = {"names": list(self.names), "steps": self.steps}
        if self.optimizer is not None:
            found["optimizer"] = self.optimizer.state_dict()
        if isinstance(self.versions, CorrectedWeights):
            found["drift"] = [drift.clone() for drift in self.versions.drift]
        return found

    def check(self, state: Mapping[str, Any]) -> None:
        """ValueError for a state of another stage."""
        if list(state["names"]) != self.names:
            theirs, ours = set(state["names"]), set(self.names)
            which = sorted(theirs ^ ours)
            raise ValueError(
                f"the state of stage {self.index} is of {len(theirs)} parameters, this "
                f"stage has {len(ours)}; the first that "
                "only one of them has is "
                f"{which[0] if which else 'none, but their order differs'}: make the "
                "pipeline with the "
                "same boundaries"
            )

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.steps = int(state["steps"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        if isinstance(self.versions, CorrectedWeights):
            drifts = state.get("drift") or [drift.new_zeros(()) for drift in self.versions.drift]
            for drift, value in zip(self.versions.drift, drifts, strict=True):
                drift.copy_(value)


def _made(optimizer: MakeOptimizer, stage: int, named: dict[str, Tensor]) -> Optimizer:
    made = optimizer(list(named.values()))
    if not isinstance(made, Optimizer):
        raise TypeError(
            f"optimizer made a {type(made).__name__} for stage {stage}; return a "
            "torch.optim.Optimizer"
        )
    held = {id(p) for group in made.param_groups for p in group["params"]}
    left = [name for name, p in named.items() if id(p) not in held]
    if left or len(held) > len(named):
        what = (
            f"lacks {left[0]}"
            if left
            else f"has {len(held) - len(named)} parameters that are not the stage's"
        )
        raise ValueError(
            f"the optimizer of stage {stage} {what}; give it the parameters that it is "
            "called with, and freeze those that "
            "should not be trained"
        )
    return made


def _versions(
    parameters: list[Tensor], schedule: Schedule, stage: int, remedies: PipeMareOptions
) -> WeightVersions:
    if schedule.weights == "newest" and remedies.decay is not None and parameters:
        return CorrectedWeights(parameters, schedule, stage, decay=remedies.decay)
    if schedule.weights in ("flush", "newest") or not parameters:
        return WeightVersions(parameters)
    return StashedWeights(parameters, schedule, stage)


def _check_apart(names: list[str], parameters: list[Tensor]) -> None:
    seen: dict[int, str] = {}
    for name, p in zip(names, parameters, strict=True):
        if not p.numel():
            continue
        other = seen.setdefault(p.untyped_storage().data_ptr(), name)
        if other != name:
            raise ValueError(
                f"parameters {other} and {name} share memory, which versions of the "
                "weights would take apart; let each have "
                "its own, or be one parameter in both places"
            )

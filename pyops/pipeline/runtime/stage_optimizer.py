"""StageOptimizer: the optimizer of a stage whose steps are actions of the schedule, with PipeMare's
annealed learning rate.

    schedule   ... 0B3 0U1 0F6 0B4 ...     U: gradients since the last U -> optimizer.step() -> none
    pipeline   optimizer=lambda parameters: SGD(parameters, lr=0.1)     for every stage with weights

Source: PipeMare, Yang et al., MLSys 2021, section 3 (T1 and T2), section 4 (T3).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pyops.pipeline.runtime.pipeline_config import MakeOptimizer, PipeMareOptions
from pyops.pipeline.runtime.stage import Stage
from pyops.pipeline.runtime.weight_versions import (
    CorrectedWeights,
    StashedWeights,
    WeightVersions,
)
from pyops.pipeline.schedules.action import Action
from pyops.pipeline.schedules.schedule import Schedule

__all__ = ["StageOptimizer"]


class StageOptimizer:
    """The optimizer steps of one stage, and the versions of its weights.

    optimizer: None for a stage without parameters to train. steps: how many were taken while
    micro-batches were in flight. names: of the parameters, in the order of the optimizer.
    """

    def __init__(
        self,
        stage: Stage,
        schedule: Schedule,
        *,
        make_optimizer: MakeOptimizer,
        pipemare: PipeMareOptions,
    ) -> None:
        named = {
            f"{stage.first + i}.{name}": p
            for i, layer in enumerate(stage.layers)
            for name, p in layer.named_parameters()
            if p.requires_grad
        }
        # A layer that stands in the stage twice has its parameters once, under their first names.
        unique = {id(p): name for name, p in reversed(named.items())}
        self.index = stage.index
        self.names = [name for name, p in named.items() if unique[id(p)] == name]
        parameters: list[Tensor] = [named[name] for name in self.names]
        self.optimizer: Optimizer | None = None
        if parameters:
            self.optimizer = _made(
                make_optimizer, stage.index, dict(zip(self.names, parameters, strict=True))
            )
        self.versions = _versions(parameters, schedule, stage.index, pipemare)
        if isinstance(self.versions, StashedWeights):
            _check_apart(self.names, parameters)
        self.steps = 0
        self._delay, self._anneal = max(1.0, schedule.delay(stage.index)), pipemare.anneal
        self._synchronous = False

    def begin(self, *, synchronous: bool) -> None:
        """A call of `Pipeline.step` begins; gradients of before are dropped.

        Args:
            synchronous: No micro-batch is in flight in any of its optimizer steps.
        """
        self._synchronous = synchronous
        self.versions.begin(synchronous=synchronous)
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def end(self) -> None:
        """The call of `Pipeline.step` is over, or has failed."""
        self._synchronous = False
        self.versions.end()

    def step(self, action: Action) -> None:
        """Take the step that is the action U."""
        if self.optimizer is None:
            return
        with self.versions.stepping(action), self._rescaled(self.optimizer):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += not self._synchronous

    @property
    def lr_factor(self) -> float:
        """What the learning rate of the next step is multiplied by."""
        if not self._anneal or self._synchronous:
            return 1.0
        return float(self._delay ** (min(self.steps / self._anneal, 1.0) - 1.0))

    @contextlib.contextmanager
    def _rescaled(self, optimizer: Optimizer) -> Iterator[None]:
        factor = self.lr_factor
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

    def state_dict(self) -> dict[str, Any]:
        """{"names", "steps", "optimizer", "drift"}: tensors, numbers, strings, in dicts and lists;
        the tensors are those in use."""
        found: dict[str, Any] = {"names": list(self.names), "steps": self.steps}
        if self.optimizer is not None:
            found["optimizer"] = self.optimizer.state_dict()
        if isinstance(self.versions, CorrectedWeights):
            found["drift"] = [drift.clone() for drift in self.versions.drift]
        return found

    def check_state(self, state: Mapping[str, Any]) -> None:
        """ValueError for a state of another stage."""
        if list(state["names"]) == self.names:
            return
        saved, own = set(state["names"]), set(self.names)
        which = sorted(saved ^ own)
        raise ValueError(
            f"the state of stage {self.index} is of {len(saved)} parameters, this stage has "
            f"{len(own)}; the first that only one of them has is "
            f"{which[0] if which else 'none, but their order differs'}: make the pipeline with the "
            "same boundaries"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.steps = int(state["steps"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        if isinstance(self.versions, CorrectedWeights):
            drifts = state.get("drift") or [drift.new_zeros(()) for drift in self.versions.drift]
            for drift, value in zip(self.versions.drift, drifts, strict=True):
                drift.copy_(value)


def _made(make_optimizer: MakeOptimizer, stage: int, named: dict[str, Tensor]) -> Optimizer:
    """The optimizer of a stage. TypeError, ValueError for one that is not over its parameters."""
    made = make_optimizer(list(named.values()))
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
            "called with, and freeze those that should not be trained"
        )
    return made


def _versions(
    parameters: list[Tensor], schedule: Schedule, stage: int, pipemare: PipeMareOptions
) -> WeightVersions:
    if schedule.weights == "newest" and pipemare.decay is not None and parameters:
        return CorrectedWeights(parameters, schedule, stage, decay=pipemare.decay)
    if schedule.weights in ("flush", "newest") or not parameters:
        return WeightVersions(parameters)
    return StashedWeights(parameters, schedule, stage)


def _check_apart(names: list[str], parameters: list[Tensor]) -> None:
    """ValueError for two parameters in one memory: a version is the memory of each parameter."""
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

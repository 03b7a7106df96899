"""Stream: what a schedule that takes its steps itself needs beyond the gradients: optimizers,
versions, the state of both.

optimizer=lambda parameters: SGD(parameters, lr=0.1)     ->  stream.optimizers {stage: optimizer}
step(batch, target)                                      ->  one stretch: start, micro-batches and steps, end
stream.state_dict(), load_state_dict(state)              ->  of this process's stages; those of all ranks together load too
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from pyops.comm.agreement import agree
from pyops.pipeline.runtime.microbatch import loss_weights
from pyops.pipeline.runtime.stage import Stage
from pyops.pipeline.runtime.stage_optimizer import MakeOptimizer, PipeMareOptions, StageOptimizer
from pyops.pipeline.schedules.asynchronous import step_groups, synchronous
from pyops.pipeline.schedules.schedule import Schedule

__all__ = ["Stream"]


class Stream:
    """The steps of all `stages` of this process; none where the schedule takes none.

    tied: names of parameters that several stages share. ValueError, on every rank alike, for an
    optimizer where none is needed or none where one is, remedies that don't go with the schedule,
    tied parameters, steps of unlike micro-batches.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        *,
        optimizer: MakeOptimizer | None,
        remedies: PipeMareOptions | None,
        tied: Sequence[Sequence[str]],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.name = schedule.name
        self.stepping: dict[int, StageOptimizer] = {}
        self.groups: list[tuple[int, ...]] = []
        error: Exception | None = None
        try:
            _check(schedule, optimizer, remedies, tied)
            self.groups = step_groups(schedule)
            if optimizer is not None:
                for index, stage in stages.items():
                    self.stepping[index] = StageOptimizer(
                        stage, schedule, optimizer=optimizer, remedies=remedies or PipeMareOptions()
                    )
        except Exception as caught:
            error = caught
        if group is not None:
            agree(error, group=group)
        elif error is not None:
            raise error
        self.calls = 0
        self._early = remedies.synchronous if remedies is not None else 0
        self.synchronous = synchronous(schedule) if self._early else None

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """{stage: its optimizer}, of the stages here that have parameters to train; such as for
        learning rate schedules."""
        return {
            index: each.optimizer
            for index, each in self.stepping.items()
            if each.optimizer is not None
        }

    @property
    def early(self) -> bool:
        """Whether the next call of `step` is synchronous."""
        return self.calls < self._early

    @contextlib.contextmanager
    def stretch(self) -> Iterator[None]:
        """Within, the stages run one stretch of the stream; afterwards their parameters are the
        newest, however it ended."""
        for each in self.stepping.values():
            each.begin(synchronous=self.early)
        try:
            yield
        finally:
            for each in self.stepping.values():
                each.end()

    def seeds(
        self,
        counted: Sequence[Any],
        count: Callable[[Any], Any] | None,
        *,
        scale: float,
        reduction: str,
    ) -> list[float]:
        """How much each micro-batch counts in the gradient of its step: its portion of that, or 1
        where losses are sums."""
        if scale != 1:
            raise ValueError(
                f"scale is {scale}, but the schedule {self.name!r} takes its steps "
                "itself; leave scale out"
            )
        found = [1.0] * len(counted)
        if reduction == "sum":
            return found
        for group in self.groups:
            for number, portion in zip(
                group, loss_weights([counted[n] for n in group], count), strict=True
            ):
                found[number] = portion
        return found

    def state_dict(self) -> dict[str, Any]:
        """{"calls": of step, "stages": {stage: names, steps, optimizer, drift}}: dicts, lists,
        tensors, numbers, strings."""
        return {
            "calls": self.calls,
            "stages": {str(index): each.state() for index, each in self.stepping.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, on this rank or on several whose stages were put
        together.

        ValueError, before anything is changed, for a state that lacks a stage or belongs to other
        boundaries.
        """
        stages = state["stages"]
        for index, each in self.stepping.items():
            if str(index) not in stages:
                raise ValueError(
                    f"the state has stages {', '.join(stages)}, not {index}; put those "
                    "of all ranks together"
                )
            each.check(stages[str(index)])
        for index, each in self.stepping.items():
            each.load(stages[str(index)])
        self.calls = int(state["calls"])


def _check(
    schedule: Schedule,
    optimizer: MakeOptimizer | None,
    remedies: PipeMareOptions | None,
    tied: Sequence[Sequence[str]],
) -> None:
    if not schedule.takes_steps:
        for what, value in (("optimizer", optimizer), ("remedies", remedies)):
            if value is not None:
                raise ValueError(
                    f"{what} is given, but the schedule {schedule.name!r} takes no "
                    "steps: it leaves gradients in .grad; leave "
                    f"{what} out, and step an optimizer of pipeline.parameters() after each step()"
                )
        return
    if optimizer is None:
        raise ValueError(
            f"the schedule {schedule.name!r} takes its steps while micro-batches are "
            "under way, and needs an optimizer for "
            "every stage: give optimizer=, such as lambda parameters: SGD(parameters, lr=0.1)"
        )
    if remedies is not None and remedies.decay is not None and schedule.weights != "newest":
        raise ValueError(
            f"decay is {remedies.decay}, but the schedule {schedule.name!r} has backward "
            "meet the weights of its forward "
            f"(weights {schedule.weights!r}), which leaves nothing to correct; leave "
            "decay out, or take 'pipemare'"
        )
    if tied:
        raise ValueError(
            f"{' and '.join(tied[0])} are one parameter on several stages, each of which "
            "would step it, but the schedule "
            f"{schedule.name!r} steps stages by themselves; choose boundaries with both "
            "on one stage"
        )

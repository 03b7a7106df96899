"""AsyncSteps: what a Pipeline has beyond gradients where its schedule takes the optimizer steps:
optimizers, weight versions, the state of both.

optimizer=lambda parameters: SGD(parameters, lr=0.1)  ->  async_steps.optimizers {stage: optimizer}
Pipeline.step(batch, target)                          ->  one run: start, micro-batches and steps
async_steps.state_dict(), load_state_dict(state)      ->  of this process's stages; those of all
                                                          ranks put together load too
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from pyops.comm.agreement import ranks_agree
from pyops.mesh import ProcessGroupLike
from pyops.pipeline.runtime.microbatch import loss_weights
from pyops.pipeline.runtime.pipeline_config import MakeOptimizer, PipeMareOptions
from pyops.pipeline.runtime.stage import Stage
from pyops.pipeline.runtime.stage_optimizer import StageOptimizer
from pyops.pipeline.schedules.asynchronous import step_groups, synchronous
from pyops.pipeline.schedules.schedule import Schedule

__all__ = ["AsyncSteps"]


class AsyncSteps:
    """The optimizer steps of all `stages` of this process; none where the schedule takes none.

    of_stage: the optimizer and weight versions of each stage. groups: the micro-batches of each
    step. calls: of `Pipeline.step` so far. synchronous: the schedule of calls that are synchronous
    (`PipeMareOptions.synchronous`), None where there are none.

    Args:
        schedule: The schedule of the pipeline.
        stages: {number: stage} of this process.
        optimizer: Makes the optimizer of a stage from its parameters.
        pipemare: What is done about stale weights.
        tied: Names of parameters that several stages share.
        group: The ranks of the pipeline.

    Raises:
        ValueError: On every rank alike, for an optimizer where none is needed or none where one is,
            PipeMare options that do not go with the schedule, tied parameters, or steps of unlike
            micro-batches.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        *,
        optimizer: MakeOptimizer | None,
        pipemare: PipeMareOptions | None,
        tied: Sequence[Sequence[str]],
        group: ProcessGroupLike,
    ) -> None:
        self.name = schedule.name
        self.of_stage: dict[int, StageOptimizer] = {}
        self.groups: list[tuple[int, ...]] = []
        with ranks_agree(group):
            _check(schedule, optimizer, pipemare, tied)
            self.groups = step_groups(schedule)
            if optimizer is not None:
                for index, stage in stages.items():
                    self.of_stage[index] = StageOptimizer(
                        stage,
                        schedule,
                        make_optimizer=optimizer,
                        pipemare=pipemare or PipeMareOptions(),
                    )
        self.calls = 0
        self._synchronous_calls = pipemare.synchronous if pipemare is not None else 0
        self.synchronous = synchronous(schedule) if self._synchronous_calls else None

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """{stage: its optimizer} of the stages here that have parameters to train, such as for
        schedulers of the learning rate."""
        return {
            index: each.optimizer
            for index, each in self.of_stage.items()
            if each.optimizer is not None
        }

    @property
    def next_is_synchronous(self) -> bool:
        """Whether the next call of `Pipeline.step` is synchronous."""
        return self.calls < self._synchronous_calls

    @contextlib.contextmanager
    def one_call(self) -> Iterator[None]:
        """Within, the stages run one call of `Pipeline.step`; afterwards their parameters are the
        newest version, however the call ended."""
        for each in self.of_stage.values():
            each.begin(synchronous=self.next_is_synchronous)
        try:
            yield
        finally:
            for each in self.of_stage.values():
                each.end()

    def grad_weights(
        self,
        targets: Sequence[Any],
        denominator: Callable[[Any], Any] | None,
        *,
        scale: float,
        reduction: str,
    ) -> list[float]:
        """How much each micro-batch counts in the gradient of its step: its part of the terms of
        that step, or 1 where losses are sums.

        Raises:
            ValueError: For a scale other than 1.
        """
        if scale != 1:
            raise ValueError(
                f"scale is {scale}, but the schedule {self.name!r} takes its steps "
                "itself; leave scale out"
            )
        found = [1.0] * len(targets)
        if reduction == "sum":
            return found
        for group in self.groups:
            weights = loss_weights([targets[number] for number in group], denominator)
            for number, weight in zip(group, weights, strict=True):
                found[number] = weight
        return found

    def state_dict(self) -> dict[str, Any]:
        """{"calls": of step, "stages": {stage: names, steps, optimizer, drift}}: dicts, lists,
        tensors, numbers, strings."""
        return {
            "calls": self.calls,
            "stages": {str(index): each.state_dict() for index, each in self.of_stage.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, on this rank or on several whose stages were put
        together.

        Raises:
            ValueError: Before anything is changed, for a state that lacks a stage or belongs to
                other boundaries.
        """
        stages = state["stages"]
        for index, each in self.of_stage.items():
            if str(index) not in stages:
                raise ValueError(
                    f"the state has stages {', '.join(stages)}, not {index}; put those "
                    "of all ranks together"
                )
            each.check_state(stages[str(index)])
        for index, each in self.of_stage.items():
            each.load_state_dict(stages[str(index)])
        self.calls = int(state["calls"])


def _check(
    schedule: Schedule,
    optimizer: MakeOptimizer | None,
    pipemare: PipeMareOptions | None,
    tied: Sequence[Sequence[str]],
) -> None:
    if not schedule.takes_steps:
        for what, value in (("optimizer", optimizer), ("pipemare", pipemare)):
            if value is not None:
                raise ValueError(
                    f"{what} is given, but the schedule {schedule.name!r} takes no "
                    "steps: it leaves gradients in .grad; leave "
                    f"{what} out, and step an optimizer of pipeline.parameters() after each step()"
                )
        return
    if optimizer is None:
        raise ValueError(
            f"the schedule {schedule.name!r} takes its steps while micro-batches are in flight, "
            "and needs an optimizer for every stage: give optimizer=, such as "
            "lambda parameters: SGD(parameters, lr=0.1)"
        )
    if pipemare is not None and pipemare.decay is not None and schedule.weights != "newest":
        raise ValueError(
            f"decay is {pipemare.decay}, but with the schedule {schedule.name!r} backward meets "
            f"the weights of its forward (weights {schedule.weights!r}), which leaves nothing to "
            "correct; leave decay out, or take 'pipemare'"
        )
    if tied:
        raise ValueError(
            f"{' and '.join(tied[0])} are one parameter on several stages, each of which "
            f"would step it, but the schedule {schedule.name!r} steps stages by themselves; "
            "choose boundaries with both on one stage"
        )

"""ScheduleExecutor: one process's part of a schedule, action after action in its order, with a
channel to every rank it talks to.

    order      0F0        0F1        0B0           values of neighbouring stages of this process go
    channels   -> 1F0     -> 1F1     <- 0's grad   by reference, all others over the channels, in
                                                   the order in which they are made

The order was proven free of deadlock when the schedule was made, for channels that hold nothing;
here they hold more.

When an action fails, the rank goes on through its order without computing: it receives what the
others send, and sends that it failed. So the channels are in step again at the end, and the ranks
can tell each other what happened.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from pyops.comm.agreement import gather
from pyops.comm.failure import PeerError
from pyops.mesh import ProcessGroupLike
from pyops.pipeline.runtime.skips import SkipTensors
from pyops.pipeline.runtime.stage import Stage, detached, tensors_of
from pyops.pipeline.runtime.stage_optimizer import StageOptimizer
from pyops.pipeline.schedules.action import Action
from pyops.pipeline.schedules.orders import Orders, Transfer
from pyops.pipeline.schedules.schedule import Schedule
from pyops.pipeline.schedules.simulate import Timeline
from pyops.pipeline.transport.channel import FAILED, Edge, ReceiveChannel, SendChannel
from pyops.pipeline.transport.interrupt import Interrupt

__all__ = ["ActionTimes", "ScheduleExecutor", "StepInputs", "gather_timeline"]

ActionTimes = dict[Any, tuple[float, float]]  # seconds, begin and end of an action or transfer


@dataclass
class StepInputs:
    """The inputs of a step, micro-batch by micro-batch."""

    inputs: Sequence[Any]
    """The arguments of the first stage."""

    named: Sequence[dict[str, Any]]
    """The named arguments of the layers."""

    targets: Sequence[Any]
    """The targets of the last stage."""

    loss_weights: Sequence[float] = ()
    """How much each loss counts in the loss of the batch; only where the last stage is."""

    grad_scale: Sequence[float] | None = None
    """The gradient of each loss, with which its backward begins; it differs from `loss_weights`
    where a batch makes several optimizer steps. None: nothing is differentiated."""

    before_forward: Callable[[Stage, int], None] | None = None
    """Called with the stage and the micro-batch before every forward."""


@dataclass
class ScheduleExecutor:
    """Runs `actions`, all those of `orders` that are this process's, at its `stages`.

    Attributes:
        incoming, outgoing: The channel by which the values of an edge come from, or go to, another
            process. An edge without a channel connects two stages of this process.
        steps: The optimizers of the stages, of a schedule that has optimizer steps.
    """

    actions: Sequence[Action]
    stages: Mapping[int, Stage]
    orders: Orders
    incoming: Mapping[Edge, ReceiveChannel] = field(default_factory=dict)
    outgoing: Mapping[Edge, SendChannel] = field(default_factory=dict)
    on_action: Callable[[Action], Any] | None = None
    steps: Mapping[int, StageOptimizer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last = self.orders.num_stages - 1
        self._recomputed = {(each.stage, each.number) for each in self.actions if each.kind == "R"}
        self._plan = [
            (
                action,
                [(each, self.incoming.get(each.edge)) for each in self.orders.arriving(action)],
                [(each, self.outgoing.get(each.edge)) for each in self.orders.leaving(action)],
            )
            for action in self.actions
        ]
        self._values: dict[Transfer, Any] = {}
        # Of a stage that skips leave: how many gradients come back along each of its edges.
        self._num_gradients: dict[tuple[int, int], list[int]] = {}
        self.interrupt = Interrupt()
        self.times: ActionTimes | None = None
        self.error: BaseException | None = None
        self.failed = False
        self.failed_action: Action | None = None

    def run(self, inputs: StepInputs | None) -> list[Any]:
        """Run all actions once.

        What an action raises is in `error` afterwards, and `failed` says that this rank, or one
        whose values it needs, failed.

        Args:
            inputs: None on a rank that failed before it began.

        Returns:
            What the last stage returned of each micro-batch, if it is here: losses, where there are
            targets.

        Raises:
            PeerError: A rank is lost; the channels are of no use then.
        """
        self.error, self.failed_action, self.failed = None, None, inputs is None
        self._values.clear()
        self._num_gradients.clear()
        results: dict[int, Any] = {}
        for channel in dict.fromkeys(self.incoming.values()):
            channel.start()
        execute = self._execute_with_steps if self.steps else self._execute
        for action, arriving, leaving in self._plan:
            received = [self._receive(transfer, channel) for transfer, channel in arriving]
            begin = time.monotonic()
            computed: list[Any] | None = None
            if inputs is not None and not self.failed:
                try:
                    if self.interrupt.pending:
                        self.interrupt.check()
                    computed = execute(action, received, inputs, results)
                    if self.on_action is not None:
                        self.on_action(action)
                except (Exception, KeyboardInterrupt) as error:
                    self._fail(error, action)
                    computed = None
            if self.times is not None:
                self.times[action] = (begin, time.monotonic())
            for i, (transfer, outgoing) in enumerate(leaving):
                self._send(transfer, outgoing, FAILED if computed is None else computed[i], action)
        self._end()
        return [results[number] for number in sorted(results)]

    def _end(self) -> None:
        """Raise an interrupt that came after the last check, and wait for what is being sent."""
        if self.interrupt.pending and not self.failed and self.actions:
            self.interrupt.pending = False
            self._fail(KeyboardInterrupt(), self.actions[-1])
        for sending in dict.fromkeys(self.outgoing.values()):
            sending.finish()

    def abort(self) -> None:
        """Tell all ranks that wait for this one that nothing more will come."""
        for channel in dict.fromkeys(self.outgoing.values()):
            channel.abort()

    def close(self) -> None:
        """Let go of the channels, and of all values."""
        channels: list[ReceiveChannel | SendChannel] = [
            *self.incoming.values(),
            *self.outgoing.values(),
        ]
        for channel in dict.fromkeys(channels):
            channel.close()
        for stage in self.stages.values():
            stage.clear()
        self.incoming, self.outgoing, self._plan, self.on_action = {}, {}, [], None
        self._values.clear()

    def _execute_with_steps(
        self, action: Action, received: list[Any], inputs: StepInputs, results: dict[int, Any]
    ) -> list[Any]:
        """As `_execute`, of an asynchronous schedule: with the weights that the action meets, and
        with optimizer steps."""
        optimizer = self.steps[action.stage]
        if action.kind == "U":
            optimizer.step(action)
            return []
        with optimizer.versions.weights_for(action):
            return self._execute(action, received, inputs, results)

    def _execute(
        self, action: Action, received: list[Any], inputs: StepInputs, results: dict[int, Any]
    ) -> list[Any]:
        """Compute the values that leave the stage from those that arrive."""
        stage, kind, number = self.stages[action.stage], action.kind, action.number
        if kind == "F":
            return self._forward(stage, number, received, inputs, results)
        if kind in "BI":
            return self._backward(action, received, inputs, results)
        if kind == "W":
            stage.backward_weight(number)
        elif kind == "R":
            stage.recompute(number)
        return []

    def _forward(
        self,
        stage: Stage,
        number: int,
        received: list[Any],
        inputs: StepInputs,
        results: dict[int, Any],
    ) -> list[Any]:
        """The result for the next stage, and what skips stages."""
        index = stage.index
        x = received[0] if index else inputs.inputs[number]
        if len(received) > 1:
            x = SkipTensors(x, tuple(received[1:]))
            if inputs.grad_scale is not None:
                self._num_gradients[index, number] = [
                    sum(t.requires_grad for t in tensors_of(value)) for value in received
                ]
        target = inputs.targets[number] if index == self.last else None
        if inputs.before_forward is not None:
            inputs.before_forward(stage, number)
        if inputs.grad_scale is None:
            y = stage.call(x, inputs.named[number], target)
        else:
            recompute = (index, number) in self._recomputed
            y = stage.forward(number, x, inputs.named[number], target, recompute=recompute)
        if index == self.last:
            if inputs.grad_scale is not None:
                _check_loss(y)
            results[number] = tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, y)
        return [y.value, *y.skipped] if type(y) is SkipTensors else [y]

    def _backward(
        self, action: Action, received: list[Any], inputs: StepInputs, results: dict[int, Any]
    ) -> list[Any]:
        """The gradients for the stage before, and those of what skipped stages."""
        index, kind, number = action
        stage = self.stages[index]
        gradients: list[Tensor | None]
        if index == self.last:
            assert inputs.grad_scale is not None
            gradients = [results[number].new_full((), inputs.grad_scale[number])]
        else:
            gradients = [gradient for part in received for gradient in part]
        backward = stage.backward if kind == "B" else stage.backward_input
        found = backward(number, gradients)
        counts = self._num_gradients.pop((index, number), None) if self._num_gradients else None
        if counts is None:
            return [found]
        one_by_one = iter(found)
        return [list(itertools.islice(one_by_one, count)) for count in counts]

    def _fail(self, error: BaseException, action: Action) -> None:
        """Compute nothing more in this run."""
        self.error, self.failed_action, self.failed = error, action, True
        for stage in self.stages.values():
            stage.clear()

    def _receive(self, transfer: Transfer, channel: ReceiveChannel | None) -> Any:
        """The value of a transfer. A channel delivers in its own order, so that others may come
        first; they are kept."""
        if channel is not None:
            while transfer not in self._values:
                found, value, sent_ns = channel.receive()
                self._values[found] = value
                if self.times is not None:
                    self.times[found] = (sent_ns / 1e9, time.monotonic())
        value = self._values.pop(transfer)
        if value is FAILED and not self.failed:
            self.failed = True
            for stage in self.stages.values():
                stage.clear()
        return value

    def _send(
        self, transfer: Transfer, channel: SendChannel | None, value: Any, action: Action
    ) -> None:
        if channel is None:
            self._values[transfer] = (
                detached(value) if transfer.kind[0] == "F" and value is not FAILED else value
            )
        elif value is FAILED:
            channel.fail()
        else:
            try:
                channel.send(value, what=f"the result of stage {transfer.source}")
            except PeerError:
                raise
            except Exception as error:
                self._fail(error, action)
                channel.fail()


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.dim():
        shape = (
            f"a tensor {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else f"a {type(loss).__name__}"
        )
        raise ValueError(
            f"the loss is {shape}; it must be a tensor of one number, without dims, such "
            "as its mean() or sum()"
        )
    if not loss.requires_grad:
        raise ValueError(
            "the loss requires no gradient: it is detached, or no parameter of the model "
            "requires one"
        )


def gather_timeline(
    schedule: Schedule, executor: ScheduleExecutor, *, group: ProcessGroupLike
) -> Timeline:
    """What all ranks did when in their last run, from its beginning on. Collective."""
    assert executor.times is not None
    several = gather(executor.times, group=group)
    times = {what: when for each in several for what, when in each.items()}
    start = min(begin for begin, _ in times.values())
    shifted = {what: (begin - start, end - start) for what, (begin, end) in times.items()}
    return Timeline(
        schedule,
        {what: shifted[what] for what in shifted if isinstance(what, Action)},
        {what: shifted[what] for what in shifted if isinstance(what, Transfer)},
    )

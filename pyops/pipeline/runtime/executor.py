"""ScheduleExecutor: one process's part of a schedule, action after action in its order, with a channel to
every rank it talks to.

    order      0F0        0F1        0B0                     values of neighbouring stages of this process go by reference,
    channels   -> 1F0     -> 1F1     <- gradient of 0        all others over the channels, in the order in which they are made

The order was proven free of deadlock when the schedule was made, for channels that hold nothing;
here they hold more.

When an action fails, the rank goes on through its order without computing: it takes what the others
send, and sends that it failed. So the channels are in step again at the end, and the ranks can say
to each other what happened.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from pyops.comm.agreement import gather
from pyops.comm.failure import PeerError
from pyops.pipeline.runtime.skips import SkipTensors
from pyops.pipeline.runtime.stage import Stage, detached, tensors_of
from pyops.pipeline.runtime.stage_optimizer import StageOptimizer
from pyops.pipeline.schedules.action import Action
from pyops.pipeline.schedules.orders import Orders, Transfer
from pyops.pipeline.schedules.schedule import Schedule
from pyops.pipeline.schedules.simulate import Timeline
from pyops.pipeline.transport.channel import FAILED, Edge, ReceiveChannel, SendChannel
from pyops.pipeline.transport.interrupt import Interrupt

__all__ = ["ScheduleExecutor", "StepInputs", "Times", "gather_timeline"]

Times = dict[Any, tuple[float, float]]  # seconds, begin and end of an action or transfer


@dataclass
class StepInputs:
    """What a step starts with, micro-batch by micro-batch.

    inputs: of the first stage. named: named arguments of the layers. targets: of the last stage.
    weights: how much each loss counts in the batch's; seeds: how much in the gradients, which
    differs where a batch makes several steps. scale: of the gradients; None: nothing is
    differentiated. before(stage, number): called before every forward.
    """

    inputs: Sequence[Any]
    named: Sequence[dict[str, Any]]
    targets: Sequence[Any]
    weights: Sequence[float]
    seeds: Sequence[float]
    scale: float | None
    before: Callable[[Stage, int], None] | None = None


@dataclass
class ScheduleExecutor:
    """Runs `actions`, all those of `orders` that are this process's, at its `stages`.

    incoming[transfer.edge]: the channel on which such values come from another process; outgoing:
    that by which they leave. What is not there stays in the process.
    stepping[stage]: what takes the steps of a schedule that has some.
    """

    actions: Sequence[Action]
    stages: Mapping[int, Stage]
    orders: Orders
    incoming: Mapping[Edge, ReceiveChannel] = field(default_factory=dict)
    outgoing: Mapping[Edge, SendChannel] = field(default_factory=dict)
    recomputed: frozenset[tuple[int, int]] = frozenset()
    on_action: Callable[[Action], Any] | None = None
    stepping: Mapping[int, StageOptimizer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last = self.orders.num_stages - 1
        self._plan = [
            (
                action,
                [
                    (transfer, self.incoming.get(transfer.edge))
                    for transfer in self.orders.arriving(action)
                ],
                [
                    (transfer, self.outgoing.get(transfer.edge))
                    for transfer in self.orders.leaving(action)
                ],
            )
            for action in self.actions
        ]
        self._values: dict[Transfer, Any] = {}
        self._wanting: dict[tuple[int, int], list[int]] = {}
        self.interrupt = Interrupt()
        self.times: Times | None = None
        self.error: BaseException | None = None
        self.failed = False
        self.where: Action | None = None

    def run(self, feed: StepInputs | None) -> list[Any]:
        """What the last stage returned of each micro-batch, if it is here: losses, where there are
        targets.

        feed: None on a rank that failed before it began.
        What an action raises is in `error` afterwards, and `failed` says that this rank, or one
        that it needs, failed. PeerError for a lost rank: the channels are of no use then.
        """
        self.error, self.where, self.failed = None, None, feed is None
        self._values.clear()
        self._wanting.clear()
        results: dict[int, Any] = {}
        for channel in dict.fromkeys(self.incoming.values()):
            channel.start()
        act = self._take_action if self.stepping else self._compute
        for action, arriving, leaving in self._plan:
            given = [self._take(transfer, channel) for transfer, channel in arriving]
            begin = time.monotonic()
            made: list[Any] | None = None
            if feed is not None and not self.failed:
                try:
                    if self.interrupt.waits:
                        self.interrupt.check()
                    made = act(action, given, feed, results)
                    if self.on_action is not None:
                        self.on_action(action)
                except (Exception, KeyboardInterrupt) as error:
                    self._fail(error, action)
                    made = None
            if self.times is not None:
                self.times[action] = (begin, time.monotonic())
            for i, (transfer, outgoing) in enumerate(leaving):
                self._give(transfer, outgoing, FAILED if made is None else made[i], action)
        if self.interrupt.waits and not self.failed and self.actions:
            self.interrupt.waits = False
            self._fail(KeyboardInterrupt(), self.actions[-1])
        for sending in dict.fromkeys(self.outgoing.values()):
            sending.finish()
        return [results[number] for number in sorted(results)]

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
            if channel.direct is not None:
                channel.direct.group.shutdown()
        for stage in self.stages.values():
            stage.forget()
        self.incoming, self.outgoing, self._plan, self.on_action = {}, {}, [], None
        self._values.clear()

    def _take_action(
        self, action: Action, given: list[Any], feed: StepInputs, results: dict[int, Any]
    ) -> list[Any]:
        stepping = self.stepping[action.stage]
        if action.kind == "U":
            stepping.step(action)
            return []
        with stepping.versions.weights_for(action):
            return self._compute(action, given, feed, results)

    def _compute(
        self, action: Action, given: list[Any], feed: StepInputs, results: dict[int, Any]
    ) -> list[Any]:
        """The values that leave, given those that arrive."""
        index, kind, number = action
        stage = self.stages[index]
        if kind == "F":
            return self._forward(index, number, given, feed, results)
        if kind in "BI":
            if index == self.last:
                assert feed.scale is not None
                gradients: Any = [results[number].new_full((), feed.seeds[number] * feed.scale)]
            else:
                gradients = (
                    given[0]
                    if len(given) == 1
                    else [gradient for part in given for gradient in part]
                )
            found = (stage.backward if kind == "B" else stage.inputs)(number, gradients)
            several = self._wanting.pop((index, number), None) if self._wanting else None
            if several is None:
                return [found]
            one_by_one = iter(found)
            return [list(itertools.islice(one_by_one, count)) for count in several]
        if kind == "W":
            stage.weights(number)
        elif kind == "R":
            stage.recompute(number)
        return []

    def _forward(
        self, index: int, number: int, given: list[Any], feed: StepInputs, results: dict[int, Any]
    ) -> list[Any]:
        stage = self.stages[index]
        x = given[0] if index else feed.inputs[number]
        if len(given) > 1:
            x = SkipTensors(x, tuple(given[1:]))
            if feed.scale is not None:
                self._wanting[index, number] = [
                    sum(t.requires_grad for t in tensors_of(value)) for value in given
                ]
        target = feed.targets[number] if index == self.last else None
        if feed.before is not None:
            feed.before(stage, number)
        if feed.scale is None:
            y = stage.call(x, feed.named[number], target)
        else:
            y = stage.forward(
                number, x, feed.named[number], target, recompute=(index, number) in self.recomputed
            )
        if index == self.last:
            if feed.scale is not None:
                _check_loss(y)
            results[number] = tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, y)
        return [y.value, *y.skipped] if type(y) is SkipTensors else [y]

    def _fail(self, error: BaseException, action: Action) -> None:
        self.error, self.where, self.failed = error, action, True
        for stage in self.stages.values():
            stage.forget()

    def _take(self, transfer: Transfer, channel: ReceiveChannel | None) -> Any:
        if channel is not None:
            while transfer not in self._values:
                found, value, made = channel.receive()
                self._values[found] = value
                if self.times is not None:
                    self.times[found] = (made / 1e9, time.monotonic())
        value = self._values.pop(transfer)
        if value is FAILED and not self.failed:
            self.failed = True
            for stage in self.stages.values():
                stage.forget()
        return value

    def _give(
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
                channel.send(value, what=f"what stage {transfer.source} returned")
            except PeerError:
                raise
            except Exception as error:
                self._fail(error, action)
                channel.fail()


def _check_loss(loss: Any) -> None:
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
            "the loss wants no gradient: it is detached, or no parameter of the model wants one"
        )


def gather_timeline(
    schedule: Schedule, runner: ScheduleExecutor, *, group: dist.ProcessGroup | None
) -> Timeline:
    """What all ranks did when in their last run, from its beginning on. A collective."""
    assert runner.times is not None
    several = gather(runner.times, group=group) if group is not None else [runner.times]
    times = {what: when for some in several for what, when in some.items()}
    start = min(begin for begin, _ in times.values())
    moved = {what: (begin - start, end - start) for what, (begin, end) in times.items()}
    return Timeline(
        schedule,
        {what: moved[what] for what in moved if isinstance(what, Action)},
        {what: moved[what] for what in moved if isinstance(what, Transfer)},
    )

"""Pipeline: layers cut into stages, each on a rank of a group, and a step that runs a schedule over
them.

    layers      embedding | block block | block block | block head          boundaries 0 1 3 5 7
    stages          0     |      1      |      2      |     3
    ranks           0            1             2            3                  of `group`; without one, all in this process

    pipeline = Pipeline(layers, schedule=schedule("1f1b", num_stages=4, num_microbatches=16), group=group, loss=cross_entropy)
    optimizer = AdamW(pipeline.parameters())
    loss = pipeline.step(tokens, targets);  optimizer.step();  optimizer.zero_grad()

Gradients have the bits of the same micro-batches run one after the other in one process, in the
order of the schedule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyops.comm.collectives.functional import all_reduce
from pyops.comm.failure import CommunicationError, PeerError, lost_peer
from pyops.flat import InPlace
from pyops.mesh import check_initialized
from pyops.pipeline.runtime.async_steps import Stream
from pyops.pipeline.runtime.batch_norm import BatchNormStatistics
from pyops.pipeline.runtime.executor import ScheduleExecutor, StepInputs, gather_timeline
from pyops.pipeline.runtime.microbatch import cut, loss_weights, num_rows
from pyops.pipeline.runtime.setup_agreement import agreed, raise_first_error
from pyops.pipeline.runtime.stage import Loss, Stage, named_arguments
from pyops.pipeline.runtime.stage_optimizer import MakeOptimizer, PipeMareOptions
from pyops.pipeline.runtime.tied import TiedParameters, norm_of, tied_names
from pyops.pipeline.schedules.action import Action
from pyops.pipeline.schedules.orders import Orders
from pyops.pipeline.schedules.schedule import Schedule
from pyops.pipeline.schedules.simulate import Timeline
from pyops.pipeline.transport.channel import Edge, ReceiveChannel, SendChannel
from pyops.pipeline.transport.interrupt import Interrupt, defer_interrupts
from pyops.pipeline.transport.links import open_channels

__all__ = ["Pipeline"]

FIX = "load_state_dict() without assign=True loads values in place"
LOST = "a rank of this pipeline was lost in an earlier step; start the ranks anew"


class Pipeline(nn.Module):
    """`layers` as stages of a pipeline that works as `schedule` says. A module of this rank's
    layers, named by their number.

    layers: all layers of the model, on every rank; each takes what the one before returns, a tuple
    as several arguments, and
        named arguments of `step` that its forward names. Layers of other ranks are neither kept nor called: they may be on the
        meta device. What goes from stage to stage: tensors, numbers, strings, None, and tuples, lists, dicts of them.
    group: a process group with as many ranks as the schedule, this one among them, that carries CPU
    tensors; None: all stages
        are in this process.
    loss: (what the last layer returns, target) -> one number; None: the last layer returns it, and
    takes what it needs as a
        named argument.
    boundaries: the first layer of each stage, and the number of layers (see `balance`); by default
    parameters are balanced. reduction: what `loss` is over its micro-batch: "mean", or "sum".
    count: (target) -> over how many it is a mean; by default
        the rows.
    before: (stage, micro-batch) called before each forward of a `Stage`, such as to key its
    dropout.
    tied: groups of names ("0.weight", "5.head.weight") of parameters that are one although no
    object shows it. Parameters that
        layers of several stages share are found: over ranks each has a copy, which begins with the values of the first, and a
        step ends with the sum of the copies' gradients in the `.grad` of each. See `pipeline.tied`. None: somebody else sums
        them, such as ZeroOptimizer(pp_group=group).
    optimizer: (parameters of a stage that want gradients) -> their optimizer; for schedules that
    take their steps themselves,
        and only for those; they are in `stream`. remedies: what is done about weights that are stale then.

    ValueError, on every rank alike, for a schedule of another number of ranks, boundaries that are
    none, too few layers, ranks that disagree.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module] | nn.Sequential,
        *,
        schedule: Schedule,
        group: dist.ProcessGroup | None = None,
        loss: Loss | None = None,
        boundaries: Sequence[int] | None = None,
        reduction: str = "mean",
        count: Callable[[Any], Any] | None = None,
        before: Callable[[Stage, int], None] | None = None,
        tied: Sequence[Sequence[str]] | None = (),
        optimizer: MakeOptimizer | None = None,
        remedies: PipeMareOptions | None = None,
    ) -> None:
        check_initialized("Pipeline", group)
        super().__init__()
        layers = list(layers)
        self.group, self.reduction, self.count, self.before = group, reduction, count, before
        self.loss = loss
        self._accepted = frozenset().union(
            *(named_arguments(layer) for layer in layers if isinstance(layer, nn.Module))
        )
        self.rank = 0 if group is None else dist.get_rank(group)
        tag, self.boundaries, edges = agreed(schedule, layers, boundaries, reduction, group)
        self.schedule = schedule = (
            schedule if schedule.skips == tuple(edges) else schedule.with_skips(edges)
        )
        own = range(schedule.num_stages) if group is None else schedule.stages_of(self.rank)
        last = schedule.num_stages - 1
        self.stages = {
            index: Stage(
                index,
                layers[self.boundaries[index] : self.boundaries[index + 1]],
                first=self.boundaries[index],
                loss=loss if index == last else None,
                edges=edges,
            )
            for index in own
        }
        for stage in self.stages.values():
            for i, layer in enumerate(stage.layers):
                self.add_module(str(stage.first + i), layer)
            if schedule.splits_backward:
                stage.defer()
        self._statistics = BatchNormStatistics(self.stages.values())
        self.tied = (
            () if tied is None else tied_names(layers, self.boundaries, declared=tied, group=group)
        )
        self._tied_parameters = TiedParameters(
            dict(self.named_parameters(remove_duplicate=False)),
            self.tied,
            self.boundaries,
            schedule,
            group=group,
            tag=tag + 24,
        )
        self._tied_parameters.make_equal()
        self.stream = Stream(
            schedule,
            self.stages,
            optimizer=optimizer,
            remedies=remedies,
            tied=self.tied,
            group=group,
        )
        self._train = self._runner(schedule, tag)
        self._evaluate = self._runner(schedule.forward_only(), tag + 8)
        early = self.stream.synchronous
        self._early = self._train if early is None else self._runner(early, tag + 16)
        parameters = [p for p in self.parameters() if not p.is_meta]
        self._in_place = InPlace("Pipeline", self, [], others=parameters, fix=FIX)
        self._broken, self._steps = "", 0
        self._recorded: list[Timeline] | None = None

    @property
    def device(self) -> torch.device:
        """That of this rank's parameters; the CPU where it has none."""
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    @property
    def has_first(self) -> bool:
        """Whether this rank has the first stage, which takes the batch."""
        return 0 in self.stages

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage, which takes the target."""
        return self.schedule.num_stages - 1 in self.stages

    def step(
        self, batch: Any = None, target: Any = None, *, scale: float = 1.0, **named: Any
    ) -> Tensor:
        """Forward and backward of all micro-batches: gradients are added to `.grad`. The loss of
        the batch, on every rank.

        batch: what the first layer takes, tensors [N, ...] anywhere in tuples, lists, dicts; a
        tuple is several arguments; only
            the rank of the first stage looks at it. target: tensors [N, ...] of `loss`; only the rank of the last stage does.
        named: of layers that name them, on every rank: tensors [N, ...] are cut like the batch,
        others go whole.
        scale: what gradients are multiplied by, such as 1 / steps that are accumulated, or a loss
        scale; not the loss.

        What goes wrong on one rank, an interrupt too, is raised on all: no gradient of this step is
        of use then, but the next step may come.
        CommunicationError, which names it, for a rank that is lost.

        With a schedule that takes its steps itself this is a stretch of the stream of
        micro-batches, with a start and an end: the first ones meet weights that are less old, and
        the pipeline is empty afterwards. No gradients are left then. After an error each stage has
        taken the steps that it had come to: load what was saved.
        """
        feed, problem = self._feed(batch, target, named, scale=scale)
        runner = self._early if self.stream.early else self._train
        with defer_interrupts() as interrupt, self._statistics.of_one_batch():
            with self.stream.stretch():
                results = self._run(runner, feed, interrupt)
            loss = self._conclude(runner, feed, results, problem)
        self.stream.calls += 1
        return loss

    @torch.no_grad()
    def forward(self, batch: Any = None, target: Any = None, **named: Any) -> Any:
        """As `step`, without gradients: the loss, on every rank; without a target what the last
        layer returns for the batch, on the rank of the last stage, and None on the others. Whether
        layers train is up to `train()` and `eval()`."""
        feed, problem = self._feed(batch, target, named, scale=None)
        with defer_interrupts() as interrupt, self._statistics.of_one_batch():
            results = self._run(self._evaluate, feed, interrupt)
            loss = self._conclude(
                self._evaluate, feed if target is not None else None, results, problem
            )
        if target is not None:
            return loss
        return joined(results) if self.has_last else None

    def counted(self) -> list[nn.Parameter]:
        """This rank's parameters but the copies of tied ones that another rank counts: over all
        ranks, each one once."""
        return [
            parameter
            for parameter in self.parameters()
            if id(parameter) not in self._tied_parameters.elsewhere
        ]

    def grad_norm(self) -> Tensor:
        """The 2-norm of the gradients of the whole pipeline, a float32 scalar on the CPU; every
        rank calls it, all get it."""
        return norm_of(self.counted(), group=self.group)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients such that `grad_norm` is at most `max_norm`, as
        torch.nn.utils.clip_grad_norm_; what it was."""
        norm = self.grad_norm()
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    def close(self) -> None:
        """Let go of the group, of the channels to other ranks, and of what was put on the layers;
        these are left as they are.

        No step is possible afterwards. Call it on every rank, before the group is destroyed, or
        before the layers go to another pipeline. A second time it does nothing.
        """
        self._broken = "this pipeline is closed; make a new one"
        for runner in (self._train, self._evaluate, self._early):
            runner.close()
        for stage in self.stages.values():
            stage.close()
        self._statistics.remove()
        self._tied_parameters.close()
        self.group = None

    def incoming_channels(self) -> list[ReceiveChannel]:
        """The channels by which a step's values come from other ranks."""
        return list(dict.fromkeys(self._train.incoming.values()))

    def on_action(self, call: Callable[[Action], Any] | None) -> None:
        """Call this after each action of a `step` on this rank, such as to start reducing a stage's
        gradients."""
        self._train.on_action = self._early.on_action = call

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Timeline]]:
        """Within, every `step` adds to the list the Timeline of all ranks, in seconds of the host's
        monotonic clock."""
        timelines: list[Timeline] = []
        self._recorded = timelines
        try:
            yield timelines
        finally:
            self._recorded = None

    def _feed(
        self, batch: Any, target: Any, named: dict[str, Any], *, scale: float | None
    ) -> tuple[StepInputs | None, Exception | None]:
        """What the step starts with on this rank, or what is wrong with it. scale: None where
        nothing is differentiated."""
        several = self.schedule.num_microbatches
        nothing = [None] * several
        try:
            if scale is not None and (moved := self._in_place.problem()) is not None:
                raise moved
            if self.has_first and num_rows(batch) is None:
                raise ValueError("the rank of the first stage needs a batch of tensors [rows, ...]")
            if self.has_last and scale is not None and target is None and self.loss is not None:
                raise ValueError("the rank of the last stage needs the target of the step")
            if strange := sorted(named.keys() - self._accepted):
                raise ValueError(
                    f"no layer's forward names {strange[0]!r}; layers name "
                    f"{', '.join(sorted(self._accepted)) or 'nothing'}"
                )
            rows = next((n for n in map(num_rows, (batch, target, named)) if n is not None), None)
            inputs = cut(batch, several) if self.has_first else nothing
            targets = (
                nothing if target is None or not self.has_last else cut(target, several, rows=rows)
            )
            some = cut(named, several, rows=rows) if named else [{}] * several
            weights: list[float] = []
            seeds: list[float] = []
            if self.has_last:
                counted = targets if target is not None else some if named else inputs
                weights = (
                    [1.0] * several
                    if self.reduction == "sum"
                    else loss_weights(counted, self.count)
                )
                seeds = weights
                if scale is not None and self.stream.groups:
                    seeds = self.stream.seeds(
                        counted, self.count, scale=scale, reduction=self.reduction
                    )
            return StepInputs(inputs, some, targets, weights, seeds, scale, self.before), None
        except Exception as error:
            return None, error

    def _run(
        self, runner: ScheduleExecutor, feed: StepInputs | None, interrupt: Interrupt
    ) -> list[Any]:
        if self._broken:
            raise RuntimeError(self._broken)
        runner.interrupt, runner.times = interrupt, {} if self._recorded is not None else None
        try:
            if runner is not self._train:
                return runner.run(feed)
            self._tied_parameters.begin()
            results = runner.run(feed)
            self._tied_parameters.sum(failed=runner.failed)
            return results
        except PeerError as error:
            assert self.group is not None
            self._broken = LOST
            runner.abort()
            raise lost_peer(
                "a step of the pipeline", group=self.group, cause=error, sequence=self._steps
            ) from error
        except BaseException:
            self._broken = (
                "an earlier step of this pipeline was interrupted between two ranks; make a "
                "new Pipeline"
            )
            runner.abort()
            raise

    def _conclude(
        self,
        runner: ScheduleExecutor,
        feed: StepInputs | None,
        results: list[Any],
        problem: Exception | None,
    ) -> Tensor:
        """The loss, on every rank; raises what any rank raised."""
        self._steps += 1
        ends = torch.zeros(2, dtype=torch.float64, device="cpu")
        ends[1] = runner.failed
        if feed is not None and self.has_last and not runner.failed:
            ends[0] = sum(
                float(result) * weight for result, weight in zip(results, feed.weights, strict=True)
            )
        if self.group is not None and self.schedule.num_ranks > 1:
            try:
                ends = all_reduce(ends, group=self.group)
            except CommunicationError:
                self._broken = LOST
                raise
        if ends[1]:
            raise_first_error(problem or runner.error, runner.where, group=self.group)
        if self._recorded is not None and runner is not self._evaluate:
            plan = self.schedule if runner is self._train else self.stream.synchronous
            self._recorded.append(gather_timeline(plan or self.schedule, runner, group=self.group))
        return ends[0].float()

    def _runner(self, orders: Orders, tag: int) -> ScheduleExecutor:
        """What runs this process's part of `orders`. tag: the first of eight that its messages have
        for themselves."""
        incoming: dict[Edge, ReceiveChannel] = {}
        outgoing: dict[Edge, SendChannel] = {}
        if self.group is not None:
            incoming, outgoing = open_channels(
                orders, group=self.group, tag=tag, device=self.device
            )
        if self.group is not None:
            actions = orders.ranks[self.rank]
        else:  # each after what it needs
            several = set(each for _, each in orders)
            plan = orders if isinstance(orders, Schedule) else self.schedule
            actions = tuple(each for each, _ in plan.order if each in several)
        again = frozenset((each.stage, each.number) for each in actions if each.kind == "R")
        return ScheduleExecutor(
            actions,
            self.stages,
            orders,
            incoming,
            outgoing,
            again,
            stepping=self.stream.stepping if isinstance(orders, Schedule) else {},
        )


def joined(results: Sequence[Any]) -> Any:
    """Micro-batches' results as that of the whole batch: tensors are put together along their first
    dim."""
    leaves, structures = zip(*(tree_flatten(result) for result in results), strict=True)
    several = [
        torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].dim() else parts[0]
        for parts in zip(*leaves, strict=True)
    ]
    return tree_unflatten(several, structures[0])

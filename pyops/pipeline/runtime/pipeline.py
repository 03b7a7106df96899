"""Pipeline: layers cut into stages, each on a rank of a group, and a step that runs a schedule over
them.

    layers      embedding | block block | block block | block head      boundaries 0 1 3 5 7
    stages          0     |      1      |      2      |     3
    ranks           0            1             2            3           of `group`

    plan = schedule("1f1b", num_stages=4, num_microbatches=16)
    pipeline = Pipeline(layers, schedule=plan, group=group, loss=cross_entropy)
    optimizer = AdamW(pipeline.parameters())
    loss = pipeline.step(tokens, targets);  optimizer.step();  optimizer.zero_grad()

Gradients have the bits of the same micro-batches run one after the other in one process, in the
order of the schedule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyops.comm.buckets.grad_norm import grad_norm
from pyops.comm.collectives.functional import all_reduce
from pyops.comm.failure import CommunicationError, PeerError, lost_peer
from pyops.flat import InPlace
from pyops.mesh import ALONE, Alone, Mesh, ProcessGroupLike, axis_group, resolve
from pyops.pipeline.runtime.async_steps import AsyncSteps
from pyops.pipeline.runtime.batch_norm import BatchNormStatistics
from pyops.pipeline.runtime.executor import ScheduleExecutor, StepInputs, gather_timeline
from pyops.pipeline.runtime.microbatch import loss_weights, num_rows, split_batch
from pyops.pipeline.runtime.pipeline_config import (
    MakeOptimizer,
    PipelineConfig,
    PipeMareOptions,
)
from pyops.pipeline.runtime.setup_agreement import agree_on_setup, raise_first_error
from pyops.pipeline.runtime.skips import SkipEdges
from pyops.pipeline.runtime.stage import Loss, Stage, named_arguments
from pyops.pipeline.runtime.tied import TiedParameters, tied_names
from pyops.pipeline.schedules.action import Action
from pyops.pipeline.schedules.orders import Orders
from pyops.pipeline.schedules.schedule import Schedule
from pyops.pipeline.schedules.simulate import Timeline
from pyops.pipeline.transport.channel import Edge, ReceiveChannel, SendChannel
from pyops.pipeline.transport.interrupt import Interrupt, defer_interrupts
from pyops.pipeline.transport.links import open_channels
from pyops.renamed import refuse_renamed

__all__ = ["Pipeline"]

FIX = "load_state_dict() without assign=True loads values in place"
RENAMED = {
    "boundaries": "config=PipelineConfig(boundaries=...)",
    "reduction": "config=PipelineConfig(reduction=...)",
    "count": "config=PipelineConfig(loss_denominator=...)",
    "before": "config=PipelineConfig(before_forward=...)",
    "tied": "config=PipelineConfig(tied=...)",
    "remedies": "pipemare=PipeMareOptions(...)",
}
LOST = "a rank of this pipeline was lost in an earlier step; start the ranks anew"


class Pipeline(nn.Module):
    """`layers` as stages of a pipeline that works as `schedule` says: a module of this rank's
    layers, named by their number.

    Args:
        layers: All layers of the model, on every rank. Each is called with the result of the layer
            before it, a tuple as several arguments, and with the named arguments of `step` that its
            forward names. Layers of other ranks are neither kept nor called and may be on the meta
            device. Stages send each other tensors, numbers, strings, None, and tuples, lists and
            dicts of them.
        schedule: The order of actions of every rank.
        group: A process group with as many ranks as the schedule, this rank among them, that
            carries CPU tensors. None: the default group, or one process where torch.distributed is
            not initialized. `pyops.mesh.ALONE`: all stages are in this process.
        mesh: A pyops.mesh.Mesh or torch DeviceMesh, in place of `group`: its ranks along "pp".
        loss: (result of the last layer, target) -> a tensor of one number. None: the last layer
            returns the loss itself, and takes what it needs as a named argument.
        config: How the model is cut, and how the losses of micro-batches become one.
        optimizer: (parameters of a stage that require gradients) -> their optimizer. For
            asynchronous schedules, which take their optimizer steps themselves, and only for those.
            The optimizers are in `async_steps.optimizers`.
        pipemare: What an asynchronous pipeline does about stale weights.

    Raises:
        ValueError: On every rank alike, for a schedule of another number of ranks, boundaries that
            do not cover the layers, fewer layers than stages, or ranks that disagree.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module] | nn.Sequential,
        *,
        schedule: Schedule,
        group: ProcessGroupLike = None,
        mesh: Mesh | DeviceMesh | None = None,
        loss: Loss | None = None,
        config: PipelineConfig | None = None,
        optimizer: MakeOptimizer | None = None,
        pipemare: PipeMareOptions | None = None,
        **renamed: Any,
    ) -> None:
        refuse_renamed("Pipeline", renamed, RENAMED)
        super().__init__()
        layers, self.config = list(layers), config or PipelineConfig()
        group = axis_group("Pipeline", "pp", group=group, mesh=mesh)
        self.group, self.loss = resolve(group, "Pipeline"), loss
        # What functions over ranks are given: to them None would be the default group.
        self._ranks: dist.ProcessGroup | Alone = ALONE if self.group is None else self.group
        self.before_forward = self.config.before_forward
        self._accepted = frozenset().union(
            *(named_arguments(layer) for layer in layers if isinstance(layer, nn.Module))
        )
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        setup = agree_on_setup(schedule, layers, self.config, self._ranks, pipemare=pipemare)
        self.boundaries, tag = setup.boundaries, setup.tag
        skips = tuple(setup.skips)
        self.schedule = schedule if schedule.skips == skips else schedule.with_skips(skips)
        self.stages = self._make_stages(layers, setup.skips)
        self._statistics = BatchNormStatistics(self.stages.values())
        self.tied = (
            ()
            if self.config.tied is None
            else tied_names(layers, self.boundaries, declared=self.config.tied, group=self._ranks)
        )
        self._tied_parameters = TiedParameters(
            dict(self.named_parameters(remove_duplicate=False)),
            self.tied,
            self.boundaries,
            self.schedule,
            group=self._ranks,
            tag=tag + 24,
        )
        self._tied_parameters.make_equal()
        self.async_steps = AsyncSteps(
            self.schedule,
            self.stages,
            optimizer=optimizer,
            pipemare=pipemare,
            tied=self.tied,
            group=self._ranks,
        )
        # Executors talk under tags of their own, eight each, so that a message of an evaluation can
        # never be taken for one of a step.
        self._train = self._executor(self.schedule, tag)
        self._evaluate = self._executor(self.schedule.forward_only(), tag + 8)
        synchronous = self.async_steps.synchronous
        self._train_synchronously = (
            self._train if synchronous is None else self._executor(synchronous, tag + 16)
        )
        parameters = [p for p in self.parameters() if not p.is_meta]
        self._in_place = InPlace("Pipeline", self, [], others=parameters, fix=FIX)
        self._broken, self._steps = "", 0
        self._recorded: list[Timeline] | None = None

    def _make_stages(self, layers: Sequence[nn.Module], skips: SkipEdges) -> dict[int, Stage]:
        """The stages of this process; their layers become submodules of the pipeline."""
        plan, boundaries = self.schedule, self.boundaries
        own = range(plan.num_stages) if self.group is None else plan.stages_of(self.rank)
        stages = {
            index: Stage(
                index,
                layers[boundaries[index] : boundaries[index + 1]],
                first=boundaries[index],
                loss=self.loss if index == plan.num_stages - 1 else None,
                edges=skips,
            )
            for index in own
        }
        for stage in stages.values():
            for i, layer in enumerate(stage.layers):
                self.add_module(str(stage.first + i), layer)
            if plan.splits_backward:
                stage.defer_weight_grads()
        return stages

    def __getattr__(self, name: str) -> Any:
        if name == "stream":
            raise AttributeError("Pipeline.stream has a new name: Pipeline.async_steps", name=name)
        return super().__getattr__(name)

    @property
    def device(self) -> torch.device:
        """The device of this rank's parameters; the CPU where it has none."""
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
        """Forward and backward of all micro-batches: gradients are added to `.grad`.

        With an asynchronous schedule one call is a run of the pipeline with a start and an end: the
        first micro-batches meet weights that are less old, the pipeline is empty afterwards, and no
        gradients are left. After an error each stage has taken the steps that it had come to; load
        a checkpoint.

        Args:
            batch: The arguments of the first layer: tensors [N, ...] anywhere in tuples, lists and
                dicts; a tuple is several arguments. Only the rank of the first stage reads it.
            target: Tensors [N, ...], the second argument of `loss`. Only the rank of the last stage
                reads it.
            scale: The gradients are multiplied by it, the loss is not: 1 / number of accumulated
                steps, or a loss scale.
            named: Arguments of layers that name them, given on every rank. Tensors [N, ...] are
                split like the batch, others go whole to every micro-batch.

        Returns:
            The loss of the batch, a float32 scalar on the CPU, on every rank.

        Raises:
            Exception: What fails on one rank, an interrupt too, is raised on all. The gradients of
                this step are then of no use, but the next step may come.
            CommunicationError: A rank is lost; the message names it.
        """
        inputs, problem = self._step_inputs(batch, target, named, scale=scale)
        synchronous = self.async_steps.next_is_synchronous
        executor = self._train_synchronously if synchronous else self._train
        with defer_interrupts() as interrupt, self._statistics.of_one_batch():
            with self.async_steps.one_call():
                results = self._run(executor, inputs, interrupt)
            loss = self._conclude(executor, inputs, results, problem)
        self.async_steps.calls += 1
        return loss

    @torch.no_grad()
    def forward(self, batch: Any = None, target: Any = None, **named: Any) -> Any:
        """As `step`, without gradients. Whether layers train is up to `train()` and `eval()`.

        Returns:
            With a target the loss, on every rank; without one what the last layer returns for the
            batch, on the rank of the last stage, and None on the others.
        """
        inputs, problem = self._step_inputs(batch, target, named, scale=None)
        with defer_interrupts() as interrupt, self._statistics.of_one_batch():
            results = self._run(self._evaluate, inputs, interrupt)
            loss = self._conclude(
                self._evaluate, inputs if target is not None else None, results, problem
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
        gradients = [p.grad for p in self.counted() if p.grad is not None]
        groups = [] if self.group is None else [self.group]
        return grad_norm(gradients, groups=groups, device="cpu").float()

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
        for executor in (self._train, self._evaluate, self._train_synchronously):
            executor.close()
        for stage in self.stages.values():
            stage.close()
        self._statistics.remove()
        self._tied_parameters.close()
        # The function may belong to the owner of this pipeline: a reference cycle, whose memory
        # would stay until Python's collector runs.
        self.config, self.before_forward = replace(self.config, before_forward=None), None
        self.group, self._ranks = None, ALONE

    def incoming_channels(self) -> list[ReceiveChannel]:
        """The channels by which a step's values come from other ranks."""
        return list(dict.fromkeys(self._train.incoming.values()))

    def on_action(self, call: Callable[[Action], Any] | None) -> None:
        """Call this after each action of a `step` on this rank, such as to start reducing a stage's
        gradients."""
        self._train.on_action = self._train_synchronously.on_action = call

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

    def _step_inputs(
        self, batch: Any, target: Any, named: dict[str, Any], *, scale: float | None
    ) -> tuple[StepInputs | None, Exception | None]:
        """The inputs of the step on this rank, or the error that they make. scale: None where
        nothing is differentiated.

        The error is returned: the rank first takes part in the step, whose end raises it on all.
        """
        num_microbatches = self.schedule.num_microbatches
        nothing = [None] * num_microbatches
        try:
            self._check_step(batch, target, named, differentiated=scale is not None)
            rows = next((n for n in map(num_rows, (batch, target, named)) if n is not None), None)
            inputs = split_batch(batch, num_microbatches) if self.has_first else nothing
            targets = nothing
            if target is not None and self.has_last:
                targets = split_batch(target, num_microbatches, rows=rows)
            several: list[dict[str, Any]] = [{}] * num_microbatches
            if named:
                several = split_batch(named, num_microbatches, rows=rows)
            found = StepInputs(inputs, several, targets, before_forward=self.before_forward)
            if scale is not None:
                found.grad_scale = []
            if self.has_last:
                counted = targets if target is not None else several if named else inputs
                self._weigh(found, counted, scale)
            return found, None
        except Exception as error:
            return None, error

    def _check_step(
        self, batch: Any, target: Any, named: dict[str, Any], *, differentiated: bool
    ) -> None:
        """ValueError for arguments of a step that this rank can't work with."""
        if differentiated and (moved := self._in_place.problem()) is not None:
            raise moved
        if self.has_first and num_rows(batch) is None:
            raise ValueError("the rank of the first stage needs a batch of tensors [rows, ...]")
        if self.has_last and differentiated and target is None and self.loss is not None:
            raise ValueError("the rank of the last stage needs the target of the step")
        if unknown := sorted(named.keys() - self._accepted):
            raise ValueError(
                f"no layer's forward names {unknown[0]!r}; layers name "
                f"{', '.join(sorted(self._accepted)) or 'nothing'}"
            )

    def _weigh(self, inputs: StepInputs, counted: Sequence[Any], scale: float | None) -> None:
        """How much each micro-batch counts in the loss, and in the gradients."""
        denominator, reduction = self.config.loss_denominator, self.config.reduction
        inputs.loss_weights = (
            [1.0] * len(counted) if reduction == "sum" else loss_weights(counted, denominator)
        )
        if scale is None:
            return
        weights: Sequence[float] = inputs.loss_weights
        if self.async_steps.groups:
            weights = self.async_steps.grad_weights(
                counted, denominator, scale=scale, reduction=reduction
            )
        inputs.grad_scale = [weight * scale for weight in weights]

    def _run(
        self, executor: ScheduleExecutor, inputs: StepInputs | None, interrupt: Interrupt
    ) -> list[Any]:
        """The results of the last stage, if it is here."""
        if self._broken:
            raise RuntimeError(self._broken)
        executor.interrupt = interrupt
        executor.times = {} if self._recorded is not None else None
        try:
            if executor is not self._train:
                return executor.run(inputs)
            self._tied_parameters.begin()
            results = executor.run(inputs)
            self._tied_parameters.sum(failed=executor.failed)
            return results
        except PeerError as error:
            assert self.group is not None
            self._broken = LOST
            executor.abort()
            raise lost_peer(
                "a step of the pipeline", group=self.group, cause=error, sequence=self._steps
            ) from error
        except BaseException:
            self._broken = (
                "an earlier step of this pipeline was interrupted between two ranks; make a "
                "new Pipeline"
            )
            executor.abort()
            raise

    def _conclude(
        self,
        executor: ScheduleExecutor,
        inputs: StepInputs | None,
        results: list[Any],
        problem: Exception | None,
    ) -> Tensor:
        """The loss, on every rank; raises what any rank raised."""
        self._steps += 1
        loss_and_failures = torch.zeros(2, dtype=torch.float64, device="cpu")
        loss_and_failures[1] = executor.failed
        if inputs is not None and self.has_last and not executor.failed:
            loss_and_failures[0] = sum(
                float(result) * weight
                for result, weight in zip(results, inputs.loss_weights, strict=True)
            )
        if self.group is not None and self.schedule.num_ranks > 1:
            try:
                loss_and_failures = all_reduce(loss_and_failures, group=self.group)
            except CommunicationError:
                self._broken = LOST
                raise
        if loss_and_failures[1]:
            raise_first_error(problem or executor.error, executor.failed_action, group=self._ranks)
        if self._recorded is not None and executor is not self._evaluate:
            plan = self.schedule if executor is self._train else self.async_steps.synchronous
            self._recorded.append(
                gather_timeline(plan or self.schedule, executor, group=self._ranks)
            )
        return loss_and_failures[0].float()

    def _executor(self, orders: Orders, tag: int) -> ScheduleExecutor:
        """The executor of this process's part of `orders`. tag: the first of eight that its
        messages have for themselves."""
        incoming: dict[Edge, ReceiveChannel] = {}
        outgoing: dict[Edge, SendChannel] = {}
        if self.group is not None:
            incoming, outgoing = open_channels(
                orders, group=self.group, tag=tag, device=self.device
            )
            actions = orders.ranks[self.rank]
        else:  # each after what it needs
            several = set(each for _, each in orders)
            plan = orders if isinstance(orders, Schedule) else self.schedule
            actions = tuple(each for each, _ in plan.order if each in several)
        return ScheduleExecutor(
            actions,
            self.stages,
            orders,
            incoming,
            outgoing,
            steps=self.async_steps.of_stage if isinstance(orders, Schedule) else {},
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

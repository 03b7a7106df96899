"""ZeroOptimizer: an ordinary optimizer whose states, gradients and parameters are spread over the
ranks.

    backward --buckets--> reduce-scatter --> this rank's chunks --> optimizer on them --> all-gather
    --> parameters
                                   (norm, clipping: one small message)

Rajbhandari et al., ZeRO, SC 2020, arXiv:1910.02054: stages 1, 2 and 3 are its P_os, P_os+g and
P_os+g+p.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pyops.comm.agreement import ranks_agree
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_reduce
from pyops.mesh import Mesh, ProcessGroupLike, resolve
from pyops.protocols import ParamGroup
from pyops.zero.axis_groups import AxisGroups
from pyops.zero.build import ShardSpec, lay_out_units, lay_out_whole, put_together
from pyops.zero.config import ZeroConfig
from pyops.zero.hooks.module_hook import ModuleHook
from pyops.zero.hooks.overlapped_gather import OverlappedAllGather
from pyops.zero.hooks.parameter_ownership import ParameterOwnership
from pyops.zero.hooks.published_gradients import PublishedGradients, gradients_set_by_hand
from pyops.zero.hooks.sharded_gradients import ShardedGradients
from pyops.zero.hooks.sharded_unit import ShardedUnit
from pyops.zero.hooks.unshard_hooks import UnshardHooks
from pyops.zero.layout.materialize import device_for
from pyops.zero.layout.quantized_comm import QuantizedComm
from pyops.zero.optimizer_factory import MakesOptimizer
from pyops.zero.setup import ZeroSetup, agree_on_setup, validate_on_all_ranks
from pyops.zero.state.checkpointed_optimizer import CheckpointedOptimizer
from pyops.zero.update.delayed_update import DelayedUpdate
from pyops.zero.update.gradient_squares import squares_by_name
from pyops.zero.update.one_bit import OneBit
from pyops.zero.update.pipeline_axis import PipelineAxis
from pyops.zero.update.sharded_optimizer_state import ShardedOptimizerState
from pyops.zero.update.step_stats import StatsAxes, StepStats, reduce_step_stats
from pyops.zero.update.symmetric_update import SymmetricUpdate

__all__ = ["ZeroOptimizer"]

STAGE_2 = ZeroConfig(stage=2)


class LifeCycle(Enum):
    """What a ZeroOptimizer can be asked for."""

    BUILDING = "building"
    READY = "ready"
    CLOSED = "closed"


class ZeroOptimizer(CheckpointedOptimizer):
    """Trains a model on all ranks of data-parallel training, each with its own part of the batch
    and 1 / N of the states.

        ZeroOptimizer(model, pyops.optim.AdamW, ZeroConfig(stage=2), lr=3e-4)

    Use it as any optimizer: zero_grad(), backward(), step(); LR schedulers; closures. Between
    backward and step, `.grad` of the parameters is the gradient of all ranks, of which this one has
    a part: torch's clip_grad_norm_, clip_grad_value_ and GradScaler work on it
    (pyops/zero/hooks/reduced_gradient.py); what needs other ranks' parts raises. step() uses the
    gradients up. Within `no_sync()` backward adds gradients up locally, whole; without it,
    backwards before one step add up too, and each is reduced. Parameters with no gradient on any
    rank are skipped, as in torch.optim.

    At stage 3 the parameters of a unit are gathered just before it computes, those of the next one
    meanwhile, and freed after it; in backward again. All ranks must run the same units in the same
    order. A model built on the meta device gets its memory and first values unit by unit.

    With ranks that share parameters (`tp_group`), as pyops.tensor_parallel has cut them, partial
    gradients are summed over these ranks, and norms are of the whole parameters. With pipeline
    stages (`pp_group`; `model` is of this rank's layers, named as in the whole) norms, and the
    decision to skip a step, are of all stages, and the gradient of a parameter that several stages
    hold is the sum of theirs. At stages 2 and 3 the gradients of a pipeline stage are whole until
    its last micro-batch; at stage 3 its units are gathered for each micro-batch, or once a step
    within `whole_parameters()`.

    With a precision that is scaled, call backward() of `optimizer.scale(loss)`: step() unscales,
    changes nothing on any rank where a gradient of any is not finite, and sets the next scale. A
    LossScaler, or torch's GradScaler, that is used instead takes its place.

    Bytes for P 16-bit parameters with AdamW on N ranks: 16 P, 4 P + 12 P / N, 2 P + 14 P / N, 16 P
    / N at stages 0 to 3. A step sends 2 (N - 1) / N times the model at stages 1 and 2, as much as
    an all-reduce, and 3 (N - 1) / N times at stage 3.

    Args:
        model: The same on every rank up to values; rank 0's values are broadcast.
        optimizer: The inner optimizer: a class of pyops.optim, of torch.optim, or any that steps
            each element by itself; LAMB, LARS and Adafactor of pyops too, and at stage 1 OneBitAdam
            (pyops/zero/update/one_bit.py). Or a function that makes it of params, such as
            `functools.partial(AdamW, lr=3e-4)` or a lambda. Fused optimizers keep float32 master
            weights of 16-bit parameters unless a class or a partial is given master_weights=False.
            None: nothing is trained, and neither gradients nor states have memory; the parameters
            are shared out for forwards alone, and step() raises.
        zero: What is spread over the ranks, and how: see `ZeroConfig`.
        params: As for any optimizer: parameters of the model, or groups with options. None: all
            that require gradients.
        mesh: A pyops.mesh.Mesh, or a torch DeviceMesh with dimensions "dp", "tp", "pp", in place of
            the three groups.
        group: The data-parallel ranks, which hold the same parameters; see `pyops.mesh.resolve`.
        tp_group: The ranks that share each parameter; None: it is whole.
        pp_group: The ranks that hold other layers; None: this one has all.
        optimizer_arguments: Of the inner optimizer: lr=3e-4, say.

    Attributes:
        trains: Whether there is an optimizer; False where `optimizer` is None.
        grad_norm: Of the last step, before clipping, with max_grad_norm.
        loss_scale: The LossScale of a precision that is scaled; else None.
        config: The ZeroConfig, as given.

    Raises:
        ValueError, TypeError: On every rank and before anything is changed, for arguments that make
            no sense and for ranks that differ in model or options. Backward and step raise
            pyops.comm's errors, which name rank and bucket.
    """

    _step_supports_amp_scaling = True
    _life = LifeCycle.BUILDING
    symmetric: SymmetricUpdate | None = None
    grad_norm: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakesOptimizer | None,
        zero: ZeroConfig = STAGE_2,
        *,
        params: Iterable[Any] | None = None,
        mesh: Mesh | DeviceMesh | None = None,
        group: ProcessGroupLike = None,
        tp_group: dist.ProcessGroup | None = None,
        pp_group: dist.ProcessGroup | None = None,
        **optimizer_arguments: Any,
    ) -> None:
        groups = AxisGroups.of(mesh, group=group, tp_group=tp_group, pp_group=pp_group)
        setup = validate_on_all_ranks(
            model, optimizer, zero, groups=groups, params=params, arguments=optimizer_arguments
        )
        quantized_comm = agree_on_setup(setup)
        self._build(setup, quantized_comm)

    def _build(self, setup: ZeroSetup, quantized_comm: QuantizedComm) -> None:
        """Lay the parameters out and make the inner optimizer of this rank's pieces."""
        config, groups = setup.config, setup.groups
        self.model, self.config, self.group = setup.model, config, groups.dp
        self.stage, self.max_grad_norm = config.stage, config.max_grad_norm
        self.stages = PipelineAxis.of(self.model, pp_group=groups.pp)
        self.tensor_parallel = setup.tensor_parallel
        self._placements, self._own_ranks = setup.placements(), setup.own_ranks
        self._names, self.wire, self.trains = setup.names, quantized_comm, setup.factory.trains
        self.numbers, self.grad_norm = setup.precision, None
        self.loss_scale = self.numbers.loss_scale
        self.numbers.cast(self.model)
        everyone = resolve(groups.dp, "ZeroOptimizer")
        self.communicator = (
            None if everyone is None or everyone.size() == 1 else Communicator.of(everyone)
        )
        try:
            with setup.groups.all_agree():  # no memory for a stage of a pipeline, say
                self._lay_out(setup.param_groups)
            self._own(setup)
        except BaseException:
            self._undo_layout()
            raise
        self.one_bit = (
            None
            if setup.phases is None
            else OneBit(
                setup.phases,
                self.owned,
                self.gradients,
                self.communicator,
                everyone,
                op=config.reduction,
            )
        )
        super().__init__(setup.param_groups, self.owned.optimizer.defaults)
        self._life = LifeCycle.READY
        self.state = self.owned.optimizer.state
        self._watch()

    def _watch(self) -> None:
        """Hooks: parameters that are still gathered are waited for, and those that somebody moves
        or replaces are noticed."""
        self.arriving = OverlappedAllGather(
            self.model, self.flats, late=self.config.overlap_param_gather
        )
        self.in_place = ParameterOwnership(
            self.model,
            self.flats,
            self.gathering,
            self.gradients,
            others=() if self.trains else self.model.parameters(),
        )
        self._hook = self.model.register_forward_pre_hook(ModuleHook(self.in_place.before_forward))

    def _lay_out(self, param_groups: Sequence[ParamGroup]) -> None:
        """Put the parameters into buffers or units, with rank 0's values, and hooks on them."""
        config, comm = self.config, self.communicator
        offloads_parameters = config.stage == 3 and config.offload_target != "cpu"
        shared = comm if config.stage else None
        shards = ShardSpec(
            rank=0 if shared is None else shared.rank,
            ranks=1 if shared is None else shared.size,
            device=device_for(self.model, config.device),
            group=self.group,
            initialize=config.initialize,
            bucket_bytes=config.bucket_bytes,
            trained=frozenset(id(p) for g in param_groups for p in g["params"]),
            folder=config.offload_target if offloads_parameters else None,
            apart={
                **{number: str(ranks) for number, ranks in self._own_ranks.items()},
                **({} if self.stages is None else {n: self._names[n] for n in self.stages.apart}),
            },
            own=self._own_ranks,
        )
        layout = (
            lay_out_whole(self.model, shards)
            if config.stage < 3
            else lay_out_units(
                self.model, shards, units=config.units, whole_below=config.whole_below
            )
        )
        self.flats = layout.flats
        if config.symmetric_step and comm is not None:
            self.symmetric = SymmetricUpdate.of(self.flats, comm, reduction=config.reduction)
        at_once = self.symmetric is not None
        self.gradients = ShardedGradients(
            self.flats,
            None if at_once else comm,  # the step sums them
            keeps=config.stage < 2 if self.symmetric is None else self.symmetric.gradients,
            reduction=config.reduction,
            overlap=config.overlap_grad_reduce,
            positions=layout.positions,
            automatic=config.stage < 3,
            codec=self.wire.reduce,
        )
        self.gradients.synchronizes = not at_once
        self.gathering = UnshardHooks(
            layout.units,
            comm,
            overlap=config.overlap_grad_reduce,
            reduce=self._reduce_unit,
            wire=self.wire,
        )
        axes = {"tp_group": self.tensor_parallel, "pp_group": self.stages}
        because = [f"with {n} it is summed in step()" for n, axis in axes.items() if axis]
        others = [axis.communicator for axis in axes.values() if axis is not None]
        if self._own_ranks:
            because.append("norms, of other elements on other ranks, are taken in step()")
            others += [comm] if shared is None and comm is not None else []
        self.shown = PublishedGradients(
            self.gradients,
            shared,
            device=shards.device if not self.flats else self.flats[0].device,
            partial_because=because[0] if because else None,
            other_axes=others,
        )

    def _undo_layout(self) -> None:
        """The model as it was: another axis has a rank that could not lay its part out. Where this
        rank's own axis has one, there are no hooks yet."""
        if hasattr(self, "gathering"):
            self.gradients.remove()
            self.gathering.remove()
            put_together(self.gathering.units, self.group)

    def _own(self, setup: ZeroSetup) -> None:
        """The ordinary optimizer over this rank's pieces."""
        config = setup.config
        late = config.delayed_update is not False
        placements = (
            self._placements
            if self.stages is None
            else self.stages.place(self._placements, self.model)
        )
        with ranks_agree(self.group):  # no room on one rank's disk, say
            self.owned = ShardedOptimizerState(
                self.flats,
                setup.param_groups,
                setup.factory,
                setup.precision.arguments,
                config=config,
                placements=placements,
                delayed=late,
            )
        for key in ("reduce_norms", "reduce_sums"):
            if self.communicator is not None and hasattr(self.owned.optimizer, key):
                setattr(self.owned.optimizer, key, self._sum_over_ranks)
        first = 0 if config.delayed_update is True else int(config.delayed_update)
        self.delayed = DelayedUpdate(self.owned, after=first) if late else None

    def _reduce_unit(self, unit: ShardedUnit) -> None:
        for flat in unit.flats:
            if flat.parameters[0].requires_grad:
                self.gradients.start_flat(flat)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """As torch.optim, while the optimizer is being made; RuntimeError afterwards, when every
        place is given away."""
        if self._life is not LifeCycle.BUILDING:
            raise RuntimeError(
                "ZeroOptimizer has shared out its parameters and can take no further "
                "group; make a new one with all groups "
                "(params=[...]), and load the state_dict() of this one"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def close(self) -> None:
        """Let go of the model and the groups: hooks come off, gradients and states are freed, and
        every parameter is whole, in memory of its own, also where others that were beside it are
        frozen later. Take `state_dict()` before.

        No step is possible afterwards. Call it before the groups are destroyed, or before another
        optimizer takes parameters of the model. At stage 3, and with symmetric_step, a
        collective; a second time it does nothing.
        """
        if self.closed:
            return
        self.gradients.clear()
        if self.delayed is not None:
            self.delayed.wait()
        with self.whole_parameters():
            for flat in dict.fromkeys(
                [*self.flats, *(flat for unit in self.gathering.units for flat in unit.flats)]
            ):
                for parameter in flat.parameters:
                    parameter.data = parameter.data.clone()
        for hooks in (self.gradients, self.gathering, self.arriving, self._hook, self.in_place):
            hooks.remove()
        if self.symmetric is not None:
            self.symmetric.close()
            self.symmetric = None
        if self.owned.offloaded is not None:
            self.owned.offloaded.close()
        self.state, self.group, self.communicator = defaultdict(dict), None, None
        self._life = LifeCycle.CLOSED
        # Frees gradients, states and buffers also where the closed optimizer itself is kept.
        del self.owned, self.gradients, self.shown, self.gathering, self.arriving, self.in_place
        del self.flats, self.delayed, self.one_bit, self.stages, self.tensor_parallel, self.wire

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._life is LifeCycle.CLOSED

    # ----------------------------------------------------------------------------------------------
    # gradients

    def no_sync(self) -> AbstractContextManager[None]:
        """Within the block, backward adds gradients up locally; the next backward outside reduces
        the sum of all.

        The gradients of this rank are whole until then, also at stage 2: it saves traffic, not
        memory.
        """
        return self.gradients.no_sync()

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start reducing the gradients that backwards within no_sync() left in these parameters, of
        which no more come before step(): of a stage of a pipeline, say, while others still compute.
        On all ranks in the same order."""
        self.gradients.reduce(parameters)

    def forward_left(self, values: Sequence[Any]) -> None:
        """Tell that the model's forward was left by an exception, such as at the end of a stage of
        a pipeline.

        Args:
            values: What took the place of its outputs; backward begins with them. Without the call,
                stage 3 would not know of that backward.
        """
        self.gathering.forward_left(values)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those that are reduced already. set_to_none makes no
        difference."""
        self.gradients.clear()

    def reduced_gradients(self) -> list[Tensor]:
        """This rank's chunks of the gradients of all ranks, between backward and step: 1-D, padding
        included. For what looks for numbers that are not finite, such as a loss scaler; each
        element is on one rank (at stage 0 on every one). Call it again on all ranks before changing
        them: norms of `.grad` that were asked for before hold no longer then."""
        self.shown.changed()
        return [bucket.chunk for bucket in self.gradients.buckets if bucket.chunk is not None]

    @torch.no_grad()
    def gradient_squares(self) -> dict[str, Tensor]:
        """{name of a parameter: the sum of squares of its gradient, float64, no dims}, between
        backward and step: of the reduced gradients, on all ranks of `group` alike, as they are:
        loss scale and all; 0 where there is none. A collective.

        With pp_group: of this rank's parameters; of what several stages hold, of this one's part.

        Raises:
            ValueError: With tp_group, with parameters that some of the data-parallel ranks hold,
                and for gradients that are compressed to 1 bit.
        """
        self._check_trains()
        one_bit = self.one_bit is not None and self.one_bit.compressed
        if self.tensor_parallel is not None or self._own_ranks or one_bit:
            raise ValueError(
                "gradient_squares() adds up neither what some ranks hold of a parameter nor "
                "gradients of 1 bit"
            )
        self._settle()
        return squares_by_name(self.owned, self.flats, self.communicator if self.stage else None)

    # ----------------------------------------------------------------------------------------------
    # stepping

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the present scale, `loss_scale.scale`; where there is none, the loss
        itself."""
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step, with all ranks; returns what `closure` returned, called with grad enabled.

        A collective: every rank must call it.

        Raises:
            DisagreementError: On every rank, for ranks with different options.
        """
        self._check_trains()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.in_place.check()
        self.arriving.wait()
        if self.symmetric is not None and self._measures:
            raise RuntimeError(
                "this ZeroOptimizer has symmetric_step=True, whose kernel sums the gradients, so "
                "that no GradScaler can look at them before; train in bfloat16, or leave "
                "symmetric_step out"
            )
        if self.one_bit is not None and self.one_bit.compressed:
            self.one_bit.step(self)
            return loss
        if self.delayed is not None:
            self.delayed.wait()
        stats = self._settle()
        axes = [axis for axis in (self.tensor_parallel, self.stages) if axis is not None]
        for axis in axes:
            axis.finish(self.owned.all_pieces(), self.gradients)
        if axes and self._measures:  # the first measurement was of unfinished gradients
            stats = self._reduce_stats()
        self.owned.take_gradients(self.gradients, stats.unused(self.flats))
        scale, limit = self.numbers.scale_for(self), self.max_grad_norm
        factor: Tensor | None = None
        found_inf: Tensor | None = None
        skip = False
        if self._skips_on_device and not stats.on_host:
            factor, found_inf, norm = stats.scaling_on_device(scale=scale, max_grad_norm=limit)
            self.grad_norm = norm if limit is not None else None
        else:
            factor, skip = stats.factor(scale=scale, max_grad_norm=limit)
            if limit is not None:
                self.grad_norm = torch.tensor(
                    stats.norm(scale), dtype=torch.float32, device=stats.device
                )
        self.gathering.release_all()  # what is whole holds the old values
        self._update(factor, skip=skip, found_inf=found_inf)
        self.numbers.stepped(self, skipped=skip)
        self.gradients.clear()
        return loss

    def _check_trains(self) -> None:
        if self.closed:
            raise RuntimeError("this ZeroOptimizer is closed; make a new one of the model")
        if not self.trains:
            raise RuntimeError(
                "this ZeroOptimizer was made with optimizer=None, of a model that is not trained; "
                "make one with an optimizer, such as pyops.optim.AdamW"
            )

    def _settle(self) -> StepStats:
        """All gradients reduced, and this rank's parts of them given to its pieces."""
        strange = self.shown.settle()
        self.gradients.finish_reducing()
        self.owned.take_gradients(self.gradients, set())
        stats = self._reduce_stats(strange)
        if stats.set_by_hand:
            raise gradients_set_by_hand(strange)
        if stats.pending:  # backwards within no_sync() that none outside followed, on some rank
            # Other ranks read this one's gradients from its memory, also without a backward here.
            self.gradients.flush(absent=self.symmetric is not None)
            self.owned.take_gradients(self.gradients, set())
            stats = self._reduce_stats()
        return stats

    def _update(self, factor: Tensor | None, *, skip: bool, found_inf: Tensor | None) -> None:
        late = self.delayed is not None and self.delayed.active
        if not late:
            if skip:
                return
            self.owned.prepare(self.param_groups)
            if self.symmetric is not None:
                self.symmetric.step(self.owned, factor=factor, found_inf=found_inf)
                return  # every rank has all parameters
            self.owned.step(factor=factor, found_inf=found_inf)
        self._publish()
        if self.delayed is not None and not skip:
            self.delayed.steps += 1
            if late:
                self.owned.prepare(self.param_groups)
                reused = [any(b.reused for b in of_flat) for of_flat in self.gradients.of_flat]
                self.delayed.start(factor, reused=reused)

    def _publish(self) -> None:
        """The results of the last step into the model, on all ranks."""
        self.owned.publish()
        if self.communicator is not None:
            self.arriving.start(self.communicator, async_op=self.config.overlap_grad_reduce)

    @torch.no_grad()
    def finish_update(self) -> None:
        """Put a delayed update into the model now: at the end of training, say. A collective;
        without delays nothing to do."""
        if self.delayed is not None:
            self.arriving.wait()
            self.delayed.wait()
            self.gathering.release_all()
            self._publish()

    def _reduce_stats(self, strange: Sequence[str] = ()) -> StepStats:
        measured: Tensor | None = None
        if self._measures:
            measured = self.owned.squared_norm(self.flats[0].device, self.communicator)
        tensor, stages = self.tensor_parallel, self.stages
        return reduce_step_stats(
            self.gradients,
            self.param_groups,
            axes=StatsAxes(
                data=self.communicator,
                tensor=None if tensor is None else tensor.communicator,
                pipeline=None if stages is None else stages.communicator,
            ),
            measured=measured,
            found_inf=getattr(self, "found_inf", None),
            set_by_hand=len(strange),
        )

    @property
    def _skips_on_device(self) -> bool:
        """Whether a flag on the device can skip a step, so that the host need not know of it."""
        return (
            self.owned.takes_found_inf
            and self.delayed is None
            and self.one_bit is None
            and self.loss_scale is None
        )

    @property
    def _measures(self) -> bool:
        return self.max_grad_norm is not None or self.numbers.scale_for(self) is not None

    def _sum_over_ranks(self, norms: Tensor) -> Tensor:
        if self.stage:
            all_reduce(norms, communicator=self.communicator, label="norms of layers")
        return norms

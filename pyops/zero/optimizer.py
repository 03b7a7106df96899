"""ZeroOptimizer: an ordinary optimizer whose states, gradients and parameters are spread over the
ranks.

    backward --buckets--> reduce-scatter --> this rank's chunks --> optimizer on them --> all-gather --> parameters
                                   (norm, clipping: one small message)

Rajbhandari et al., ZeRO, SC 2020, arXiv:1910.02054: stages 1, 2 and 3 are its P_os, P_os+g and
P_os+g+p.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_reduce
from pyops.comm.compression.codec import Codec
from pyops.precision import LossScale, Precision
from pyops.protocols import ParamGroup
from pyops.zero.agreement import agreed, check_same_model, check_same_options
from pyops.zero.build import Place, lay_out_units, lay_out_whole
from pyops.zero.checks import check_arguments, param_groups_of
from pyops.zero.hooks.module_hook import ModuleHook
from pyops.zero.hooks.overlapped_gather import OverlappedAllGather
from pyops.zero.hooks.parameter_ownership import ParameterOwnership
from pyops.zero.hooks.published_gradients import PublishedGradients, gradients_set_by_hand
from pyops.zero.hooks.sharded_gradients import ShardedGradients
from pyops.zero.hooks.unshard_hooks import ShardedUnit, UnshardHooks
from pyops.zero.layout.materialise import Initialise, check_initialise, device_for
from pyops.zero.layout.units import IsUnit
from pyops.zero.layout.wire import check_wire, wire_of
from pyops.zero.state.savable import Savable
from pyops.zero.update.delayed_update import DelayedUpdate, check_delayed
from pyops.zero.update.gradient_squares import squares_by_name
from pyops.zero.update.one_bit import OneBit, phases_over_shards
from pyops.zero.update.pipeline_axis import PipelineAxis, agree_over_stages, check_stages
from pyops.zero.update.precision_plan import make_precision_plan
from pyops.zero.update.sharded_optimizer_state import ShardedOptimizerState
from pyops.zero.update.step_stats import StatsAxes, StepStats, reduce_step_stats
from pyops.zero.update.tensor_parallel_axis import TensorParallelAxis

__all__ = ["ZeroOptimizer"]


class ZeroOptimizer(Savable):
    """Trains `model` on all ranks of `group`, each with its own part of the batch and 1 / N of the
    states.

    model: the same on every rank up to values; rank 0's are broadcast. optimizer_class: a class of
    pyops.optim, of torch.optim, or any that steps each element by itself; LAMB, LARS and Adafactor
    of pyops too, and at stage 1 OneBitAdam: see pyops/zero/update/one_bit.py. optimizer_arguments:
    its arguments.

    stage: what is spread over the ranks. 0: nothing. 1: states and float32 masters. 2: gradients
    too. 3: parameters too. offload: where states and masters are: None, beside the parameters;
    "cpu", in host memory; a folder, in files there, at stage 3 with the parameters.
    params: as for any optimizer (parameters of the model, or groups with options); None: all that
    require gradients. bucket_bytes: how much is reduced, and gathered, at a time. tile_bytes: how
    much of offloaded states is stepped at a time; a folder takes three times as much memory.
    delayed_update: with offload, apply a step's gradients on a thread while the next step computes,
    and have the result in the model one step late; from the beginning, or after a number of steps,
    40 say. `finish_update()` at the end. max_grad_norm: clip the gradients of all ranks, all groups
    together, to this 2-norm; `grad_norm` then is the norm before, and a step whose gradients hold
    an inf or a nan changes nothing. overlap: communicate while backward computes; "forward": gather
    parameters while the next forward computes, too: after step() look at them within forward,
    `whole_parameters` and state_dict()s only. op: "mean", or "sum" for a loss that is already
    divided by the global number of samples.

    Use it as any optimizer: zero_grad(), backward(), step(); LR schedulers; closures. Between
    backward and step, `.grad` of the parameters is the gradient of all ranks, of which this one has
    a part: torch's clip_grad_norm_, clip_grad_value_ and GradScaler work on it
    (pyops/zero/hooks/reduced_gradient.py), what needs other ranks' parts raises. step() uses the gradients
    up. Within `no_sync()` backward adds gradients up locally, whole; without it, backwards before
    one step add up too, and each is reduced. Parameters that got no gradient on any rank are left
    alone, as torch.optim leaves those without .grad.

    Stage 3: the parameters of a unit are gathered just before it computes, the next one's
    meanwhile, and let go of after it; in backward again. units: which modules are units, by (path,
    module) -> bool or as a list; by default the children of every ModuleList and Sequential. What
    is in no unit, or in several, is whole from forward to the end of backward. whole_below:
    parameters of fewer elements stay whole. All ranks must run the same units in the same order. A
    model built on the meta device is made unit by unit on `device`, with the values that
    `initialise(module)`, by default module.reset_parameters(), gives on rank 0.

    tp_group: the ranks that share the model's parameters, where pyops.tensor_parallel has cut them;
    `group` then is of the ranks that hold the same parts. Partial gradients are summed over it,
    norms are of the whole parameters. pp_group: the ranks that hold other layers (`model` is of
    this rank's, named as in the whole); norms, and what is skipped, are of all of them, and the
    gradient of what several hold is the sum of theirs. Stages 0 and 1 only.

    precision: "fp32", "bf16", "fp16" or a pyops.precision.Precision: parameters and buffers are
    cast, as by model.to(), inputs are the caller's; None: the model as it is. Where it is scaled,
    call backward() of `optimizer.scale(loss)`: step() unscales, changes nothing on any rank where a
    gradient of any is not finite, and sets the next scale. loss_scale: a LossScale with other
    options. A LossScaler, or torch's GradScaler, that is used instead takes its place.

    gather_codec, reduce_codec, secondary_group: what travels in fewer bits, and where: see
    pyops/zero/layout/wire.py.

    Bytes for P 16-bit parameters with AdamW on N ranks: 16 P, 4 P + 12 P / N, 2 P + 14 P / N, 16 P
    / N at stages 0 to 3. A step sends 2 (N - 1) / N times the model at stages 1 and 2, as much as
    an all-reduce, and 3 (N - 1) / N times at stage 3.

    Raises ValueError or TypeError, on every rank and before anything is changed, for arguments that
    make no sense, for ranks that differ in model or options; in backward and step pyops.comm's
    errors, which name rank and bucket.
    """

    _step_supports_amp_scaling = True
    grad_norm: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        stage: int,
        group: dist.ProcessGroup | None = None,
        tp_group: dist.ProcessGroup | None = None,
        pp_group: dist.ProcessGroup | None = None,
        params: Iterable[Any] | None = None,
        offload: str | None = None,
        bucket_bytes: int = 25 << 20,
        tile_bytes: int = 32 << 20,
        delayed_update: bool | int = False,
        max_grad_norm: float | None = None,
        overlap: bool | str = True,
        op: str = "mean",
        units: IsUnit | Sequence[nn.Module] | None = None,
        whole_below: int = 0,
        initialise: Initialise | None = None,
        device: torch.device | str | None = None,
        gather_codec: Codec | None = None,
        reduce_codec: Codec | None = None,
        secondary_group: dist.ProcessGroup | None = None,
        precision: Precision | str | None = None,
        loss_scale: LossScale | None = None,
        **optimizer_arguments: Any,
    ) -> None:
        error: Exception | None = None
        groups: list[ParamGroup] = []
        try:
            wrong = {
                "offload": offload,
                "delayed_update": delayed_update,
                "reduce_codec": reduce_codec,
                "tp_group": tp_group,
            }
            given, wrong["pp_group"] = (optimizer_class, optimizer_arguments), pp_group
            phases, optimizer_class, optimizer_arguments = phases_over_shards(
                *given, model=model, stage=stage, without=wrong
            )
            check_arguments(
                model,
                optimizer_class,
                stage=stage,
                bucket_bytes=bucket_bytes,
                max_grad_norm=max_grad_norm,
                op=op,
                overlap=overlap,
                group=group,
                offload=offload,
                optimizer_arguments=optimizer_arguments,
            )
            check_delayed(delayed_update, stage=stage, offload=offload)
            check_wire(
                stage=stage,
                gather_codec=gather_codec,
                reduce_codec=reduce_codec,
                secondary_group=secondary_group,
            )
            check_initialise(model, initialise)
            numbers = self.numbers = make_precision_plan(
                precision, loss_scale, optimizer_class, optimizer_arguments
            )
            trial: ParamGroup = {"stage": stage, "offload": offload, "dtype": numbers.dtype}
            groups = param_groups_of(model, params, optimizer_class, numbers.arguments, **trial)
            self.tensor_parallel = TensorParallelAxis.of(
                model, optimizer_class, tp_group=tp_group, group=group
            )
            check_stages(pp_group, group=group, stage=stage)
        except (TypeError, ValueError, OSError) as caught:
            error = caught
        agree_over_stages(error, pp_group=pp_group, group=group)
        check_same_model(model, group=group)
        self.stages = PipelineAxis.of(model, pp_group=pp_group)
        self._placements = {} if self.tensor_parallel is None else self.tensor_parallel.placements
        self._names = {id(p): name for name, p in model.named_parameters()}
        options = {
            "optimizer_class": optimizer_class.__name__,
            "stage": stage,
            "bucket_bytes": bucket_bytes,
            "op": op,
            "overlap": overlap,
            "max_grad_norm": max_grad_norm,
            "whole_below": whole_below,
            "optimizer_arguments": numbers.arguments,
            "gather_codec": gather_codec,
            "reduce_codec": reduce_codec,
            "delayed_update": delayed_update,
            "precision": numbers.described(),
            "phases": phases and phases.described(),
            "params": [{**g, "params": [self._names[id(p)] for p in g["params"]]} for g in groups],
        }
        check_same_options(options, group=group)
        numbers.cast(model)
        self.wire = wire_of(gather_codec, reduce_codec, secondary_group, group=group)
        self.model, self.stage, self.group, self.max_grad_norm, self.op = (
            model,
            stage,
            group,
            max_grad_norm,
            op,
        )
        self.overlap, self.bucket_bytes = bool(overlap), bucket_bytes
        alone = not dist.is_initialized() or dist.get_world_size(group) == 1
        comm = self.communicator = None if alone else Communicator.of(group)
        self.grad_norm, self.loss_scale = None, numbers.loss_scale
        ranks, rank = (comm.size, comm.rank) if comm is not None and stage else (1, 0)
        folder = None if stage < 3 or offload == "cpu" else offload
        self._lay_out(
            groups,
            Place(rank, ranks, device_for(model, device), group, initialise, folder),
            units,
            whole_below,
        )
        self._own(groups, optimizer_class, numbers.arguments, offload, tile_bytes, delayed_update)
        self.one_bit = (
            None
            if phases is None
            else OneBit(phases, self.owned, self.gradients, comm, group, op=op)
        )
        super().__init__(groups, self.owned.optimizer.defaults)
        self._built = True
        self.state = self.owned.optimizer.state
        self._look_after(late=overlap == "forward")

    def _look_after(self, *, late: bool) -> None:
        """Hooks: what arrives late is waited for, and what somebody moves or replaces is
        noticed."""
        self.arriving = OverlappedAllGather(self.model, self.flats, late=late)
        self.in_place = ParameterOwnership(self.model, self.flats, self.gathering, self.gradients)
        self._hook = self.model.register_forward_pre_hook(ModuleHook(self.in_place.before_forward))

    def _lay_out(
        self, groups: list[ParamGroup], place: Place, units: Any, whole_below: int
    ) -> None:
        """Put the parameters where they belong, with rank 0's values, and hooks on them."""
        trained = {id(p) for g in groups for p in g["params"]}
        if self.stages is not None:
            place = replace(place, apart=frozenset(self.stages.apart))
        common: ParamGroup = {"trained": trained, "bucket_bytes": self.bucket_bytes, "place": place}
        if self.stage < 3:
            layout = lay_out_whole(self.model, **common)
        else:
            layout = lay_out_units(self.model, wanted=units, whole_below=whole_below, **common)
        self.flats = layout.flats
        self.gradients = ShardedGradients(
            self.flats,
            self.communicator,
            keeps=self.stage < 2,
            reduction=self.op,
            overlap=self.overlap,
            positions=layout.positions,
            automatic=self.stage < 3,
            codec=self.wire.reduce,
        )
        self.gathering = UnshardHooks(
            layout.units,
            self.communicator,
            overlap=self.overlap,
            reduce=self._reduce_unit,
            wire=self.wire,
        )
        across = (
            "tp_group"
            if self.tensor_parallel is not None
            else "pp_group"
            if self.stages is not None
            else None
        )
        why = across and f"with {across} it is summed in step()"
        axes = [
            each.communicator for each in (self.tensor_parallel, self.stages) if each is not None
        ]
        self.shown = PublishedGradients(
            self.gradients,
            self.communicator if self.stage else None,
            partial_because=why,
            other_axes=axes,
        )

    def _own(
        self,
        groups: list[ParamGroup],
        optimizer_class: type[torch.optim.Optimizer],
        arguments: ParamGroup,
        offload: str | None,
        tile_bytes: int,
        delayed_update: bool | int,
    ) -> None:
        """The ordinary optimizer over this rank's pieces."""
        late = delayed_update is not False
        placements = (
            self._placements
            if self.stages is None
            else self.stages.place(self._placements, self.model)
        )
        self.owned = agreed(  # no room on one rank's disk, say
            lambda: ShardedOptimizerState(
                self.flats,
                groups,
                optimizer_class,
                arguments,
                offload=offload,
                tile_bytes=tile_bytes,
                placements=placements,
                delayed=late,
                portion_bytes=self.bucket_bytes,
            ),
            group=self.group,
        )
        for key in ("reduce_norms", "reduce_sums"):
            if self.communicator is not None and hasattr(self.owned.optimizer, key):
                setattr(self.owned.optimizer, key, self._sum_over_ranks)
        self.delayed = (
            DelayedUpdate(self.owned, after=0 if delayed_update is True else int(delayed_update))
            if late
            else None
        )

    def _reduce_unit(self, unit: ShardedUnit) -> None:
        for flat in unit.flats:
            if flat.parameters[0].requires_grad:
                self.gradients.start_flat(flat)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """As torch.optim, while the optimizer is being made; RuntimeError afterwards, when every
        place is given away."""
        if self.__dict__.get("_built", False):
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
        optimizer takes parameters of the model. At stage 3 a collective; a second time it does
        nothing.
        """
        if "owned" not in self.__dict__:
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
        if self.owned.offloaded is not None:
            self.owned.offloaded.close()
        self.state, self.group, self.communicator = defaultdict(dict), None, None
        for name in (
            "owned",
            "gradients",
            "shown",
            "gathering",
            "arriving",
            "in_place",
            "flats",
            "delayed",
            "one_bit",
            "stages",
            "tensor_parallel",
            "wire",
        ):
            self.__dict__.pop(name)

    # ------------------------------------------------------------------------------------------------
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
        ValueError with tp_group, and for gradients that are compressed to 1 bit.
        """
        if self.tensor_parallel is not None or (
            self.one_bit is not None and self.one_bit.compressed
        ):
            raise ValueError(
                "gradient_squares() adds up neither what tensor-parallel ranks share nor "
                "gradients of 1 bit"
            )
        self._settle()
        return squares_by_name(self.owned, self.flats, self.communicator if self.stage else None)

    # ------------------------------------------------------------------------------------------------
    # stepping

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the present scale, `loss_scale.scale`; where there is none, the loss
        itself."""
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step, with all ranks; returns what `closure` returned, called with grad enabled.

        A collective: every rank must call it. DisagreementError, on every rank, for ranks with
        different options.
        """
        if "owned" not in self.__dict__:
            raise RuntimeError("this ZeroOptimizer is closed; make a new one of the model")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.in_place.check()
        self.arriving.wait()
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

    def _settle(self) -> StepStats:
        """All gradients reduced, and this rank's parts of them given to its pieces."""
        strange = self.shown.settle()
        self.gradients.finish_reducing()
        self.owned.take_gradients(self.gradients, set())
        stats = self._reduce_stats(strange)
        if stats.set_by_hand:
            raise gradients_set_by_hand(strange)
        if stats.pending:  # backwards within no_sync() that none outside followed, on some rank
            self.gradients.flush()
            self.owned.take_gradients(self.gradients, set())
            stats = self._reduce_stats()
        return stats

    def _update(self, factor: Tensor | None, *, skip: bool, found_inf: Tensor | None) -> None:
        late = self.delayed is not None and self.delayed.active
        if not late:
            if skip:
                return
            self.owned.prepare(self.param_groups)
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
            self.arriving.start(self.communicator, async_op=self.overlap)

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
            measured = self.owned.squared_norm(self.flats[0].device)
            if self.communicator is not None and not self.stage:  # each rank measures everything
                measured /= self.communicator.size
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

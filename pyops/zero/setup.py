"""What ZeroOptimizer's constructor does before it changes anything: each rank checks its arguments,
then the ranks compare them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from pyops.comm.buckets.reduce_axes import OwnRanks, check_grids_apart, own_ranks
from pyops.flat import Placement
from pyops.protocols import ParamGroup
from pyops.zero.agreement import RankSetup, check_same_setup
from pyops.zero.axis_groups import AxisGroups
from pyops.zero.checks import (
    check_model,
    check_offload_folder,
    check_optimizer,
    check_own_ranks,
    param_groups_of,
)
from pyops.zero.config import ZeroConfig, refuse_options_of_config
from pyops.zero.layout.materialize import check_initialize
from pyops.zero.layout.quantized_comm import QuantizedComm, quantized_comm_of, ranks_of
from pyops.zero.optimizer_factory import MakesOptimizer, OptimizerFactory
from pyops.zero.update.one_bit import phases_over_shards
from pyops.zero.update.pipeline_axis import check_stages
from pyops.zero.update.precision_plan import PrecisionPlan, make_precision_plan
from pyops.zero.update.symmetric_update import check_symmetric_step
from pyops.zero.update.tensor_parallel_axis import TensorParallelAxis

__all__ = ["ZeroSetup", "agree_on_setup", "validate_on_all_ranks"]


@dataclass(frozen=True)
class ZeroSetup:
    """Checked arguments of a ZeroOptimizer."""

    model: nn.Module

    config: ZeroConfig

    groups: AxisGroups

    factory: OptimizerFactory
    """Of the inner optimizer; of a 1-bit one, of its first phase."""

    phases: Any
    """The phases of a 1-bit optimizer (`pyops.onebit.sharded.Phases`); None for any other."""

    precision: PrecisionPlan
    """The dtype that the model is cast to, the loss scale, and the inner optimizer's arguments with
    what follows of these."""

    param_groups: list[ParamGroup]
    """The groups of trained parameters."""

    tensor_parallel: TensorParallelAxis | None

    names: dict[int, str]
    """Names of the model's parameters, by their id."""

    own_ranks: dict[int, OwnRanks]
    """The ranks that hold a parameter, by its id, where these are not all data-parallel ranks."""

    def placements(self) -> dict[str, Placement]:
        """Of the parameters of which other ranks hold other elements, by name."""
        if self.tensor_parallel is not None:
            return self.tensor_parallel.placements
        apart = {self.names[number] for number in self.own_ranks}
        known = Placement.of(self.model) if apart else {}
        return {name: place for name, place in known.items() if name in apart}

    def options(self) -> ParamGroup:
        """What the ranks must have in common beside the model."""
        config, names = self.config, self.names
        shared = (
            "stage",
            "bucket_bytes",
            "reduction",
            "overlap_grad_reduce",
            "overlap_param_gather",
            "max_grad_norm",
            "whole_below",
            "gather_codec",
            "reduce_codec",
            "delayed_update",
            "symmetric_step",
        )
        return {
            "optimizer_class": self.factory.optimizer_class.__name__,
            **{name: getattr(config, name) for name in shared},
            "optimizer_arguments": self.precision.arguments,
            "precision": self.precision.described(),
            "phases": self.phases and self.phases.described(),
            "params": [
                {**group, "params": [names[id(p)] for p in group["params"]]}
                for group in self.param_groups
            ],
        }


def validate_on_all_ranks(
    model: nn.Module,
    optimizer: MakesOptimizer | None,
    config: ZeroConfig,
    *,
    groups: AxisGroups,
    params: Iterable[Any] | None,
    arguments: Mapping[str, Any],
) -> ZeroSetup:
    """Check the arguments of a ZeroOptimizer. Collective: what one rank refuses is raised on all.

    Raises:
        TypeError, ValueError, OSError: the first refusal, with its fix.
    """
    with groups.all_agree():
        setup = _validate(model, optimizer, config, groups, params, arguments)
    return setup


def _validate(
    model: nn.Module,
    optimizer: MakesOptimizer | None,
    config: ZeroConfig,
    groups: AxisGroups,
    params: Iterable[Any] | None,
    arguments: Mapping[str, Any],
) -> ZeroSetup:
    """The checks of one rank, which communicate nothing."""
    check_model(model)
    check_grids_apart(model, groups.dp, who="ZeroOptimizer")
    own = own_ranks(model, groups.mesh, who="ZeroOptimizer")
    refuse_options_of_config(arguments)
    if not isinstance(config, ZeroConfig):
        raise TypeError(
            f"ZeroOptimizer: zero is {config!r}; give a pyops.zero.ZeroConfig, such as "
            "ZeroConfig(stage=2)"
        )
    config.validate()
    factory = OptimizerFactory.of(optimizer, arguments)
    incompatible = {
        "offload": config.offload_target,
        "delayed_update": config.delayed_update,
        "reduce_codec": config.reduce_codec,
        "tp_group": groups.tp,
        "pp_group": groups.pp,
    }
    phases, inner, inner_arguments = phases_over_shards(
        factory.optimizer_class,
        factory.arguments,
        model=model,
        stage=config.stage,
        without=incompatible,
    )
    if phases is not None:
        factory = OptimizerFactory(inner, inner_arguments)
    check_optimizer(factory)
    check_offload_folder(config)
    check_initialize(model, config.initialize)
    check_own_ranks(
        model,
        own,
        factory.optimizer_class,
        without={
            "a 1-bit optimizer": phases,
            "secondary_group": config.secondary_group,
            "symmetric_step": config.symmetric_step,
        },
        tp_group=groups.tp,
    )
    precision = make_precision_plan(
        config.precision, config.loss_scale, factory.optimizer_class, factory.arguments
    )
    param_groups = param_groups_of(
        model, params, factory, precision.arguments, config=config, dtype=precision.dtype
    )
    tensor_parallel = TensorParallelAxis.of(
        model, factory.optimizer_class, tp_group=groups.tp, group=groups.dp
    )
    check_stages(groups.pp, group=groups.dp)
    if config.symmetric_step:
        names = ("max_grad_norm", "delayed_update", "reduce_codec", "overlap_param_gather")
        check_symmetric_step(
            factory.optimizer_class,
            precision.arguments,
            without={
                "offload": config.offload_target,
                **{name: getattr(config, name) for name in names},
                "a loss scale": precision.loss_scale,
                "tp_group": groups.tp,
                "pp_group": groups.pp,
            },
        )
    return ZeroSetup(
        model,
        config,
        groups,
        factory,
        phases,
        precision,
        param_groups,
        tensor_parallel,
        names={id(p): name for name, p in model.named_parameters()},
        own_ranks=own,
    )


def agree_on_setup(setup: ZeroSetup) -> QuantizedComm:
    """Compare model, options and secondary groups of the ranks. One collective.

    Raises:
        ValueError: on every rank, naming the first difference from rank 0.
    """
    config, group = setup.config, setup.groups.dp
    everyone = check_same_setup(
        RankSetup.of(setup.model, setup.options(), secondary_ranks=ranks_of(config)), group=group
    )
    return quantized_comm_of(config, [each.secondary_ranks for each in everyone], group=group)

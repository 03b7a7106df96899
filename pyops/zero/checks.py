"""What a ZeroOptimizer refuses, in words, before any rank has changed anything."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.buckets.reduce_axes import OwnRanks
from pyops.flat import Placement, check_free
from pyops.mesh import ProcessGroupLike, resolve
from pyops.offload import Offloaded
from pyops.ops.memory import require_memory
from pyops.optim.fused.layerwise import LayerwiseOptimizer
from pyops.protocols import ParamGroup
from pyops.zero.config import ZeroConfig
from pyops.zero.optimizer_factory import OptimizerFactory

__all__ = [
    "check_crossing",
    "check_model",
    "check_offload_folder",
    "check_optimizer",
    "check_own_ranks",
    "goes_by_layers",
    "param_groups_of",
]

WHO = "ZeroOptimizer"
# They look at a whole tensor, of which a rank has a part. pyops' own Adafactor sums over the parts.
NEED_WHOLE_TENSORS = ("Adafactor", "LBFGS", "Muon", "SparseAdam", "Shampoo")


def check_model(model: object) -> None:
    """TypeError or ValueError for a model that ZeroOptimizer can't take."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{WHO}: model is a {type(model).__name__}; expected an nn.Module")
    for name, p in model.named_parameters():
        for what, tensor in ((name, p), (f"the gradient of {name}", p.grad)):
            if tensor is not None and tensor.layout == torch.strided and not tensor.is_meta:
                require_memory(tensor, f"{WHO}: {what}")


def check_offload_folder(config: ZeroConfig) -> None:
    """ValueError for a folder that is not there."""
    if config.offload_target not in (None, "cpu") and not os.path.isdir(config.offload):
        raise ValueError(
            f"{WHO}: offload is {config.offload!r}; give 'cpu' (host memory), a folder that "
            "exists, or 'none'"
        )


def goes_by_layers(optimizer_class: type) -> bool:
    """Whether steps of the optimizer need sums over each layer."""
    return issubclass(optimizer_class, LayerwiseOptimizer) or hasattr(
        optimizer_class, "reduce_sums"
    )


def check_own_ranks(
    model: nn.Module,
    own: Mapping[int, OwnRanks],
    optimizer_class: type,
    *,
    without: Mapping[str, Any],
    tp_group: dist.ProcessGroup | None,
) -> None:
    """ValueError for what can't be had with parameters that some of the data-parallel ranks hold
    alone.

    Args:
        model: With their placements.
        own: Their ranks, by id.
        optimizer_class: Of the inner optimizer.
        without: What is refused beside them, where it is given.
        tp_group: See ZeroOptimizer.
    """
    layerwise = f"{optimizer_class.__name__}, which goes by sums over layers,"
    wanted = {**without, layerwise: goes_by_layers(optimizer_class)}
    places = Placement.of(model) if own else {}
    for name, p in model.named_parameters():
        if id(p) not in own:
            continue
        for what, given in wanted.items():
            if given:
                raise ValueError(
                    f"{WHO}: {what} is not offered with {name}, whose gradient is {own[id(p)]}, "
                    "others over all data-parallel ranks; leave it out"
                )
        if tp_group is not None and places[name].partial:
            raise ValueError(
                f"{WHO}: the gradient of {name} is {own[id(p)]} and a part of the whole on each "
                "rank of tp_group; sum it over these in backward, with partial=False in its "
                "placement"
            )


def check_optimizer(factory: OptimizerFactory) -> None:
    """ValueError for an inner optimizer that can't step flat parts of tensors."""
    found = factory.optimizer_class
    if found.__name__ in NEED_WHOLE_TENSORS and not hasattr(found, "reduce_sums"):
        raise ValueError(
            f"{WHO}: optimizer is {found.__module__}.{found.__name__}, which needs whole tensors, "
            "and here it is given flat parts of them; use it with "
            "pyops.data_parallel.DataParallel, or one that steps each element by itself, such as "
            "AdamW, or pyops.optim.Adafactor, which sums over the parts"
        )
    if hasattr(found, "num_ranks"):
        raise ValueError(
            f"{WHO}: optimizer is {found.__name__}, which communicates by itself; use it without "
            "ZeRO, with pyops.data_parallel.DataParallel"
        )
    for key in ("zero_grad", "differentiable"):
        if factory.arguments.get(key):
            raise ValueError(
                f"{WHO}: {key}=True has no meaning here: step() uses the gradients up; leave it out"
            )


def _listed(params: Iterable[Any]) -> list[ParamGroup]:
    given = list(params)
    if given and all(isinstance(each, Mapping) for each in given):
        groups = [dict(each) for each in given]
    else:
        groups = [{"params": given}]
    for number, group in enumerate(groups):
        if "params" not in group:
            raise ValueError(
                f"ZeroOptimizer: param group {number} has no 'params', only {sorted(group)}"
            )
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        group["params"] = [each[1] if isinstance(each, tuple) else each for each in members]
    return groups


def param_groups_of(
    model: nn.Module,
    params: Iterable[Any] | None,
    factory: OptimizerFactory,
    arguments: Mapping[str, Any],
    *,
    config: ZeroConfig,
    dtype: torch.dtype | None = None,
) -> list[ParamGroup]:
    """The groups of trained parameters, checked; parameters that require no gradient are left out.

    Args:
        params: as a user gives them to any optimizer; None: all parameters of the model.
        factory: of the inner optimizer, which is tried on stand-ins.
        arguments: of the inner optimizer.
        dtype: what the parameters will be cast to; None: they stay as they are.
    """
    who = WHO
    named = dict(model.named_parameters())
    names = {id(p): name for name, p in named.items()}
    if params is None:
        params = [p for p in named.values() if p.requires_grad and factory.trains]
    groups = _listed(params)
    seen: set[int] = set()
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"{who}: param group {number} holds a {type(parameter).__name__} of shape "
                    f"{tuple(getattr(parameter, 'shape', ()))} that is no parameter of "
                    "the model; pass model.parameters()"
                )
            if id(parameter) in seen:
                raise ValueError(
                    f"{who}: {names[id(parameter)]} appears twice in the param groups; "
                    "pass each parameter once"
                )
            seen.add(id(parameter))
        group["params"] = [p for p in group["params"] if p.requires_grad]
    check_free(
        named.items()
        if config.stage == 3 or not factory.trains
        else [(names[id(p)], p) for g in groups for p in g["params"]],
        who=who,
    )
    if any(group["params"] for group in groups) != factory.trains:
        raise ValueError(
            f"{who}: no parameter requires a gradient, so there is nothing to step; give None as "
            "optimizer for a model that is not trained"
            if factory.trains
            else f"{who}: optimizer is None, but params names some to train; leave one of them out"
        )
    for name, tensor in [*named.items(), *model.named_buffers()]:
        if id(tensor) in seen and (
            tensor.layout != torch.strided or not tensor.is_floating_point()
        ):
            raise ValueError(
                f"{who}: {name} is {tensor.dtype}, {tensor.layout}; expected a dense "
                "floating-point parameter"
            )
    # What the optimizer itself refuses, it refuses here, of stand-ins of one element for each
    # dtype.
    kinds = [
        dict.fromkeys((dtype or p.dtype, "cpu" if p.is_meta else p.device) for p in group["params"])
        for group in groups
    ]
    stand_ins = [
        {
            **group,
            "params": [
                nn.Parameter(torch.zeros(1, dtype=kind, device=device)) for kind, device in each
            ],
        }
        for group, each in zip(groups, kinds, strict=True)
    ]
    trial = factory.make(stand_ins, arguments)
    if getattr(trial, "max_grad_norm", None) is not None:
        raise ValueError(
            f"{who}: the {type(trial).__name__} has max_grad_norm={trial.max_grad_norm}, which "  # type: ignore[attr-defined]
            "would be that of this rank's part; leave it out, and write "
            "ZeroConfig(max_grad_norm=...)"
        )
    if config.offload_target is not None:
        Offloaded(trial, config.offload_target).close()
    return groups


def check_crossing(name: str, along: dist.ProcessGroup, group: ProcessGroupLike) -> None:
    """ValueError where `along`, the argument `name`_group, and the data-parallel group share other
    ranks than this one."""
    rank, everyone = dist.get_rank(), resolve(group, WHO)
    down = [rank] if everyone is None else dist.get_process_group_ranks(everyone)
    ranks = dist.get_process_group_ranks(along)
    if set(ranks) & set(down) != {rank}:
        raise ValueError(
            f"{WHO}: {name}_group is of ranks {ranks}, group of ranks {down}; they must have only "
            f"rank {rank} in common: pass one mesh in place of the groups"
        )

"""What a ZeroOptimizer refuses, in words, before any rank has changed anything."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.flat import check_free
from pyops.mesh import check_initialized
from pyops.offload import Offloaded
from pyops.ops.memory import require_memory
from pyops.protocols import ParamGroup

__all__ = ["STAGES", "check_arguments", "check_crossing", "param_groups_of"]

STAGES = (0, 1, 2, 3)
# They look at a whole tensor, of which a rank has a part. pyops' own Adafactor sums over the parts.
NEED_WHOLE_TENSORS = ("Adafactor", "LBFGS", "Muon", "SparseAdam", "Shampoo")


def check_arguments(
    model: Any,
    optimizer_class: Any,
    *,
    stage: Any,
    bucket_bytes: Any,
    max_grad_norm: Any,
    op: Any,
    overlap: Any,
    group: Any,
    offload: Any,
    optimizer_arguments: Mapping[str, Any],
) -> None:
    """TypeError or ValueError for arguments of ZeroOptimizer that make no sense."""
    who = "ZeroOptimizer"
    check_initialized(who, group if isinstance(group, dist.ProcessGroup) else None)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{who}: model is a {type(model).__name__}; expected an nn.Module")
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    ):
        raise TypeError(
            f"{who}: optimizer_class is {optimizer_class!r}; pass the class itself, such "
            "as pyops.optim.AdamW"
        )
    if isinstance(stage, bool) or stage not in STAGES:
        raise ValueError(f"{who}: stage is {stage!r}; choose one of {STAGES}")
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(
            f"{who}: bucket_bytes is {bucket_bytes!r}; give the bytes of a bucket, such as 25 << 20"
        )
    if max_grad_norm is not None and not (
        isinstance(max_grad_norm, int | float) and max_grad_norm > 0
    ):
        raise ValueError(
            f"{who}: max_grad_norm is {max_grad_norm!r}; give a positive number, or None "
            "not to clip"
        )
    if op not in ("mean", "sum"):
        raise ValueError(f"{who}: op is {op!r}; choose 'mean' or 'sum'")
    if not (isinstance(overlap, bool) or overlap == "forward"):
        raise TypeError(f"{who}: overlap is {overlap!r}; expected True, False or 'forward'")
    for name, p in model.named_parameters():
        for what, tensor in ((name, p), (f"the gradient of {name}", p.grad)):
            if tensor is not None and tensor.layout == torch.strided and not tensor.is_meta:
                require_memory(tensor, f"{who}: {what}")
    if offload is not None and not (
        offload == "cpu" or (isinstance(offload, str) and os.path.isdir(offload))
    ):
        raise ValueError(
            f"{who}: offload is {offload!r}; give 'cpu' (host memory), a folder that "
            "exists, or None"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{who}: group must be a torch process group or None (all ranks), got {group!r}"
        )
    if optimizer_class.__name__ in NEED_WHOLE_TENSORS and not hasattr(
        optimizer_class, "reduce_sums"
    ):
        raise ValueError(
            f"{who}: {optimizer_class.__module__}.{optimizer_class.__name__} looks at "
            "whole tensors, and here it is given flat "
            "parts of them; use it with pyops.data_parallel.DataParallel, or one that "
            "steps each element by itself, such as "
            "AdamW, or pyops.optim.Adafactor, which sums over the parts"
        )
    if hasattr(optimizer_class, "num_ranks"):
        raise ValueError(
            f"{who}: {optimizer_class.__name__} communicates by itself; use it without ZeRO, with "
            "pyops.data_parallel.DataParallel"
        )
    for key in ("zero_grad", "differentiable"):
        if optimizer_arguments.get(key):
            raise ValueError(
                f"{who}: {key}=True has no meaning here: step() uses the gradients up; leave it out"
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
    optimizer_class: type[torch.optim.Optimizer],
    optimizer_arguments: Mapping[str, Any],
    *,
    stage: int,
    offload: str | None = None,
    dtype: torch.dtype | None = None,
) -> list[ParamGroup]:
    """The groups of trained parameters, checked; parameters that require no gradient are left out.
    dtype: what they will be cast to."""
    who = "ZeroOptimizer"
    named = dict(model.named_parameters())
    names = {id(p): name for name, p in named.items()}
    groups = _listed([p for p in named.values() if p.requires_grad] if params is None else params)
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
        named.items() if stage == 3 else [(names[id(p)], p) for g in groups for p in g["params"]],
        who=who,
    )
    if not any(group["params"] for group in groups):
        raise ValueError(f"{who}: no parameter requires a gradient, so there is nothing to step")
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
    trial = optimizer_class(stand_ins, **optimizer_arguments)
    if offload is not None:
        Offloaded(trial, offload).close()
    return groups


def check_crossing(name: str, along: dist.ProcessGroup, group: dist.ProcessGroup | None) -> None:
    """ValueError where `along`, the argument `name`_group, and the data-parallel group share other
    ranks than this one."""
    rank = dist.get_rank()
    down = (
        list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
    )
    ranks = dist.get_process_group_ranks(along)
    if set(ranks) & set(down) != {rank}:
        raise ValueError(
            f"ZeroOptimizer: {name}_group is of ranks {ranks}, group of ranks {down}; "
            f"they must have only rank {rank} in "
            "common: take both from one pyops.mesh.Mesh, group=mesh.group('dp'), "
            f"{name}_group=mesh.group('{name}')"
        )

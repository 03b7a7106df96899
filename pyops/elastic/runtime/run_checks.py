"""What must hold of an elastic run before it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from pyops.comm.agreement import check_same
from pyops.elastic.config import ElasticConfig, ElasticData, ElasticRun
from pyops.pipeline import Profile
from pyops.protocols import PrunedParameter

__all__ = ["check_agreed", "check_run", "layer_costs", "plain", "why_not_moved"]

SCHEDULES = ("1f1b", "gpipe")


def check_run(
    layers: Mapping[str, nn.Module],
    *,
    data: ElasticData,
    config: ElasticConfig,
    run: ElasticRun,
    ranks: int,
    has_initialize: bool,
    has_policy: bool = False,
) -> None:
    """Checks the arguments of Elastic, before anything is communicated.

    Raises:
        ValueError: for numbers that can't be or don't fit each other, a cache beside a context,
            parameters that are of two
            layers, not to be trained, pruned, or given values by nothing, layers on another device,
            and norms over the rows of a batch.
    """
    if len(layers) < 3:
        raise ValueError(
            f"layers has {len(layers)} layers; give an embedding, blocks, and a head: 3 or more"
        )
    if run.context < 1 or ranks % run.context:
        raise ValueError(
            f"context is {run.context}, of which {ranks} ranks are no multiple; start a multiple, "
            "or take a divisor"
        )
    if run.context > 1 and (config.cache == "on" or run.cache is not None):
        raise ValueError(
            f"context is {run.context}, and a cache would hold parts of samples that other ranks "
            'need at the same time; give cache="off" and leave ElasticRun(cache=) out'
        )
    _check_tensor(run, ranks=ranks, has_policy=has_policy)
    ranks //= run.context * run.tensor
    _check_stages(run.stages, ranks=ranks, num_layers=len(layers))
    if run.schedule not in SCHEDULES:
        raise ValueError(
            f"schedule is {run.schedule!r}; it must be 1f1b or gpipe, which go with any number of "
            "stages"
        )
    replicas = ranks // run.stages
    if data.batch < replicas:
        raise ValueError(
            f"batch is {data.batch}, fewer than the {replicas} replicas; take {replicas} or more"
        )
    if config.batch_policy == "replica" and data.batch % replicas:
        raise ValueError(
            f"batch is {data.batch}, which {replicas} replicas can't share evenly, but "
            f"batch_policy is 'replica', which gives each as many; take a multiple of {replicas}"
        )
    for what, value, least in (
        ("terms", data.terms, 1),
        ("chunk", 1 if run.chunk is None else run.chunk, 1),
        ("held_out", data.held_out, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{what} is {value!r}; it must be a whole number, {least} or more")
    if run.max_grad_norm is not None and not run.max_grad_norm > 0:
        raise ValueError(
            f"max_grad_norm is {run.max_grad_norm}; it must be more than 0, or None, which clips "
            "nothing"
        )
    if not run.idle_timeout > 0:
        raise ValueError(
            f"idle_timeout is {run.idle_timeout}; it must be a number of seconds, more than 0"
        )
    for name, layer in layers.items():
        _check_norms(name, layer)
    _check_tensors(layers, device=torch.device(run.device), has_initialize=has_initialize)


def _check_tensor(run: ElasticRun, *, ranks: int, has_policy: bool) -> None:
    if run.tensor < 1 or ranks % run.tensor:
        raise ValueError(
            f"tensor is {run.tensor}, of which {ranks} ranks are no multiple; start a multiple, "
            "or take a divisor"
        )
    if run.tensor == 1:
        return
    for what, value in (("stages", run.stages), ("context", run.context)):
        if value > 1:
            raise ValueError(
                f"tensor is {run.tensor}, and {what} {value}; ranks that share weights share out "
                f"nothing else: set {what} to 1, or tensor"
            )
    if has_policy:
        raise ValueError(
            f"tensor is {run.tensor}, and a policy freezes layers, which then go to other ranks as "
            'they are; give policy=None and ElasticConfig(freeze="none"), or tensor=1'
        )


def _check_stages(stages: int, *, ranks: int, num_layers: int) -> None:
    if stages < 1 or ranks % stages:
        raise ValueError(
            f"stages is {stages}, of which {ranks} ranks are no multiple; start a multiple, or "
            "take a divisor"
        )
    if stages > num_layers:
        raise ValueError(
            f"stages is {stages}, but there are {num_layers} layers; take {num_layers} or fewer"
        )


def _check_tensors(
    layers: Mapping[str, nn.Module], *, device: torch.device, has_initialize: bool
) -> None:
    """What `check_run` says of parameters and buffers."""
    if (problem := why_not_moved(layers)) is not None:
        raise problem
    owner: dict[int, str] = {}
    for name, layer in layers.items():
        for own, parameter in layer.named_parameters():
            if (first := owner.setdefault(id(parameter), name)) != name:
                raise ValueError(
                    f"{name}.{own} is a parameter of {first} too, which may be frozen "
                    "before it; give each its own"
                )
            if not parameter.requires_grad:
                raise ValueError(
                    f"{name}.{own} has requires_grad False, but active layers are "
                    "trained whole; register it as a buffer, or "
                    "set requires_grad"
                )
        for own, tensor in layer.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor) and (first := owner.setdefault(id(tensor), name)) != name:
                raise ValueError(
                    f"{name}.{own} is a buffer of {first} too, and goes where either "
                    "goes; register it with "
                    "persistent=False, or give each its own"
                )
        for own, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            if tensor.is_meta and not has_initialize:
                raise ValueError(
                    f"{name}.{own} is on the meta device, and nothing gives it values; "
                    "give callbacks=ElasticCallbacks(initialize=...), a function of a layer's "
                    "name and the layer that fills its parameters and buffers"
                )
            other = tensor.device.type != device.type or device.index not in (
                None,
                tensor.device.index,
            )
            if other and not tensor.is_meta:
                raise ValueError(
                    f"{name}.{own} is on {tensor.device}, but device is {device}; move "
                    "it, or give run=ElasticRun(device=...)"
                )


def why_not_moved(layers: Mapping[str, nn.Module]) -> ValueError | None:
    """What forbids that layers go to other ranks: masks of pruning, which would be left behind.

    Args:
        layers: By name.
    """
    for name, layer in layers.items():
        for own, parameter in layer.named_parameters():
            if isinstance(parameter, PrunedParameter):
                return ValueError(
                    f"{name}.{own} has masks of pruning, which do not follow a layer to other "
                    "ranks, where pruned weights would grow again; call release() of its masks, "
                    "and prune after the elastic run"
                )
    return None


def _check_norms(name: str, layer: nn.Module) -> None:
    """What `check_run` says of norms over the rows of a batch.

    The rows that fill up a batch would count in its statistics, and replicas' running statistics
    would drift apart.
    """
    for own, module in layer.named_modules(prefix=name):
        if isinstance(module, _BatchNorm) or (
            isinstance(module, _NormBase) and module.track_running_stats
        ):
            raise ValueError(
                f"{own} is a {type(module).__name__}, whose statistics would change with the "
                "layout and with the rows that fill up a batch; use a norm over a row's own "
                "values, such as LayerNorm or GroupNorm"
            )


def layer_costs(run: ElasticRun, layers: Mapping[str, nn.Module]) -> Profile | Sequence[float]:
    """What each layer costs: `run.costs`, or the number of its parameters.

    Args:
        run: Of the layers.
        layers: All of the model, by name.
    """
    if run.costs is not None:
        return run.costs
    return [float(sum(p.numel() for p in layer.parameters())) for layer in layers.values()]


def check_agreed(
    options: Mapping[str, Any],
    *,
    layers: Mapping[str, nn.Module],
    group: dist.ProcessGroup | None = None,
) -> None:
    """ValueError on every rank, with both values, for an option or a layer that differs between
    ranks. A collective.

    Args:
        options: Plain values. Of layers the names, and the names, shapes and dtypes of their
            parameters count.
    """
    described = {name: repr(value) for name, value in options.items()}
    for name, layer in layers.items():
        several = [
            f"{own} {[*p.shape]} {str(p.dtype).removeprefix('torch.')}"
            for own, p in layer.named_parameters()
        ]
        described[f"layer {name}"] = ", ".join(several) or "no parameters"
    check_same(described, group=group)


def plain(made: object) -> dict[str, Any]:
    """The options with which it was made, as far as ranks can compare them: public attributes that
    are numbers, text or dtypes. Of a function or another object each rank has its own."""
    public = {
        name: value
        for name, value in getattr(made, "__dict__", {}).items()
        if not name.startswith("_")
    }
    return {
        name: value
        for name, value in public.items()
        if isinstance(value, Number | str | torch.dtype)
    }

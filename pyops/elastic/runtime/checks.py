"""What must hold of an elastic run before it begins."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from pyops.comm.agreement import gather
from pyops.mesh import check_initialized

__all__ = ["check_agreed", "check_run", "plain"]

SCHEDULES = ("1f1b", "gpipe")


def check_run(
    layers: Mapping[str, nn.Module],
    *,
    ranks: int,
    stages: int,
    batch: int,
    every: int,
    schedule: str,
    has_initialise: bool,
    batch_policy: str,
    terms: int,
    chunk: int | None,
    held_out: int,
    max_grad_norm: float | None,
    idle_timeout: float,
    device: torch.device,
) -> None:
    """ValueError for numbers that can't be or don't fit each other, parameters that are of two
    layers, not to be trained, or given values by nothing, layers on another device, and norms over
    the rows of a batch."""
    check_initialized("Elastic")
    if len(layers) < 3:
        raise ValueError(
            f"there are {len(layers)} layers; give an embedding, blocks, and a head: 3 or more"
        )
    if stages < 1 or ranks % stages:
        raise ValueError(
            f"stages is {stages}, of which {ranks} ranks are no multiple; start a "
            "multiple, or take a divisor"
        )
    if stages > len(layers):
        raise ValueError(
            f"stages is {stages}, but there are {len(layers)} layers; take {len(layers)} or fewer"
        )
    if every < 0:
        raise ValueError(
            f"every is {every}; it must be 0, for a decision at the end of each epoch, "
            "or a number of steps"
        )
    if schedule not in SCHEDULES:
        raise ValueError(
            f"schedule is {schedule!r}; it must be 1f1b or gpipe, which go with any "
            "number of stages"
        )
    if batch < ranks // stages:
        raise ValueError(
            f"batch is {batch}, fewer than the {ranks // stages} replicas; take "
            f"{ranks // stages} or more"
        )
    replicas = ranks // stages
    if batch_policy == "replica" and batch % replicas:
        raise ValueError(
            f"batch is {batch}, which {replicas} replicas can't share evenly, but "
            "batch_policy 'replica' gives each as many; "
            f"take a multiple of {replicas}"
        )
    for what, value, least in (
        ("terms", terms, 1),
        ("chunk", 1 if chunk is None else chunk, 1),
        ("held_out", held_out, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{what} is {value!r}; it must be a whole number, {least} or more")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(
            f"max_grad_norm is {max_grad_norm}; it must be more than 0, or None, which "
            "clips nothing"
        )
    if not idle_timeout > 0:
        raise ValueError(
            f"idle_timeout is {idle_timeout}; it must be a number of seconds, more than 0"
        )
    _check_layers(layers, device=device, has_initialise=has_initialise)


def _check_layers(
    layers: Mapping[str, nn.Module], *, device: torch.device, has_initialise: bool
) -> None:
    """What `check_run` says of parameters, buffers and norms."""
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
            if tensor.is_meta and not has_initialise:
                raise ValueError(
                    f"{name}.{own} is on the meta device, and nothing gives it values; "
                    "give initialise=, a function of a "
                    "layer's name and the layer that fills its parameters and buffers"
                )
            other = tensor.device.type != device.type or device.index not in (
                None,
                tensor.device.index,
            )
            if other and not tensor.is_meta:
                raise ValueError(
                    f"{name}.{own} is on {tensor.device}, but device is {device}; move "
                    "it, or give device="
                )
        for own, module in layer.named_modules(prefix=name):
            # The rows that fill up a batch would count in its statistics; replicas' running ones
            # would drift apart.
            if isinstance(module, _BatchNorm) or (
                isinstance(module, _NormBase) and module.track_running_stats
            ):
                raise ValueError(
                    f"{own} is a {type(module).__name__}, whose statistics would change "
                    "with the layout and with the rows that "
                    "fill up a batch; use a norm over a row's own values, such as "
                    "LayerNorm or GroupNorm"
                )


def check_agreed(
    options: Mapping[str, Any],
    *,
    layers: Mapping[str, nn.Module],
    group: dist.ProcessGroup | None = None,
) -> None:
    """ValueError on every rank, with both values, for an option or a layer that differs between
    ranks. A collective.

    options: plain values. Of layers the names, and the names, shapes and dtypes of their parameters
    count.
    """
    card = {name: repr(value) for name, value in options.items()}
    for name, layer in layers.items():
        several = [
            f"{own} {[*p.shape]} {str(p.dtype).removeprefix('torch.')}"
            for own, p in layer.named_parameters()
        ]
        card[f"layer {name}"] = ", ".join(several) or "no parameters"
    cards = gather(card, group=group)
    for rank, other in enumerate(cards):
        for name in {**cards[0], **other}:
            first, second = cards[0].get(name, "not there"), other.get(name, "not there")
            if first != second:
                raise ValueError(
                    f"{name} is {first} on rank 0, but {second} on rank {rank}; give all "
                    "ranks the same"
                )


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

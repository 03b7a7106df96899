"""A ZeroOptimizer and its model in a loop of Accelerate, which then neither wraps the model nor
moves it.

    model.to(accelerator.device)          before the ZeroOptimizer is made
    zero = ZeroOptimizer(model, AdamW, ZeroConfig(stage=2))     reduces gradients itself
    prepare(accelerator, model, zero)     autocast, loss scale and accumulation are Accelerate's

Moves come first: in torch one from `cpu` to `cpu:0`, as Accelerate calls it, is a copy, after which
parameters lie elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, NoReturn

from torch import nn

from pyops.mesh import resolve
from pyops.precision import LossScale
from pyops.zero import ZeroOptimizer

__all__ = ["check_accelerator", "prepare"]

KINDS = ("NO", "MULTI_CPU", "MULTI_GPU")


class NoSync:
    """model.no_sync() as Accelerate calls it where gradients are accumulated. It is gone from
    copies of the model."""

    def __init__(self, optimizer: ZeroOptimizer | None = None) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def __call__(self) -> AbstractContextManager[None]:
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None or optimizer.closed:  # gone, or closed
            return nullcontext()
        return optimizer.no_sync()

    def __reduce__(self) -> tuple[type[NoSync], tuple[()]]:
        return NoSync, ()


def _state_dict() -> NoReturn:
    raise RuntimeError(
        "this rank has only its part of the optimizer's states, and Accelerate would "
        "save rank 0's alone: call "
        'pyops.checkpoint.save(folder, {"model": zero.model_state_dict(), "optimizer": '
        "zero.state_dict()}) on every rank, with "
        "the ZeroOptimizer that you made (docs/zero.md, Saving and loading)"
    )


def _load_state_dict(state: Mapping[str, Any]) -> NoReturn:
    raise RuntimeError(
        "Accelerate has no states of a ZeroOptimizer; load what pyops.checkpoint.save has written: "
        "state, _ = pyops.checkpoint.load(folder, lazy=True), then "
        "load_model_state_dict(state['model']) and "
        "load_state_dict(state['optimizer']) of the ZeroOptimizer that you made"
    )


def check_accelerator(accelerator: Any) -> None:
    """ValueError for an Accelerator that shares the model out itself, or compiles it."""
    kind = accelerator.distributed_type.name
    if kind not in KINDS:
        raise ValueError(
            f"ZeroOptimizer: this Accelerator is {kind}, which shares out the model by "
            f"itself; use {' or '.join(KINDS[1:])}, "
            "without a DeepSpeed, FSDP or Megatron plugin"
        )
    if getattr(accelerator, "parallelism_config", None) is not None:
        raise ValueError(
            "ZeroOptimizer: this Accelerator has a parallelism_config, which cuts the "
            "model too; leave it out"
        )
    if accelerator.state.dynamo_plugin.backend.name != "NO":
        raise ValueError(
            "ZeroOptimizer: this Accelerator compiles the model into another module; "
            "leave torch.compile out of its options "
            "(torch_compile=False, dynamo_backend='no'), and call model.compile() yourself"
        )


def _check(accelerator: Any, model: Any, optimizer: Any, *, scales_loss: bool) -> None:
    check_accelerator(accelerator)
    if not isinstance(optimizer, ZeroOptimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; expected a "
            "pyops.zero.ZeroOptimizer of the model; others go to "
            "accelerator.prepare()"
        )
    if model is not optimizer.model:
        raise ValueError(
            f"model is a {type(model).__name__} and not the "
            f"{type(optimizer.model).__name__} that the ZeroOptimizer is of; "
            "give the model itself: nothing wraps it, before or afterwards"
        )
    group = resolve(optimizer.group, "prepare")
    ranks = 1 if group is None else group.size()
    if optimizer.tensor_parallel is not None:
        ranks *= optimizer.tensor_parallel.communicator.size
    if ranks != accelerator.num_processes:
        raise ValueError(
            f"the ZeroOptimizer is of {ranks} ranks, and Accelerate shares the data out "
            f"among {accelerator.num_processes}; "
            "leave group= out, and start all processes with torchrun"
        )
    if optimizer.config.reduction != "mean":
        raise ValueError(
            "ZeroOptimizer: reduction='sum', and loops of Accelerate expect the mean of "
            "gradients over ranks; leave it out"
        )
    if optimizer.loss_scale is not None and not scales_loss:
        raise ValueError(
            "ZeroOptimizer: its precision is scaled, and accelerator.backward() does not "
            "know of its loss scale; take precision='bf16', or "
            "Accelerator(mixed_precision='fp16') and no precision; or call "
            "accelerator.backward(optimizer.scale(loss.float())), and prepare(scales_loss=True)"
        )


def _note_skips(prepared: Any, scale: LossScale) -> None:
    """Let an AcceleratedOptimizer say of each step whether it was skipped."""
    step = prepared.step

    def noting(self: Any, closure: Any = None) -> None:
        before = scale.skipped
        step(closure)
        self._is_overflow = scale.skipped > before

    prepared.step = MethodType(noting, prepared)  # of which torch's schedulers take the function


def prepare(
    accelerator: Any, model: nn.Module, optimizer: ZeroOptimizer, *, scales_loss: bool = False
) -> tuple[nn.Module, Any]:
    """(model, optimizer) for a loop of Accelerate, in place of `accelerator.prepare(model,
    optimizer)`.

    `accelerator.accumulate(model)` sends nothing before the last of its backwards at stages 0 and
    1. At stages 2 and 3 each backward is reduced, so that no rank keeps whole gradients.

    Args:
        model: It comes back itself, with Accelerate's autocast on its forward.
        optimizer: Of this model; it comes back as an AcceleratedOptimizer, which steps where
            gradients are complete. Data loaders and schedulers go to accelerator.prepare().
        scales_loss: Whether the loop multiplies the loss by the optimizer's loss scale, as
            `accelerator.backward(optimizer.scale(loss.float()))` does: only then may its precision
            be scaled. Steps that overflow count as skipped, so that no schedule goes on.

    Raises:
        ValueError, TypeError: Before anything is changed, for an Accelerator of DeepSpeed, FSDP,
            Megatron or one that compiles, another model than the optimizer's, a group that is not
            of all of Accelerate's processes, reduction="sum" and a scaled precision. Its
            state_dict() raises RuntimeError, since `accelerator.save_state()` would write rank 0's
            part alone.
    """
    _check(accelerator, model, optimizer, scales_loss=scales_loss)
    accelerator.prepare_model(model, evaluation_mode=True, device_placement=False)
    if optimizer.stage < 2:
        model.no_sync = NoSync(optimizer)  # type: ignore[assignment]
    prepared = accelerator.prepare_optimizer(optimizer, device_placement=False)
    prepared.state_dict, prepared.load_state_dict = _state_dict, _load_state_dict
    prepared._is_accelerate_prepared = True
    if optimizer.loss_scale is not None:
        _note_skips(prepared, optimizer.loss_scale)
    return model, prepared

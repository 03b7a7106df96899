"""What an optimizer refuses, and what it says then: every mistake is found before anything is
changed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyops.flat.dtensor import check_placements, first_element, is_dtensor, local_of, placed_alike
from pyops.ops.memory import memory_problem
from pyops.optim.fused.memory_layout import has_overlap, is_dense, overlapping
from pyops.torch_private import is_traceable_wrapper_subclass

__all__ = [
    "DTYPES",
    "check_gradient",
    "check_gradients_apart",
    "check_hyperparameters",
    "check_number",
    "check_numbered",
    "check_parameter",
    "check_settings",
    "check_switch",
    "is_unresolved",
    "memory_of",
    "name_of",
    "number",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NONNEGATIVE = ("eps", "weight_decay", "momentum", "lr_decay", "initial_accumulator_value")
SWITCHES = ("maximize", "amsgrad", "nesterov", "trust_ratio", "decoupled_weight_decay")


def number(value: float | Tensor) -> float | None:
    """A hyper-parameter as a number; None for a tensor on an accelerator, which can't be read
    without waiting for it."""
    if not isinstance(value, Tensor):
        return value
    return float(value) if value.device.type == "cpu" else None


def memory_of(tensor: Tensor) -> str | None:
    """What is wrong with the memory of a tensor whose elements a step walks, or None.

    It was given back (resize_(0), as sharded trainers do), is shorter than the tensor, or was never
    there (meta).
    """
    if torch.compiler.is_compiling():
        return None
    if tensor.is_meta and tensor.numel():
        return (
            "has elements but no memory: it is on meta; give it numbers (to_empty) before the step"
        )
    return memory_problem(tensor)


def is_unresolved(tensor: Tensor) -> bool:
    """Whether the tensor is a view whose sign or conjugate is still to be taken: its memory holds
    other numbers."""
    return not torch.compiler.is_compiling() and (
        tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()
    )


def instead_of(who: str) -> str:
    """What to do where the fused optimizer can't."""
    return (
        f"use torch.optim.{who}" if hasattr(torch.optim, who) else "write the step in plain torch"
    )


def name_of(group: Mapping[str, Any], index: int) -> str:
    """What a message calls a parameter: its name where the optimizer was given names."""
    param = group["params"][index]
    names = group.get("param_names")
    return (
        f"parameter {names[index]!r}"
        if names
        else f"parameter {index} of its group (shape {tuple(param.shape)})"
    )


def _is_number(value: object) -> bool:
    # Asked five times a step: the abstract class takes six times as long as the two usual types.
    return type(value) in (float, int) or (
        isinstance(value, numbers.Real) and not isinstance(value, bool)
    )


def check_hyperparameters(group: Mapping[str, Any], *, who: str) -> None:
    """Raise ValueError for a learning rate, betas, or another number out of range, or an option
    that no kernel has.

    Checks those of the hyper-parameters listed above that the group has.
    """
    _check_numbers(group, who=who)
    for key in SWITCHES:
        check_switch(group.get(key, False), name=key, who=who)
    if type(seed := group.get("seed", 0)) is not int:
        raise TypeError(f"{who}: seed={seed!r} must be a whole number, got a {type(seed).__name__}")
    if "betas" in group:
        _check_betas(group["betas"], who=who)
    _check_ranges(group, who=who)
    if group["differentiable"]:
        raise ValueError(
            f"{who}: differentiable=True has no fused kernel; {instead_of(who)} to "
            "differentiate a step"
        )
    if group["fused"] and group["foreach"]:
        raise ValueError(
            f"{who}: fused and foreach can't both be True; leave both out, the step is always fused"
        )


def _check_numbers(group: Mapping[str, Any], *, who: str) -> None:
    """TypeError for hyper-parameters that are no numbers; ValueError for a learning rate that is
    negative or not finite."""
    for key in ("lr", *NONNEGATIVE, "dampening"):
        if key in group and not isinstance(group[key], Tensor) and not _is_number(group[key]):
            raise TypeError(
                f"{who}: {key}={group[key]!r} must be a number, got a {type(group[key]).__name__}"
            )
    if isinstance(group["lr"], Tensor):
        check_tensor_number(group["lr"], name="lr", who=who)
    if (rate := number(group["lr"])) is not None and not (rate >= 0.0 and math.isfinite(rate)):
        raise ValueError(
            f"{who}: lr={rate} must be a finite number >= 0; check the schedule that computes it"
        )


def _check_ranges(group: Mapping[str, Any], *, who: str) -> None:
    """ValueError for a hyper-parameter out of its range."""
    for key in (key for key in NONNEGATIVE if key in group):
        if isinstance(group[key], Tensor):
            check_tensor_number(group[key], name=key, who=who)
        if not (group[key] >= 0.0 and math.isfinite(group[key])):
            raise ValueError(f"{who}: {key}={group[key]} must be a finite number >= 0")
    if group.get("momentum", 0.0) > 1.0:
        raise ValueError(
            f"{who}: momentum={group['momentum']} must be <= 1, such as 0.9: with more "
            "it grows without bound"
        )
    if not math.isfinite(group.get("dampening", 0.0)):
        raise ValueError(f"{who}: dampening={group['dampening']} must be a finite number")


def check_switch(value: object, *, name: str, who: str) -> None:
    """TypeError for what is not True or False: "false", say, which is true."""
    if type(value) is not bool:
        raise TypeError(f"{who}: {name}={value!r} must be True or False")


def check_tensor_number(value: Tensor, *, name: str, who: str) -> None:
    """TypeError or ValueError for a tensor that is not one real number in memory."""
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(
            f"{who}: {name} is a tensor of {value.dtype}; it must be one real number, "
            "such as torch.tensor(1e-3)"
        )
    if value.layout != torch.strided:
        raise TypeError(
            f"{who}: {name} is a tensor with layout {value.layout}; it must be one dense "
            "number, to_dense() gives it"
        )
    if value.numel() != 1:
        raise ValueError(
            f"{who}: {name} as a tensor must have 1 element, got shape {tuple(value.shape)}"
        )
    if (problem := memory_of(value)) is not None:
        raise ValueError(f"{who}: {name} {problem}")


def check_number(value: object, *, name: str, who: str) -> None:
    """TypeError for what is no number."""
    if not _is_number(value):
        raise TypeError(f"{who}: {name}={value!r} must be a number, got a {type(value).__name__}")


def _check_betas(betas: Any, *, who: str) -> None:
    if not isinstance(betas, list | tuple) or not all(
        isinstance(beta, Tensor) or _is_number(beta) for beta in betas
    ):
        raise TypeError(f"{who}: betas={betas!r} must be two numbers, such as (0.9, 0.999)")
    if len(betas) != 2:
        raise ValueError(f"{who}: betas={betas} must be two numbers, such as (0.9, 0.999)")
    for i, beta in enumerate(betas):
        if isinstance(beta, Tensor):
            check_tensor_number(beta, name=f"betas[{i}]", who=who)
        if (value := number(beta)) is None:
            raise ValueError(f"{who}: betas[{i}] is a tensor on {beta.device}; pass a Python float")
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{who}: betas[{i}]={value} must be in [0, 1)")


def check_settings(
    *,
    state_dtype: torch.dtype,
    master_weights: bool,
    stochastic_rounding: bool,
    max_grad_norm: float | None,
    zero_grad: bool,
    who: str,
) -> None:
    """Raise for a setting of the whole optimizer that makes no sense."""
    switches = {
        "master_weights": master_weights,
        "stochastic_rounding": stochastic_rounding,
        "zero_grad": zero_grad,
    }
    for name, value in switches.items():
        check_switch(value, name=name, who=who)
    if state_dtype not in DTYPES:
        raise ValueError(
            f"{who}: state_dtype={state_dtype} must be one of {[str(d) for d in DTYPES]}"
        )
    if max_grad_norm is not None and not _is_number(max_grad_norm):
        raise TypeError(f"{who}: max_grad_norm={max_grad_norm!r} must be a number or None")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(
            f"{who}: max_grad_norm={max_grad_norm} must be > 0; None turns clipping off"
        )
    if master_weights and stochastic_rounding and state_dtype == torch.float32:
        raise ValueError(
            f"{who}: stochastic_rounding has nothing to round with master_weights=True "
            "and state_dtype=torch.float32; "
            "drop one of them, or choose a 16-bit state_dtype"
        )


def check_parameter(param: Tensor, *, name: str, who: str, dtensors: bool = True) -> None:
    """Raise TypeError or ValueError for a parameter that can't be stepped: complex, integer,
    sparse, overlapping.

    Args:
        dtensors: whether this optimizer steps what a rank holds of a DTensor.
    """
    if dtensors and is_dtensor(param):
        check_placements(param, name=name, who=who)
        param = local_of(param)
    elif is_traceable_wrapper_subclass(param):
        raise TypeError(
            f"{who}: {name} is a {type(param).__name__}, whose memory the kernels can't "
            "walk; pass the local tensors, or "
            f"{instead_of(who)}"
        )
    if param.is_complex():
        raise TypeError(
            f"{who}: {name} is complex ({param.dtype}); optimize "
            "torch.view_as_real(parameter) instead"
        )
    if not param.is_floating_point():
        raise TypeError(
            f"{who}: {name} is of integers ({param.dtype}), which have no gradient; leave it out"
        )
    if param.dtype not in DTYPES:
        raise TypeError(
            f"{who}: {name} is {param.dtype}; expected float32, bfloat16 or float16; for "
            f"it {instead_of(who)}"
        )
    if param.layout != torch.strided:
        raise TypeError(
            f"{who}: {name} has layout {param.layout}; expected a dense (strided) tensor"
        )
    if (problem := memory_of(param)) is not None:
        raise ValueError(f"{who}: {name} {problem}")
    if is_unresolved(param):
        raise ValueError(
            f"{who}: {name} is a view whose sign is still to be taken (torch._neg_view, "
            "conj().imag), so that its memory holds "
            "other numbers; pass parameter.resolve_neg()"
        )
    if has_overlap(param):
        raise ValueError(
            f"{who}: {name} with strides {param.stride()} has elements that share memory "
            "(an expanded tensor?), so that a "
            "step has no meaning; pass parameter.contiguous() or the tensor it was expanded from"
        )


def check_gradient(grad: Tensor, param: Tensor, *, name: str, who: str, zeroed: bool) -> None:
    """Raise TypeError or ValueError for a gradient that doesn't fit its parameter."""
    if is_dtensor(grad) or is_dtensor(param):
        _check_gradient_placed(grad, param, name=name, who=who, zeroed=zeroed)
    if grad.layout != torch.strided:
        raise TypeError(
            f"{who}: the gradient of {name} is sparse ({grad.layout}); build the "
            "embedding with sparse=False, or use "
            "torch.optim.SparseAdam for it"
        )
    if grad.dtype not in DTYPES:
        raise TypeError(
            f"{who}: the gradient of {name} is {grad.dtype}; expected float32, bfloat16 or float16"
        )
    if grad.device != param.device:
        raise ValueError(
            f"{who}: the gradient of {name} is on {grad.device}, the parameter on "
            f"{param.device}; move one"
        )
    if grad.shape != param.shape:
        raise ValueError(
            f"{who}: the gradient of {name} has shape {tuple(grad.shape)}, the parameter "
            f"{tuple(param.shape)}"
        )
    grad = local_of(grad)
    if (problem := memory_of(grad)) is not None:
        raise ValueError(f"{who}: the gradient of {name} {problem}")
    if zeroed and has_overlap(grad):
        raise ValueError(
            f"{who}: zero_grad=True can't zero the gradient of {name}: it is expanded; "
            "pass grad.contiguous()"
        )


def check_numbered(param: Tensor, *, name: str, who: str) -> None:
    """Raise ValueError for a DTensor whose elements here are no run of the whole, for which random
    bits are drawn."""
    if is_dtensor(param) and first_element(param) is None:
        raise ValueError(
            f"{who}: stochastic_rounding draws by an element's number in the whole, and "
            f"what a rank has of {name}, placed "
            f"{tuple(param.placements)}, "  # type: ignore[attr-defined]
            "is no run of it; shard by Shard(0), or use master_weights=True"
        )


def _check_gradient_placed(
    grad: Tensor, param: Tensor, *, name: str, who: str, zeroed: bool
) -> None:
    """Raise TypeError or ValueError where one of gradient and parameter is a DTensor and they don't
    belong together."""
    if not (is_dtensor(grad) and is_dtensor(param)):
        kinds = ["a DTensor" if is_dtensor(t) else "a plain tensor" for t in (grad, param)]
        raise TypeError(
            f"{who}: the gradient of {name} is {kinds[0]}, the parameter {kinds[1]}; "
            "they must be of one kind"
        )
    if grad.device_mesh != param.device_mesh:  # type: ignore[attr-defined]
        raise ValueError(
            f"{who}: the gradient of {name} lies on another mesh than the parameter; "
            "they must lie on one"
        )
    if zeroed and not placed_alike(grad, param):
        raise ValueError(
            f"{who}: zero_grad=True can't zero the gradient of {name}, which is placed "
            f"{tuple(grad.placements)} and the "  # type: ignore[attr-defined]
            f"parameter {tuple(param.placements)}; "  # type: ignore[attr-defined]
            "leave zero_grad out, or redistribute the gradient"
        )


def check_gradients_apart(grads: Sequence[Tensor], *, who: str) -> None:
    """Raise ValueError where gradients share memory and are to be zeroed: one would be zero before
    it is read."""
    dense = [g for g in map(local_of, grads) if g.layout == torch.strided and is_dense(g)]
    if clash := overlapping(dense):
        raise ValueError(
            f"{who}: zero_grad=True, but {len(clash)} gradients share memory; give each "
            "parameter its own"
        )

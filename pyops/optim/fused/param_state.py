"""The optimizer's state of a parameter: made when first needed, mended when it is odd, cast on
load.

    state[parameter] = {"step": float32 scalar, "exp_avg": ..., "exp_avg_sq": ...,
                        ["master": float32]}

The names and meanings are torch.optim's, so that a state_dict goes both ways. The moments are of
`state_dtype`
whatever the parameter's dtype (torch keeps them in the parameter's), and `step` lies on the
parameter's device (torch keeps it on the CPU unless capturable or fused).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyops.flat.dtensor import local_of, placed_alike
from pyops.optim.fused.input_checks import DTYPES, memory_of
from pyops.optim.fused.memory_layout import lies_like

__all__ = ["cast_entry", "check_placed", "check_state", "complete_state"]


def complete_state(
    state: dict[str, Any],
    param: Tensor,
    *,
    moments: Sequence[str],
    state_dtype: torch.dtype,
    master: bool,
) -> None:
    """Add to `state` what is missing: a step of 0, moments of zeros, a master that equals the
    parameter."""
    step = state.get("step", 0.0)
    if not (
        isinstance(step, Tensor)
        and step.dtype == torch.float32
        and step.device == param.device
        and step.numel() == 1
    ):
        if isinstance(step, Tensor):
            state["step"] = step.detach().to(param.device, torch.float32).reshape(())
        # filled on the device: a copy of a number from the host would wait for all that is queued
        # there
        else:
            state["step"] = torch.full((), float(step), dtype=torch.float32, device=param.device)
    for name in moments:
        if name not in state:
            state[name] = torch.zeros_like(
                param, dtype=state_dtype, memory_format=torch.preserve_format
            )
    if master and "master" not in state:
        state["master"] = param.detach().to(
            torch.float32, memory_format=torch.preserve_format, copy=True
        )


def check_state(
    state: dict[str, Any], param: Tensor, *, moments: Sequence[str], name: str, who: str
) -> None:
    """Raise ValueError for an entry that doesn't fit its parameter. Nothing is changed."""
    step = state.get("step")
    if isinstance(step, Tensor) and step.numel() != 1:
        raise ValueError(
            f"{who}: state 'step' of {name} must be one number, got shape {tuple(step.shape)}"
        )
    dtypes = set()
    for key in (*moments, "master"):
        if (value := state.get(key)) is None:
            continue
        if not isinstance(value, Tensor) or value.shape != param.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{who}: state {key!r} of {name} is {shape}; expected a tensor of "
                f"{tuple(param.shape)}"
            )
        check_placed(value, param, what=f"state {key!r} of {name}", who=who)
        if value.device != param.device or value.dtype not in DTYPES:
            raise ValueError(
                f"{who}: state {key!r} of {name} is {value.dtype} on {value.device}; "
                "expected float32, bfloat16 or float16 "
                f"on {param.device}: state[key] = state[key].to(...)"
            )
        if (problem := memory_of(local_of(value))) is not None:
            raise ValueError(f"{who}: state {key!r} of {name} {problem}")
        if key != "master":
            dtypes.add(value.dtype)
    if len(dtypes) > 1:
        raise ValueError(
            f"{who}: moments of {name} are of {sorted(map(str, dtypes))}; convert them to one dtype"
        )


def check_placed(value: Tensor, param: Tensor, *, what: str, who: str) -> None:
    """Raise ValueError for a state that lies on a mesh otherwise than its parameter does."""
    if not placed_alike(value, param):
        raise ValueError(
            f"{who}: {what} is {_placed(value)}, the parameter {_placed(param)}; load a "
            "state_dict of another layout, or a "
            "whole one, by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )


def _placed(tensor: Tensor) -> str:
    placements = getattr(tensor, "placements", None)
    return "a plain tensor" if placements is None else f"a DTensor placed {tuple(placements)}"


def cast_entry(key: str, value: Any, param: Tensor, *, state_dtype: torch.dtype) -> Any:
    """A loaded entry as this optimizer keeps it.

    Unlike torch's own cast, 16-bit parameters keep their float32 moments and masters. Tensors of
    the right dtype and device are taken over as they are, `step` excepted: a step that several
    parameters share would be counted several times.
    """
    if key == "step":
        return (
            torch.as_tensor(value, dtype=torch.float32)
            .detach()
            .reshape(())
            .to(param.device, copy=True)
        )
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point() or value.shape != param.shape:
        return value.to(device=param.device)
    value = value.detach().to(
        device=param.device, dtype=torch.float32 if key == "master" else state_dtype
    )
    wanted = torch.empty_like(param, dtype=value.dtype, memory_format=torch.preserve_format)
    # Laid out as the parameter is, so that steps need no stand-in.
    return value if lies_like(value, wanted.stride()) else wanted.copy_(value)

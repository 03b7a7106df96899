"""run_trial: a forward and a backward of a model, and what came of them: outputs, gradients, and
the first output of each module. An fp64 model computes everything in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pyops.flat import Placement
from pyops.tensor_parallel.convert.check.example_inputs import Inputs

__all__ = ["TrialRun", "placed", "run_trial"]


@dataclass
class TrialRun:
    """What came of a forward and a backward."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]  # in float32: the check's bounds are wider than its rounding
    within: dict[str, Tensor] = field(default_factory=dict)  # the first output of each module


class _Wide(TorchFunctionMode):
    """What a model computes or makes in fp32, whatever its own dtype, is in fp64: roundings hide no
    errors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = {Tensor.float: Tensor.double, functional.grouped_mm: _grouped}.get(func, func)
        if (
            func is torch.full
            and not (kwargs or {}).get("dtype")
            and any(isinstance(a, float) for a in args)
        ):
            kwargs = {**(kwargs or {}), "dtype": torch.float64}
        found = func(
            *map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()}
        )
        made = (
            type(found) is Tensor
            and found.dtype == torch.float32
            and not getattr(func, "__name__", "_").endswith("_")
        )
        return found.double() if made else found


def _grouped(
    a: Tensor, b: Tensor, *, offs: Tensor, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """torch.nn.functional.grouped_mm of rows by expert, which has no fp64."""
    rows = torch.tensor_split(a, offs.long()[:-1].cpu())
    products = [
        each @ matrix if bias is None else each @ matrix + bias[i]
        for i, (each, matrix) in enumerate(zip(rows, b, strict=True))
    ]
    return torch.cat(products)


def run_trial(
    model: nn.Module, inputs: Inputs, dtype: torch.dtype, finish: Callable[[], None] = lambda: None
) -> TrialRun:
    """Forward and backward of a sum of all outputs, each number with a weight of its own.

    Args:
        model: The uncut one, or a rank's part of it.
        inputs: Of its forward.
        dtype: Of its parameters.
        finish: Called between backward and the reading of gradients that are summed afterwards.

    Raises:
        ValueError: An output is not a number, or none has gradients.
    """
    within: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(_keep(name, within))
        for name, module in model.named_modules()
        if name
    ]
    model.requires_grad_(True)
    gradients: dict[str, Tensor] = {}
    handles += [
        p.register_post_accumulate_grad_hook(_narrow(name, gradients))
        for name, p, partial in _with_partial(model)
        if not partial
    ]
    try:
        if dtype == torch.float64:
            with _Wide():
                outputs = _named_tensors(model(*inputs[0], **inputs[1]))
        else:
            outputs = _named_tensors(model(*inputs[0], **inputs[1]))
        loss = _weighted(outputs)
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    finish()
    for name, p in model.named_parameters():
        if p.grad is not None:
            _narrow(name, gradients)(p)
    return TrialRun({name: each.detach() for name, each in outputs.items()}, gradients, within)


def _with_partial(model: nn.Module) -> list[tuple[str, nn.Parameter, bool]]:
    """(name, parameter, whether its gradient is a part, which is summed after backward)."""
    partial = {name: place is not None and place.partial for name, _, place in placed(model)}
    return [(name, p, partial[name]) for name, p in model.named_parameters()]


def _narrow(name: str, gradients: dict[str, Tensor]) -> Callable[[Tensor], None]:
    """Keeps a gradient with half its bytes, for as many as a model has are there at a time."""

    def hook(p: Tensor) -> None:
        assert p.grad is not None
        found, p.grad = p.grad.float(), None
        gradients[name] = gradients[name] + found if name in gradients else found

    return hook


def _keep(name: str, within: dict[str, Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        found = next(iter(_named_tensors(output).values()), None)
        if found is not None:
            within.setdefault(name, found.detach())

    return hook


def _weighted(outputs: dict[str, Tensor]) -> Tensor:
    parts = []
    for i, (name, each) in enumerate(outputs.items()):
        if each.isnan().any():
            raise ValueError(f"its output {name} is not a number")
        if each.requires_grad:
            weights = torch.randn(
                each.shape, generator=torch.Generator().manual_seed(i), dtype=each.dtype
            )
            parts.append((weights * each.masked_fill(each.isinf(), 0.0)).sum())
    if not parts:
        raise ValueError("none of its outputs is a tensor that has gradients")
    return torch.stack(parts).sum()


def _named_tensors(output: Any, name: str = "") -> dict[str, Tensor]:
    """Floating-point tensors within mappings and sequences, by their path."""
    if isinstance(output, Tensor):
        return {name or "output": output} if output.is_floating_point() else {}
    found: dict[str, Tensor] = {}
    if isinstance(output, dict):
        for key, value in output.items():
            found.update(_named_tensors(value, f"{name}.{key}" if name else str(key)))
    elif isinstance(output, tuple | list):
        for i, value in enumerate(output):
            found.update(_named_tensors(value, f"{name}[{i}]"))
    return found


def placed(part: nn.Module) -> list[tuple[str, nn.Module | None, Placement | None]]:
    """(name, the module whose placement it has, placement) of all parameters."""
    holders: dict[int, tuple[nn.Module, Placement]] = {}
    for module in part.modules():
        for key, place in getattr(module, "placements", {}).items():
            holders.setdefault(id(module.get_parameter(key)), (module, place))
    return [(key, *holders.get(id(p), (None, None))) for key, p in part.named_parameters()]

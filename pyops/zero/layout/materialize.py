"""Models that were built on the meta device get their memory and first values, one part of the
model at a time.

    with torch.device("meta"): model = GPT(...)        no memory at all
    part by part: memory -> first values -> rank 0's values -> each rank keeps its chunk -> memory
    of the part is free again

So a model need not fit into one process, as long as each of its parts does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

__all__ = [
    "Initialize",
    "adopt",
    "device_for",
    "initialize_modules",
    "is_out_of_memory",
    "materialize_buffers",
    "on_meta",
]

Initialize = Callable[[nn.Module], None]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch has a class of its own for that on CUDA alone."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in (
        str(error)
    )


def on_meta(module: nn.Module) -> bool:
    """Whether the module itself, not a child, has a parameter or buffer without memory."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(tensor.is_meta for tensor in own)


def device_for(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Where parameters on meta get their memory: `device`, or that of the model's other tensors, or
    the CPU."""
    if device is not None:
        return torch.device(device)
    real = [t.device for t in [*model.parameters(), *model.buffers()] if not t.is_meta]
    return real[0] if real else torch.device("cpu")


def check_initialize(model: nn.Module, initialize: Initialize | None) -> None:
    """ValueError for a module on meta that nothing gives values to."""
    if initialize is not None:
        return
    for name, module in model.named_modules():
        if on_meta(module) and not callable(getattr(module, "reset_parameters", None)):
            raise ValueError(
                f"ZeroOptimizer: {name or 'the model'} ({type(module).__name__}) is on "
                "the meta device and has no "
                "reset_parameters(); pass initialize=, a function of a module that fills "
                "its own parameters and buffers"
            )


def adopt(parameter: nn.Parameter, view: Tensor) -> None:
    """Make the parameter a view: with its values, or without any where it was on meta. It stays the
    same object."""
    if parameter.is_meta:
        torch.utils.swap_tensors(
            parameter, nn.Parameter(view, requires_grad=parameter.requires_grad)
        )
        return
    view.copy_(parameter)
    before, parameter.grad = (
        parameter.grad,
        None,
    )  # a gradient of other strides would keep .data from being set
    parameter.data = view
    if before is not None:
        parameter.grad = before.contiguous()


def materialize_buffers(module: nn.Module, device: torch.device) -> None:
    """Memory for the module's own buffers on meta."""
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)


def initialize_modules(modules: Iterable[nn.Module], initialize: Initialize | None) -> None:
    """First values of modules that were on meta and have memory now."""
    for module in modules:
        if initialize is not None:
            initialize(module)
        else:
            module.reset_parameters()  # type: ignore[operator]  # check_initialize saw it

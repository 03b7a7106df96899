"""The device on which a test makes its tensors without naming it, with the CPU's random numbers.

`torch.device` as a context alone refuses a generator of the CPU: whatever is drawn with one is
drawn on the CPU, and moved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["default_device"]


class _DrawnOnTheCPU(TorchFunctionMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        generator = kwargs.get("generator")
        of_cpu = isinstance(generator, torch.Generator) and generator.device.type == "cpu"
        given = next((a for a in args if isinstance(a, Tensor)), None)
        if not of_cpu or (given is not None and given.device.type == "cpu"):
            return func(*args, **kwargs)
        if given is not None:  # in place, or a sample of what is there
            on_cpu = [a.cpu() if isinstance(a, Tensor) else a for a in args]
            drawn = func(*on_cpu, **kwargs)
            if not func.__name__.endswith("_"):
                return drawn.to(given.device)
            with torch.no_grad():
                return given.copy_(on_cpu[0])
        device = torch.device(kwargs.pop("device", None) or self.device)
        wants_grad = kwargs.pop("requires_grad", False)
        return func(*args, **kwargs, device="cpu").to(device).requires_grad_(wants_grad)


@contextlib.contextmanager
def default_device(device: torch.device | str) -> Iterator[None]:
    """A context in which tensors are made on `device`."""
    device = torch.device(device)
    if device.type == "cpu":
        yield
        return
    with torch.device(device), _DrawnOnTheCPU(device):
        yield

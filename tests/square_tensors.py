"""SquareTensors: which operators make a tensor of queries x keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["SquareTensors"]


class SquareTensors(TorchDispatchMode):
    """Within, notes operators that make a tensor of `length` x `length` or more numbers in its last
    two dimensions.

    Attributes:
        found: Their names, and the shapes.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.found = length, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            sides = each.shape[-2:] if isinstance(each, Tensor) and each.dim() > 1 else (0,)
            if min(sides) >= self.length:
                self.found.add(f"{func} {list(each.shape)}")
        return result

"""SquareTensors: which operators make a tensor of queries x keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["SquareTensors"]


class SquareTensors(TorchDispatchMode):
    """Within, notes operators that make a tensor of `length` x `length` or more numbers in its last
    two dimensions; not those that repeat a smaller one by a stride of 0.

    Attributes:
        found: Their names, and the shapes.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.found = length, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if not isinstance(each, Tensor) or each.dim() < 2 or 0 in each.stride()[-2:]:
                continue
            if min(each.shape[-2:]) >= self.length:
                self.found.add(f"{func} {list(each.shape)}")
        return result

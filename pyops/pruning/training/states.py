"""What an optimizer keeps of pruned weights, set to 0: moments, momentum, masters.

With a weight of 0, states of 0 and a gradient of 0 every optimizer here leaves the weight at 0:
Adam's update is 0 / (sqrt(0) + eps), Lion's sign(0), decay is a multiple of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyops.ops.sparse.radix_count import keep_bits_
from pyops.protocols import CommunicatingOptimizer

__all__ = ["check_optimizer", "check_optimizer_kind", "keep", "keep_states"]

FACTORED = frozenset(["row_var", "col_var"])  # sums over rows and columns, of no one weight


def check_optimizer_kind(optimizer: object) -> None:
    """Raise TypeError for what is no optimizer.

    Args:
        optimizer: Any.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; give the one that trains the model"
        )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError or ValueError for an optimizer under which pruned weights would not stay
    0."""
    check_optimizer_kind(optimizer)
    if isinstance(optimizer, CommunicatingOptimizer):
        raise TypeError(
            f"{type(optimizer).__name__} sends signs, and a sign can't say 0: pruned weights would "
            "move. Use an optimizer of pyops.optim with DataParallel or ZeroOptimizer, and for few "
            "bytes a codec of DataParallel"
        )
    for number, group in enumerate(optimizer.param_groups):
        eps = group.get("eps", 1.0)
        if isinstance(eps, int | float) and eps == 0.0:
            raise ValueError(
                f"eps is 0 in group {number} of {type(optimizer).__name__}: a pruned weight's "
                "update would be 0 / 0; give an eps above 0, such as 1e-8"
            )


@torch.no_grad()
def keep(tensor: Tensor, bits: Tensor) -> None:
    """Set to 0 what has no bit, whatever the tensor's strides.

    Args:
        tensor: Any dense tensor.
        bits: uint8, one bit for each element in row-major order.
    """
    if not tensor.numel():
        return
    if tensor.is_contiguous():
        keep_bits_([tensor], [bits.to(tensor.device)])
        return
    copy = tensor.contiguous()
    keep_bits_([copy], [bits.to(tensor.device)])
    tensor.copy_(copy)


def keep_states(state: Mapping[str, Any], parameter: nn.Parameter, bits: Tensor) -> None:
    """Set to 0 what a parameter's states hold for pruned weights.

    Args:
        state: An entry of `optimizer.state`.
        parameter: The one that is stepped.
        bits: Of its elements.
    """
    for name, value in state.items():
        if (
            isinstance(value, Tensor)
            and name not in FACTORED
            and value.shape == parameter.shape
            and value.is_floating_point()
        ):
            keep(value, bits)

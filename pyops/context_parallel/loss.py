"""A loss over tokens that ranks share out: sums and counts are added, and divided once.

rank 0   sum 12.0 of 5 tokens --.
                                 +-- 19.0 / 8, the same on both; the gradient of each rank's sum
rank 1   sum  7.0 of 3 tokens --'    is 1 / 8, and gradients are summed over the ranks
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.comm.agreement import gather_numbers
from pyops.mesh import ProcessGroupLike

__all__ = ["token_mean"]


def token_mean(total: Tensor, count: Tensor | float, *, group: ProcessGroupLike = None) -> Tensor:
    """The mean over the tokens of all ranks. Collective.

    Backward gives each rank the gradient of its own summand, divided by the tokens of all ranks:
    sum gradients over the same ranks (`DataParallel(reduction="sum")`), and divide no more. Ranks
    may have different numbers of tokens, or none.

    Args:
        total: A tensor of one number, the sum of the losses of this rank's tokens.
        count: How many of them count.
        group: The ranks of data and context parallelism together, mesh.group(("dp", "cp")); None
            for the default group, or one process; pyops.mesh.ALONE.

    Returns:
        A tensor of one number, in the dtype of `total`, the same on every rank.

    Raises:
        ValueError: `total` is not one number, or no token of any rank counts.
    """
    if total.numel() != 1:
        raise ValueError(
            f"token_mean: total has the shape {list(total.shape)}; give the sum over this rank's "
            "tokens, one number"
        )
    found: Tensor = _TokenMean.apply(total, float(count), group)  # type: ignore[no-untyped-call]
    return found


class _TokenMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: float, group: ProcessGroupLike) -> Tensor:
        everyone = gather_numbers([float(total), count], device=total.device, group=group)
        ctx.count = sum(each[1] for each in everyone)
        if not ctx.count:
            raise ValueError(
                "token_mean: no token of any rank counts; leave out rows whose targets are all -100"
            )
        return total.new_tensor(sum(each[0] for each in everyone) / ctx.count).view(total.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy / ctx.count, None, None

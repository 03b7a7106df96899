"""The 2-norm of gradients whose disjoint parts lie on several ranks.

    rank 0   sum of squares of its part   s0 --.
                                               all-reduce -> s0 + s1 -> norm, the same bits on both
    rank 1   sum of squares of its part   s1 --'

Which tensors a rank counts is the caller's affair: an element that several ranks hold alike is
counted by one of them. All sums are float64, in an order that does not depend on timing, and stay
on the gradients' device: nothing here waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_reduce
from pyops.comm.collectives.work import Work
from pyops.ops.library import has_kernel
from pyops.ops.optimizers.grad_norm import CLIP_EPSILON, squared_norm

__all__ = ["RankSum", "clip_factor", "grad_norm", "squares_of_each", "sum_of_squares"]

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class RankSum(Protocol):
    """Ranks over which a tensor can be summed, such as `pyops.tensor_parallel`'s."""

    def sum_(self, x: Tensor) -> Work:
        """x becomes the sum over the ranks, in place."""


def _has_kernel(gradient: Tensor) -> bool:
    """Whether the fused kernel takes the tensor as it lies in memory."""
    return (
        gradient.layout == torch.strided
        and gradient.dtype in KERNEL_DTYPES
        and gradient.is_contiguous()
        and (gradient.device.type == "cpu" or has_kernel("squared_norm", gradient.device.type))
    )


@torch.no_grad()
def sum_of_squares(
    gradients: Iterable[Tensor], *, device: torch.device | str | None = None
) -> Tensor:
    """The sum of squares of this rank's gradients, and how many of their elements are not finite.

    Args:
        gradients: Any dtypes and devices; empty tensors count nothing.
        device: Of the result; None for the default device.

    Returns:
        float64 [2]: the sum of squares, the number of elements that are inf or nan.
    """
    total = torch.zeros(2, dtype=torch.float64, device=device)
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        if not gradient.numel():
            continue
        if _has_kernel(gradient):
            by_device.setdefault(gradient.device, []).append(gradient)
            continue
        wide = gradient.detach().double()
        squares, not_finite = wide.square().sum(), (~wide.isfinite()).sum().double()
        total += torch.stack([squares, not_finite]).to(total.device)
    for same_device in by_device.values():
        total += squared_norm(same_device).to(total.device)
    return total


@torch.no_grad()
def squares_of_each(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each gradient, in an order that depends on its length alone.

    Args:
        gradients: At least one; their elements lie in memory without gap.

    Returns:
        float64 [number of gradients], on the device of the first.
    """
    squares = [
        squared_norm([gradient])[0]
        if gradient.dtype in KERNEL_DTYPES
        else gradient.detach().double().square().sum()
        for gradient in gradients
    ]
    return torch.stack([square.to(squares[0].device) for square in squares])


@torch.no_grad()
def grad_norm(
    gradients: Iterable[Tensor],
    *,
    groups: Sequence[dist.ProcessGroup | Communicator | RankSum] = (),
    device: torch.device | str | None = None,
    label: str = "norm of the gradients",
) -> Tensor:
    """The 2-norm of the gradients of all ranks of the groups. Collective over each of the groups.

    Args:
        gradients: What this rank counts: over all ranks each element once.
        groups: The axes over which parts lie, summed over one after the other, on every rank in
            the same order. Empty for one rank alone.
        device: Of the result; None for the default device.
        label: What this is, for error messages.

    Returns:
        A float64 scalar with the same bits on every rank. inf or nan where a gradient is not
        finite.
    """
    total = sum_of_squares(gradients, device=device)[:1]
    for group in groups:
        if isinstance(group, Communicator):
            all_reduce(total, communicator=group, label=label)
        elif isinstance(group, dist.ProcessGroup):
            all_reduce(total, group=group, label=label)
        else:
            group.sum_(total).wait()
    return total[0].sqrt()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What to multiply gradients of this norm by, so that it is at most `max_norm`; at most 1."""
    return (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)

"""GroupBatchNorm2d: batch norm of images [B, C, H, W] over a batch, or over a few images of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.tensor_parallel import Ranks, RanksLike

__all__ = ["GroupBatchNorm2d"]


class GroupBatchNorm2d(nn.Module):
    """forward(x [B, C, H, W]) -> the same, each channel with mean 0 and variance 1 over the images
    that are taken together, times weight plus bias; in eval mode by the running statistics.

    Args:
        channels: C.
        group: the ranks whose images are one batch; None: this process alone.
        mode: "batch", all images are taken together, or "ghost".
        ghost_size: images that "ghost" takes together, in their order; it divides B.
        eps: added to the variance.
        momentum: of the running statistics.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: for another mode, a ghost_size that does not go with it, or several ranks.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        channels: int,
        group: RanksLike = None,
        mode: str = "batch",
        ghost_size: int | None = None,
        *,
        eps: float = 1e-5,
        momentum: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if group is not None and Ranks.of(group).size > 1:
            raise ValueError("a batch norm over several ranks is not there yet; use norm='layer'")
        self.channels, self.mode, self.ghost_size = channels, mode, ghost_size
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))
        self.register_buffer("running_mean", torch.zeros(channels, device=device, dtype=dtype))
        self.register_buffer("running_var", torch.ones(channels, device=device, dtype=dtype))
        self.register_buffer(
            "num_batches_tracked", torch.zeros((), dtype=torch.int64, device=device)
        )

    def reset_running_stats(self) -> None:
        """Sets the running statistics to those of no batch: mean 0, variance 1."""
        self.running_mean.zero_()
        self.running_var.fill_(1.0)
        self.num_batches_tracked.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        parts = x.split(self.ghost_size) if self.mode == "ghost" and self.ghost_size else (x,)
        means, variances, found = [], [], []
        for part in parts:
            mean, variance = torch.zeros_like(self.running_mean), torch.ones_like(self.running_var)
            found.append(
                functional.batch_norm(
                    part, mean, variance, self.weight, self.bias, True, 1.0, self.eps
                )
            )
            means.append(mean)
            variances.append(variance)
        with torch.no_grad():
            self.running_mean.lerp_(torch.stack(means).mean(0), self.momentum)
            self.running_var.lerp_(torch.stack(variances).mean(0), self.momentum)
            self.num_batches_tracked.add_(1)
        return found[0] if len(found) == 1 else torch.cat(found)

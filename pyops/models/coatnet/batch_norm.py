"""GroupBatchNorm2d: batch norm of images [B, C, H, W] over the images of several ranks, or over a
few images at a time.

    "batch"   each rank: count, mean, squared distances  --all-gather of 2 C + 1--> of all images
              backward:  sums of dy and dy (x - mean)    --all-gather of 2 C-----> of all images
    "ghost"   ghost_size images at a time, in their order: no message, the same on any layout that
              keeps them together

Ranks may hold different numbers of images, or none. What they exchange is float64 and is added in
the order of ranks: every rank has the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pyops.mesh import ALONE
from pyops.ops.layers.batch_norm import (
    batch_norm_apply,
    batch_norm_input_grad,
    batch_norm_moments,
    batch_norm_sums,
    merge_moments,
)
from pyops.tensor_parallel import Ranks, RanksLike
from pyops.torch_private import in_backward

__all__ = ["GroupBatchNorm2d", "set_micro_batches"]


class GroupBatchNorm2d(nn.Module):
    """forward(x [B, C, H, W]) -> the same, each channel with mean 0 and variance 1 over the images
    that are taken together, times weight plus bias; in eval mode by the running statistics.

    The running statistics take the unbiased variance, and change once a step: where a step has
    several micro-batches, by the mean of theirs (`set_micro_batches`); not when backward computes a
    forward pass again. Ghosts count as the micro-batches do. Under "batch" they are equal on all
    ranks; under "ghost" the ranks of `group` exchange them once a step.

    Args:
        channels: C.
        group: the ranks whose images are one batch, see `pyops.tensor_parallel.RanksLike`.
        mode: "batch", all images are taken together, or "ghost".
        ghost_size: images that "ghost" takes together, in their order; it divides B.
        eps: added to the variance.
        momentum: of the running statistics.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: for another mode, a ghost_size that does not go with it, or numbers out of
            range.
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
        if mode not in ("batch", "ghost"):
            raise ValueError(f'mode must be "batch" or "ghost"; got {mode!r}')
        if (mode == "ghost") != (ghost_size is not None):
            raise ValueError(
                f'mode "ghost" takes a ghost_size, images that are normalized together, and '
                f'"batch" none; got mode={mode!r}, ghost_size={ghost_size}'
            )
        for name, number in (("channels", channels), ("ghost_size", ghost_size)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be 1 or more; got {number}")
        if eps <= 0.0 or not 0.0 <= momentum <= 1.0:
            raise ValueError(
                f"eps must be above 0 and momentum within 0 and 1; got {eps} and {momentum}"
            )
        self.channels, self.mode, self.ghost_size = channels, mode, ghost_size
        self.eps, self.momentum, self.micro_batches = eps, momentum, 1
        self.ranks = Ranks.of(group)
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))
        self.register_buffer("running_mean", torch.zeros(channels, device=device, dtype=dtype))
        self.register_buffer("running_var", torch.ones(channels, device=device, dtype=dtype))
        self.register_buffer(
            "num_batches_tracked", torch.zeros((), dtype=torch.int64, device=device)
        )
        self._step = _StepStatistics()

    def reset_running_stats(self) -> None:
        """Sets the running statistics to those of no batch: mean 0, variance 1."""
        self.running_mean.zero_()
        self.running_var.fill_(1.0)
        self.num_batches_tracked.zero_()
        self._step = _StepStatistics()

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != self.channels:
            raise ValueError(
                f"x must be [B, {self.channels}, H, W], as the norm has {self.channels} channels; "
                f"got {list(x.shape)}"
            )
        if not self.training:
            rstd = (self.running_var.double() + self.eps).rsqrt()
            fixed = (self.running_mean.double(), rstd)
            return self._apply_statistics(x, *fixed)
        if self.mode == "batch":
            return self._normalized(x, self.ranks, x)
        assert self.ghost_size is not None
        if x.shape[0] % self.ghost_size:
            raise ValueError(
                f"{x.shape[0]} images are no multiple of ghost_size={self.ghost_size}; choose a "
                "micro-batch that is"
            )
        alone, ghosts = Ranks.of(ALONE), x.split(self.ghost_size)
        found = [self._normalized(ghost, alone, x) for ghost in ghosts]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _normalized(self, x: Tensor, ranks: Ranks, batch: Tensor) -> Tensor:
        """Of images that are taken together, `ranks`' ones; `batch`: all of this call."""
        with torch.no_grad():
            count, moments = _all_moments(x, ranks)
            # Only a rank with so little looks at what all have: no other waits for its device
            if x.numel() <= x.shape[1] and count <= 1:
                raise ValueError(
                    f"batch norm in training needs more than one value a channel; got {count:.0f} "
                    f"of x {list(x.shape)}: give more images, or call eval()"
                )
            mean, squares = moments
            rstd = (squares / count + self.eps).rsqrt()
            if not in_backward():
                self._count(mean, squares / (count - 1), batch)
        return self._apply_statistics(x, mean, rstd, ranks, count)

    def _apply_statistics(
        self,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        ranks: Ranks | None = None,
        count: Tensor | None = None,
    ) -> Tensor:
        given = (x, self.weight, self.bias, mean, rstd, ranks, count)
        result: Tensor = _Normalized.apply(*given)  # type: ignore[no-untyped-call]
        return result

    def _count(self, mean: Tensor, variance: Tensor, batch: Tensor) -> None:
        """Take the statistics of a part of a step into the running ones."""
        ghosts = 1 if self.mode == "batch" else batch.shape[0] // (self.ghost_size or 1)
        step, parts = self._step, self.micro_batches * ghosts
        if step.parts >= parts or step.parts == 0:
            step.begin(self.running_mean, self.running_var)
        step.add(mean, variance)
        averages = step.averages
        if self.mode == "ghost" and self.ranks.size > 1 and step.parts == parts:
            averages = self.ranks.gather(averages[None]).wait().mean(0)
        for running, before, now in zip(
            (self.running_mean, self.running_var), step.before, averages, strict=True
        ):
            running.copy_((1 - self.momentum) * before + self.momentum * now)
        if step.parts == 1:
            self.num_batches_tracked.add_(1)

    def extra_repr(self) -> str:
        ghosts = "" if self.ghost_size is None else f", ghost_size={self.ghost_size}"
        return f"{self.channels}, mode={self.mode!r}{ghosts}, ranks={self.ranks.size}"


def set_micro_batches(model: nn.Module, count: int) -> None:
    """Say to every `GroupBatchNorm2d` of a model how many forward passes a step has: they are the
    parts of whose statistics the running ones take the mean, once a step.

    Args:
        model: Any module.
        count: Of micro-batches; 1 or more.

    Raises:
        ValueError: For another count.
    """
    if count < 1:
        raise ValueError(f"a step has one micro-batch or more; got {count}")
    for module in model.modules():
        if isinstance(module, GroupBatchNorm2d):
            module.micro_batches = count


class _StepStatistics:
    """Sums of the parts of one step, and the running statistics from before it."""

    def __init__(self) -> None:
        self.parts = 0
        self.before: tuple[Tensor, ...] = ()
        self.sums = torch.empty(0)

    def begin(self, *running: Tensor) -> None:
        self.parts, self.before = 0, tuple(t.to(torch.float64, copy=True) for t in running)

    def add(self, mean: Tensor, variance: Tensor) -> None:
        found = torch.stack([mean, variance])
        self.sums = found if self.parts == 0 else self.sums + found
        self.parts += 1

    @property
    def averages(self) -> Tensor:
        return self.sums / self.parts


def _all_moments(x: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Numbers a channel, and [2, C]: mean and squared distances, of all ranks' images."""
    moments = batch_norm_moments(x.permute(0, 2, 3, 1))
    count = moments.new_full((1,), x.numel() // x.shape[1])
    if ranks.size == 1:
        return count[0], moments
    rows = ranks.gather(torch.cat([count, moments.flatten()])[None]).wait()
    return merge_moments(rows[:, 0], rows[:, 1:].unflatten(1, (2, -1)))


class _Normalized(torch.autograd.Function):
    """x [B, C, H, W] by given statistics, which depend on the images of `ranks`; None: on none."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        rstd: Tensor,
        ranks: Ranks | None,
        count: Tensor | None,
    ) -> Tensor:
        last = x.permute(0, 2, 3, 1)
        ctx.save_for_backward(last, weight, mean, rstd, count)
        ctx.ranks = ranks
        return batch_norm_apply(last, mean, rstd, weight, bias).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd, count = ctx.saved_tensors
        last = dy.permute(0, 2, 3, 1)
        own = batch_norm_sums(last, x, mean)
        dx = None
        if ctx.needs_input_grad[0]:
            if ctx.ranks is None:
                means = torch.zeros_like(own)
            else:
                rows = own[None] if ctx.ranks.size == 1 else ctx.ranks.gather(own[None]).wait()
                means = rows.sum(0) / count
            dx = batch_norm_input_grad(last, x, mean, rstd, weight, means, count=1.0)
            dx = dx.permute(0, 3, 1, 2)
        dweight = (own[1] * rstd).to(weight.dtype)
        return dx, dweight, own[0].to(weight.dtype), None, None, None, None

"""The norms of images [B, H, W, C] in a CoAtNet's stem and convolution blocks: of a batch, of a few
images of it, or of the channels of each pixel, which ranks may share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyops.flat import ChannelPart, Placement
from pyops.models.coatnet.batch_norm import GroupBatchNorm2d
from pyops.models.coatnet.config import CoAtNetConfig
from pyops.models.model_layout import ModelLayout
from pyops.ops.layers.activation import bias_activation
from pyops.tensor_parallel import LayerNorm, Ranks, RanksLike
from pyops.tensor_parallel.functional.regions import copy, reduce

__all__ = ["ImageNorm", "SharedLayerNorm", "channels_first"]


def channels_first(x_BHWC: Tensor) -> Tensor:
    """[B, H, W, C] -> [B, C, H, W], the same memory."""
    return x_BHWC.permute(0, 3, 1, 2)


class ImageNorm(nn.Module):
    """x_BHWC -> act(norm(x)), by `config.norm`.

    Args:
        channels: C, of all ranks.
        config: the shape of the model.
        layout: how the model lies on its ranks.
        batch_group: the ranks whose images a batch norm takes as one batch.
        shared: the ranks of the layout share the channels out.
        activation: of the result; "": none.
    """

    def __init__(
        self,
        channels: int,
        config: CoAtNetConfig,
        *,
        layout: ModelLayout,
        batch_group: RanksLike,
        shared: bool = False,
        activation: str = "",
    ) -> None:
        super().__init__()
        self.activation = activation
        ranks = layout.ranks
        where = {"device": layout.device, "dtype": layout.dtype}
        if config.norm == "layer":
            kind = SharedLayerNorm if shared and ranks.size > 1 else LayerNorm
            self.norm: nn.Module = kind(channels, eps=config.norm_eps, group=ranks, **where)  # type: ignore[arg-type]
            return
        own = channels // ranks.size if shared else channels
        self.norm = GroupBatchNorm2d(
            own,
            batch_group,
            config.norm,
            config.ghost_size or None,
            eps=config.norm_eps,
            **where,  # type: ignore[arg-type]
        )
        cut = Placement.cut((channels,), dim=0, rank=ranks.rank, ranks=ranks.size)
        whole = Placement.whole((channels,), rank=ranks.rank, ranks=ranks.size)
        self.norm.placements = dict.fromkeys(("weight", "bias"), cut if shared else whole)  # type: ignore[assignment]

    def channel_parts(self, name: str) -> tuple[ChannelPart, ...]:
        """Where the channels lie in the norm, which is called `name`: also those of running
        statistics."""
        own = [*self.norm.named_parameters(), *self.norm.named_buffers()]
        return tuple(ChannelPart(f"{name}.norm.{key}") for key, value in own if value.dim())

    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """float64 [C] each: what a batch norm does in eval mode, x scale + shift."""
        of = self.norm
        assert isinstance(of, GroupBatchNorm2d)
        scale = of.weight.double() * (of.running_var.double() + of.eps).rsqrt()
        return scale, of.bias.double() - of.running_mean.double() * scale

    def forward(self, x_BHWC: Tensor) -> Tensor:
        if isinstance(self.norm, GroupBatchNorm2d):
            y = self.norm(channels_first(x_BHWC)).permute(0, 2, 3, 1)
        else:
            y = self.norm(x_BHWC)
        return bias_activation(y, activation=self.activation) if self.activation else y


class SharedLayerNorm(nn.Module):
    """Layer norm of [..., C / ranks] over channels that the ranks share: two sums of a number for
    each pixel forward, and two backward.

    Args:
        dim: C, of all ranks.
        eps: added to the variance.
        group: the ranks.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: float,
        group: RanksLike,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.eps, self.ranks = dim, eps, Ranks.of(group)
        cut = Placement.cut((dim,), dim=0, rank=self.ranks.rank, ranks=self.ranks.size)
        self.placements = {"weight": cut, "bias": cut}
        self.weight = nn.Parameter(torch.ones(cut.length, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(cut.length, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        centred = wide - self._mean(wide)
        scale = (self._mean(centred.square()) + self.eps).rsqrt()
        return (centred * scale * self.weight + self.bias).to(x.dtype)

    def _mean(self, x: Tensor) -> Tensor:
        """Over the channels of all ranks, for the work of each."""
        total = reduce(x.sum(-1, keepdim=True), group=self.ranks)
        return copy(total, group=self.ranks) / self.dim

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"

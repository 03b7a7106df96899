"""How a block halves the side of an image, and what stands in its shortcut."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from pyops.models.coatnet.config import BlockShape
from pyops.models.coatnet.norms import channels_first
from pyops.models.model_layout import ModelLayout

__all__ = ["Shortcut", "halved"]


def halved(x_BHWC: Tensor, pool: str) -> Tensor:
    """Half the side: the average or the maximum of 2 x 2 pixels, or ("max3") of 3 x 3."""
    x = channels_first(x_BHWC)
    if pool == "average":
        y = functional.avg_pool2d(x, 2)
    elif pool == "max":
        y = functional.max_pool2d(x, 2)
    else:
        y = functional.max_pool2d(x, 3, stride=2, padding=1)
    return y.permute(0, 2, 3, 1).contiguous()


class Shortcut(nn.Module):
    """x -> what a block adds to: x, pooled where the block has a stride, and projected where it has
    another width. Computed on every rank.

    Args:
        shape: of the block.
        pool: see `halved`.
        bias: the projection has one.
        layout: how the model lies on its ranks.
    """

    def __init__(self, shape: BlockShape, pool: str, *, bias: bool, layout: ModelLayout) -> None:
        super().__init__()
        self.pool = pool if shape.stride > 1 else ""
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if shape.in_width != shape.width:
            self.weight = layout.parameter(shape.width, shape.in_width)
            self.bias = layout.parameter(shape.width) if bias else None

    def forward(self, x_BHWC: Tensor) -> Tensor:
        x = halved(x_BHWC, self.pool) if self.pool else x_BHWC
        return x if self.weight is None else functional.linear(x, self.weight, self.bias)

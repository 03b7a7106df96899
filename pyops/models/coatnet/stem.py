"""The stem of a CoAtNet: two 3 x 3 convolutions, the first with stride 2, computed on every
rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.models.coatnet.config import STEM_STRIDE, CoAtNetConfig
from pyops.models.coatnet.norms import ImageNorm, channels_first
from pyops.models.model_layout import ModelLayout
from pyops.tensor_parallel import RanksLike

__all__ = ["Convolution3x3", "Stem"]


class Convolution3x3(nn.Module):
    """[B, C, H, W] -> [B, D, H / stride, W / stride], without a bias."""

    def __init__(self, width: int, out: int, stride: int, *, layout: ModelLayout) -> None:
        super().__init__()
        self.stride = stride
        self.weight = layout.parameter(out, width, 3, 3)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return functional.conv2d(x_BCHW, self.weight, stride=self.stride, padding=1)


class Stem(nn.Module):
    """images [B, C, H, W] -> x [B, H / 2, W / 2, D], channels last from here on."""

    def __init__(
        self, config: CoAtNetConfig, *, layout: ModelLayout, batch_group: RanksLike
    ) -> None:
        super().__init__()
        self.sides, self.channels = config.sides, config.num_channels
        hidden = config.stem_hidden or config.stem_width
        self.conv1 = Convolution3x3(config.num_channels, hidden, STEM_STRIDE, layout=layout)
        self.norm = ImageNorm(
            hidden,
            config,
            layout=layout,
            batch_group=batch_group,
            activation=config.activation,
        )
        self.conv2 = Convolution3x3(hidden, config.stem_width, 1, layout=layout)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        wanted = (self.channels, *self.sides)
        if tuple(images_BCHW.shape[1:]) != wanted:
            raise ValueError(
                f"images are {tuple(images_BCHW.shape)}; this model takes [B, "
                f"{', '.join(map(str, wanted))}]; resize_ makes it one of another size"
            )
        x = self.conv1(images_BCHW.contiguous(memory_format=torch.channels_last))
        x = self.norm(x.permute(0, 2, 3, 1))
        found: Tensor = self.conv2(channels_first(x))
        return found.permute(0, 2, 3, 1).contiguous()

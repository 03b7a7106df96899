"""The convolution block of a CoAtNet, an inverted bottleneck with the norms in front (MBConv;
Sandler et al., 2018):

    x --> norm --> 1 x 1 to 4 C --> norm, act --> 3 x 3 depthwise --> norm, act --> squeeze and
    |                                                                    excitation --> 1 x 1 --> +
    `--> pool, projection, where the block has a stride or another width ----------------------> +

Ranks share the inner channels, which they divide: the expansion is cut by columns, norms and
depthwise convolution are each rank's own, and the last 1 x 1 is cut by rows: one sum over ranks
forward and one backward, of the block's result and input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.flat import ChannelPart, ChannelSet, Placement
from pyops.flat.channels import written
from pyops.models.coatnet.config import BlockShape, CoAtNetConfig
from pyops.models.coatnet.downsampling import Shortcut, halved
from pyops.models.coatnet.norms import ImageNorm, channels_first
from pyops.models.coatnet.squeeze_excite import SqueezeExcite
from pyops.models.coatnet.stochastic_depth import StochasticDepth
from pyops.models.model_layout import ModelLayout
from pyops.ops.layers.activation import bias_activation
from pyops.ops.layers.depthwise import depthwise_conv2d
from pyops.tensor_parallel import (
    ColumnConfig,
    ColumnParallelLinear,
    RanksLike,
    RowConfig,
    RowParallelLinear,
)

__all__ = ["ConvolutionBlock", "Depthwise", "FoldedConvolutionBlock"]


class Depthwise(nn.Module):
    """x [B, H, W, C / ranks] -> each of the own channels by a 3 x 3 kernel of its own."""

    def __init__(self, channels: int, stride: int, *, layout: ModelLayout) -> None:
        super().__init__()
        ranks = layout.ranks
        place = Placement.cut((channels, 1, 3, 3), dim=0, rank=ranks.rank, ranks=ranks.size)
        self.stride, self.placements = stride, {"weight": place}
        self.weight = layout.parameter(*place.local_shape)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        y = depthwise_conv2d(channels_first(x_BHWC), self.weight, stride=self.stride)
        return y.permute(0, 2, 3, 1)


class ConvolutionBlock(nn.Module):
    """x_BHWC -> x_BHWC.

    Args:
        config: the shape of the model.
        shape: of this block.
        layout: how the model lies on its ranks.
        batch_group: the ranks whose images a batch norm takes as one batch.
        drop: probability with which an image goes by the shortcut alone.

    Raises:
        ValueError: ranks that do not divide the inner channels.
    """

    def __init__(
        self,
        config: CoAtNetConfig,
        shape: BlockShape,
        *,
        layout: ModelLayout,
        batch_group: RanksLike,
        drop: float,
    ) -> None:
        super().__init__()
        inner, ranks = shape.inner, layout.ranks.size
        if inner % ranks:
            raise ValueError(
                f"widths is {config.widths}: the convolution blocks of stage {shape.stage} are "
                f"{inner} wide within, which {ranks} ranks do not divide; choose other widths or "
                "ranks, or leave the stage out of tp_stages"
            )
        self.shape, self.stride_in, self.pool = shape, config.stride_in, config.pool
        self.se_early = config.se_early

        def norm(channels: int, *, shared: bool, activation: str) -> ImageNorm:
            return ImageNorm(
                channels,
                config,
                layout=layout,
                batch_group=batch_group,
                shared=shared,
                activation=activation,
            )

        self.shortcut = Shortcut(shape, config.pool, bias=config.conv_bias, layout=layout)
        before = config.activation if config.pre_norm_act else ""
        self.pre_norm = norm(shape.in_width, shared=False, activation=before)
        self.expand = ColumnParallelLinear(
            shape.in_width,
            inner,
            bias=False,
            config=ColumnConfig(seed=None),
            **layout.parallel,
        )
        self.norm1, self.norm2 = (
            norm(inner, shared=True, activation=config.activation) for _ in range(2)
        )
        self.depthwise = Depthwise(inner, self._stride("depthwise"), layout=layout)
        self.se = SqueezeExcite(inner, shape.squeezed, config.se_activation, layout=layout)
        self.project = RowParallelLinear(
            inner,
            shape.width,
            bias=config.conv_bias,
            config=RowConfig(seed=None),
            **layout.parallel,
        )
        self.drop = StochasticDepth(drop)

    def channels(self) -> list[ChannelSet]:
        """The inner channels, from the first 1 x 1 to the last, with all that lies between."""
        parts = (
            *written("expand", bias=False),
            *self.norm1.channel_parts("norm1"),
            *self.norm2.channel_parts("norm2"),
            ChannelPart("depthwise.weight"),
            ChannelPart("se.squeeze.weight", 1, reads=True),
            *written("se.excite", bias=True),
            ChannelPart("project.weight", 1, reads=True),
        )
        return [ChannelSet("inner", self.shape.inner, parts)]

    def stream_parts(self) -> tuple[tuple[ChannelPart, ...], tuple[ChannelPart, ...]]:
        """Where the channels of x lie in the block, and those of its result."""
        reads = (
            *self.pre_norm.channel_parts("pre_norm"),
            ChannelPart("expand.weight", 1, reads=True),
        )
        return reads, written("project", bias=self.project.bias is not None)

    def _stride(self, where: str) -> int:
        return self.shape.stride if self.stride_in == where else 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.pre_norm(x)
        if self._stride("pool") > 1:
            y = halved(y, self.pool)
        if self._stride("expand") > 1:
            y = y[:, ::2, ::2].contiguous()
        y = self.depthwise(self.norm1(self.expand(y)))
        y = self.norm2(self.se(y)) if self.se_early else self.se(self.norm2(y))
        result: Tensor = self.shortcut(x) + self.drop(self.project(y))
        return result


class FoldedConvolutionBlock(nn.Module):
    """As `ConvolutionBlock` in eval mode, without the norms that its convolutions can take:

        1 x 1 with a bias, act -> 3 x 3 with a bias, act -> gate -> 1 x 1

    A norm behind a convolution scales its outputs, one in front of a 1 x 1 its inputs. What stays:
    a norm with an activation of its own in front of the 1 x 1, or with a maximum between the two
    (which a negative scale would make a minimum), and a norm behind the gate.

    Args:
        block: In eval mode, whole.
    """

    expand_weight: Tensor
    expand_bias: Tensor
    depthwise_weight: Tensor
    depthwise_bias: Tensor

    def __init__(self, block: ConvolutionBlock) -> None:
        super().__init__()
        self.block, self.shape, self.activation = block, block.shape, block.norm1.activation
        weight = block.expand.weight.double()
        maximum = block._stride("pool") > 1 and block.pool != "average"
        self.keeps_pre_norm = bool(block.pre_norm.activation) or maximum
        scale, shift = block.norm1.scale_and_shift()
        bias = shift
        if not self.keeps_pre_norm:
            before, added = block.pre_norm.scale_and_shift()
            bias = bias + scale * (weight @ added)
            weight = weight * before
        self._keep("expand", weight * scale[:, None], bias)
        scale, shift = block.norm2.scale_and_shift()
        if block.se_early:
            scale, shift = torch.ones_like(scale), torch.zeros_like(shift)
        taps = block.depthwise.weight.double()
        self._keep("depthwise", taps * scale[:, None, None, None], shift)

    def _keep(self, name: str, weight: Tensor, bias: Tensor) -> None:
        dtype = self.block.expand.weight.dtype
        self.register_buffer(f"{name}_weight", weight.to(dtype))
        self.register_buffer(f"{name}_bias", bias.to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        block = self.block
        y = block.pre_norm(x) if self.keeps_pre_norm else x
        if block._stride("pool") > 1:
            y = halved(y, block.pool)
        if block._stride("expand") > 1:
            y = y[:, ::2, ::2].contiguous()
        y = functional.linear(y, self.expand_weight)
        y = bias_activation(y, self.expand_bias, activation=self.activation)
        y = depthwise_conv2d(
            channels_first(y),
            self.depthwise_weight,
            None if block.se_early else self.depthwise_bias,
            stride=block._stride("depthwise"),
            activation=None if block.se_early else self.activation,
        ).permute(0, 2, 3, 1)
        y = block.norm2(block.se(y)) if block.se_early else block.se(y)
        result: Tensor = block.shortcut(x) + block.project(y)
        return result

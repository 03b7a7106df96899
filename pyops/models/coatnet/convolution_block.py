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

from torch import Tensor, nn
from torch.nn import functional

from pyops.flat import Placement
from pyops.models.coatnet.config import BlockShape, CoAtNetConfig
from pyops.models.coatnet.downsampling import Shortcut, halved
from pyops.models.coatnet.norms import ImageNorm, channels_first
from pyops.models.coatnet.squeeze_excite import SqueezeExcite
from pyops.models.coatnet.stochastic_depth import StochasticDepth
from pyops.models.model_layout import ModelLayout
from pyops.tensor_parallel import (
    ColumnConfig,
    ColumnParallelLinear,
    RanksLike,
    RowConfig,
    RowParallelLinear,
)

__all__ = ["ConvolutionBlock", "Depthwise"]


class Depthwise(nn.Module):
    """x [B, H, W, C / ranks] -> each of the own channels by a 3 x 3 kernel of its own."""

    def __init__(self, channels: int, stride: int, *, layout: ModelLayout) -> None:
        super().__init__()
        ranks = layout.ranks
        place = Placement.cut((channels, 1, 3, 3), dim=0, rank=ranks.rank, ranks=ranks.size)
        self.stride, self.placements = stride, {"weight": place}
        self.weight = layout.parameter(*place.local_shape)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        y = functional.conv2d(
            channels_first(x_BHWC),
            self.weight,
            stride=self.stride,
            padding=1,
            groups=len(self.weight),
        )
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

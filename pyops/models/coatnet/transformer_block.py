"""The transformer block of a CoAtNet: attention among all pixels of an image, with a learned bias
for each offset of two pixels, and a feed-forward; both with a layer norm in front.

    x --> norm --> pool --> attention --> + --> norm --> feed-forward --> +
    |                                     |                               |
    `--> pool, projection ----------------+-------------------------------+

Pools where the block has a stride, the projection where it has another width. Ranks share the
heads, each with its part of the bias table, and the inner width of the feed-forward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyops.flat import ChannelPart, ChannelSet
from pyops.flat.channels import written
from pyops.models.coatnet.config import EXPANSION, BlockShape, CoAtNetConfig
from pyops.models.coatnet.downsampling import Shortcut, halved
from pyops.models.coatnet.relative_bias import RelativeBias2d
from pyops.models.coatnet.stochastic_depth import StochasticDepth
from pyops.models.model_layout import ModelLayout
from pyops.tensor_parallel import (
    ColumnConfig,
    ColumnParallelLinear,
    MLPConfig,
    ParallelMLP,
    RowConfig,
    RowParallelLinear,
)
from pyops.tensor_parallel.functional.scores import Core
from pyops.tensor_parallel.layers.head_groups import check_heads

__all__ = ["RelativeAttention", "TransformerBlock"]


class RelativeAttention(nn.Module):
    """x_BHWC -> y [B, H, W, D'] by attention among the H W pixels.

    qkv.weight: [heads 3 K, D], rows (head; query, key, value; K); output.weight: [D', heads K].
    Both are cut by heads, padded with zeros where the ranks do not divide them.

    Args:
        shape: of the block.
        head_dim: K.
        layout: how the model lies on its ranks.

    Raises:
        ValueError: fewer heads than ranks.
    """

    def __init__(self, shape: BlockShape, head_dim: int, *, layout: ModelLayout) -> None:
        super().__init__()
        heads = shape.inner // head_dim
        check_heads(heads, heads, layout.ranks.size)
        self.head_dim = head_dim
        self.qkv = ColumnParallelLinear(
            shape.in_width,
            3 * shape.inner,
            config=ColumnConfig(unit=3 * head_dim, seed=None),
            **layout.parallel,
        )
        self.bias = RelativeBias2d(heads, shape.grid, layout=layout)
        self.core = Core()
        self.output = RowParallelLinear(
            shape.inner,
            shape.width,
            config=RowConfig(unit=head_dim, seed=None),
            **layout.parallel,
        )

    def channels(self) -> list[ChannelSet]:
        """Of each head the channels of values, and those of queries and keys."""
        K, found = self.head_dim, []
        for head in range(self.output.in_features // K):
            queries, keys, values = (
                written("qkv", starts=[(3 * head + i) * K], bias=True) for i in range(3)
            )
            output = ChannelPart("output.weight", 1, (head * K,), reads=True)
            found.append(ChannelSet(f"values.{head}", K, (*values, output)))
            found.append(ChannelSet(f"scores.{head}", K, (*queries, *keys)))
        return found

    def forward(self, x_BHWC: Tensor) -> Tensor:
        grid = x_BHWC.shape[1:3]
        if tuple(grid) != self.bias.grid:
            raise ValueError(
                f"attention is given {tuple(grid)} pixels, but its table is of {self.bias.grid}; "
                "call resize_ of the model with the size of the images"
            )
        qkv = self.qkv(x_BHWC.flatten(1, 2)).unflatten(-1, (-1, 3, self.head_dim))
        q, k, v = qkv.unbind(3)
        y = self.core(q, k, v, scale=self.head_dim**-0.5, bias=self.bias())
        result: Tensor = self.output(y).unflatten(1, grid)
        return result


class TransformerBlock(nn.Module):
    """x_BHWC -> x_BHWC.

    Args:
        config: the shape of the model.
        shape: of this block.
        layout: how the model lies on its ranks.
        drop: probability with which an image goes by the shortcuts alone.
    """

    def __init__(
        self, config: CoAtNetConfig, shape: BlockShape, *, layout: ModelLayout, drop: float
    ) -> None:
        super().__init__()
        self.shape, self.pool = shape, config.pool if shape.stride > 1 else ""
        self.shortcut = Shortcut(shape, config.pool, bias=config.shortcut_bias, layout=layout)
        self.norm1 = layout.norm("layernorm", shape.in_width, eps=config.attention_norm_eps)
        self.attention = RelativeAttention(shape, config.head_dim, layout=layout)
        self.norm2 = layout.norm("layernorm", shape.width, eps=config.attention_norm_eps)
        self.mlp = ParallelMLP(
            shape.width,
            EXPANSION * shape.width,
            MLPConfig(activation="gelu", seed=None),
            **layout.parallel,
        )
        self.register_parameter("scale1", None)
        self.register_parameter("scale2", None)
        if config.layer_scale:
            self.scale1, self.scale2 = (layout.parameter(shape.width) for _ in range(2))
        self.drop1, self.drop2 = (StochasticDepth(drop) for _ in range(2))

    def stream_parts(self) -> tuple[tuple[ChannelPart, ...], tuple[ChannelPart, ...]]:
        """Where the channels of x lie in the block, and those of its result."""
        reads = (*_norm_parts("norm1"), ChannelPart("attention.qkv.weight", 1, reads=True))
        scales = ("scale1", "scale2") if self.scale1 is not None else ()
        results = (
            *written("attention.output", bias=True),
            *_norm_parts("norm2"),
            ChannelPart("mlp.up.weight", 1, reads=True),
            *written("mlp.down", bias=True),
            *(ChannelPart(name) for name in scales),
        )
        return reads, results

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        y = self.attention(halved(y, self.pool) if self.pool else y)
        x = self.shortcut(x) + self.drop1(_scaled(y, self.scale1))
        result: Tensor = x + self.drop2(_scaled(self.mlp(self.norm2(x)), self.scale2))
        return result


def _norm_parts(name: str) -> tuple[ChannelPart, ...]:
    return ChannelPart(f"{name}.weight"), ChannelPart(f"{name}.bias")


def _scaled(y: Tensor, scale: torch.Tensor | None) -> Tensor:
    return y if scale is None else y * scale

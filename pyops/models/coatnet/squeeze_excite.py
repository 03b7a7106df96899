"""Squeeze and excitation: each channel times a factor that depends on the averages of all (Hu et
al., 2018).

    v_BHWC * sigmoid(W2 act(W1 mean over pixels of v + b1) + b2)

Ranks share the channels: the products of their averages with W1 are summed, and b1 is added once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyops.flat import ChannelPart, ChannelSet
from pyops.flat.channels import written
from pyops.models.model_layout import ModelLayout
from pyops.ops.layers.activation import bias_activation
from pyops.tensor_parallel import ColumnConfig, ColumnParallelLinear, RowConfig, RowParallelLinear

__all__ = ["SqueezeExcite"]


class SqueezeExcite(nn.Module):
    """x [B, H, W, C / ranks] -> the same, scaled.

    Args:
        channels: C, of all ranks, which divide it.
        squeezed: width between W1 and W2.
        activation: between them.
        layout: how the model lies on its ranks.
    """

    def __init__(
        self, channels: int, squeezed: int, activation: str, *, layout: ModelLayout
    ) -> None:
        super().__init__()
        self.activation = activation
        self.squeeze = RowParallelLinear(
            channels, squeezed, config=RowConfig(seed=None), **layout.parallel
        )
        self.excite = ColumnParallelLinear(
            squeezed, channels, config=ColumnConfig(seed=None), **layout.parallel
        )

    def channels(self) -> list[ChannelSet]:
        """Those between W1 and W2."""
        rows = written("squeeze", bias=True)
        width = self.squeeze.out_features
        return [ChannelSet("squeezed", width, (*rows, ChannelPart("excite.weight", 1, reads=True)))]

    def forward(self, x_BHWC: Tensor) -> Tensor:
        means_BC = x_BHWC.mean(dim=(1, 2))
        hidden = bias_activation(self.squeeze(means_BC), activation=self.activation)
        gate_BC = torch.sigmoid(self.excite(hidden))
        return x_BHWC * gate_BC[:, None, None, :]

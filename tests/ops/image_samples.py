"""Arguments for the ops on images, for tests/ops/samples.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["IMAGE_SAMPLES"]


def _convolution(device: torch.device) -> tuple[Tensor, Tensor]:
    """x [2, 5, 7, 18] with gaps between its pixels, and its weight."""
    x = torch.randn(2, 5, 7, 19, device=device)[..., :18]
    return x, torch.randn(18, 1, 3, 3, device=device)


def _channels(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dy and x [3, 2, 5], mean and rstd."""
    dy, x = (torch.randn(2, 3, 5, device=device).transpose(0, 1) for _ in range(2))
    mean, rstd = torch.rand(2, 5, device=device, dtype=torch.float64) + 0.5
    return dy, x, mean, rstd


IMAGE_SAMPLES: dict[str, Callable[[torch.device], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "depthwise_conv2d": lambda device: (
        (*_convolution(device), torch.randn(18, device=device)),
        {"stride": 2, "activation": None},
    ),
    "depthwise_conv2d_backward": lambda device: (
        (torch.randn(2, 3, 4, 18, device=device), *_convolution(device)),
        {"stride": 2, "input_grad": True, "weight_grad": True},
    ),
    "batch_norm_moments": lambda device: (_channels(device)[1:2], {}),
    "batch_norm_apply": lambda device: (
        (*_channels(device)[1:], *torch.randn(2, 5, device=device)),
        {"activation": "silu"},
    ),
    "batch_norm_sums": lambda device: (_channels(device)[:3], {}),
    "batch_norm_input_grad": lambda device: (
        (
            *_channels(device),
            torch.randn(5, device=device),
            torch.randn(2, 5, device=device, dtype=torch.float64),
        ),
        {"count": 9.0},
    ),
}

"""Arguments for token_attention_, for tests/ops/samples.py."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["token_attention"]


def token_attention(device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Two rows of two, turned in part, each group's heads two."""
    qkv = torch.randn(2, 1, 8, 12, device=device)
    q, k, v = qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:]
    keys, values = torch.randn(2, 3, 2, 5, 12, device=device).unbind()
    angle = torch.rand(2, 1, 4, device=device)
    places = torch.tensor([[3], [1]], device=device)
    options = {"first_row": 1, "scale": 0.3, "interleaved": True}
    return (q, k, v, keys, values, places, angle.cos(), angle.sin()), options

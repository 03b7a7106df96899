"""Arguments for the ops of a decoding step, for tests/ops/samples.py."""

from __future__ import annotations

from typing import Any

import torch

from tests.ops.decoding.random_blocks import DIM, FORM, blocks_of, kept_of

__all__ = ["SAMPLES", "token_blocks"]


def token_attention(device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Two rows of two, turned in part, each group's heads two."""
    qkv = torch.randn(2, 1, 8, 12, device=device)
    q, k, v = qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:]
    keys, values = torch.randn(2, 3, 2, 5, 12, device=device).unbind()
    angle = torch.rand(2, 1, 4, device=device)
    places = torch.tensor([[3], [1]], device=device)
    options = {"first_row": 1, "scale": 0.3, "interleaved": True}
    return (q, k, v, keys, values, places, angle.cos(), angle.sin()), options


def token_blocks(device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Two rows of three, two blocks, heads that share keys."""
    operands, kinds = blocks_of(device, by=("numbers", "int8"), bias=True, norm_bias=True)
    angle = torch.rand(2, 1, 3, device=device)
    places = torch.tensor([[3], [1]], device=device)
    x = torch.randn(2, DIM, device=device)
    given = (x, operands, kinds, *kept_of(device), places, angle.cos(), angle.sin())
    return given, {"first_row": 1, **FORM, "rms": False}


SAMPLES = {"token_attention_": token_attention, "token_blocks_": token_blocks}

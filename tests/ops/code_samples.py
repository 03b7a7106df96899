"""Arguments for the ops on codes, for tests/ops/samples.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CODE_SAMPLES"]

Sample = tuple[tuple[Any, ...], dict[str, Any]]


def _rows(device: torch.device) -> Sample:
    """Rows with gaps between them, and scales and zero points found beforehand."""
    x = torch.randn(3, 2, 19, device=device)[..., :18]
    scales = torch.rand(3, 2, device=device) + 0.01
    zeros = torch.arange(6, device=device, dtype=torch.int32).view(3, 2) + 100
    return (x, scales, zeros), {"symmetric": False}


def _sums(device: torch.device) -> Sample:
    whole = {"device": device, "dtype": torch.int32}
    return (
        torch.arange(-60, 60, **whole).view(3, 40)[:, ::2],
        torch.rand(3, device=device),
        torch.rand(20, device=device),
        torch.arange(3, **whole),
        torch.arange(20, **whole) - 7,
        torch.randn(20, device=device),
    ), {"activation": "silu", "dtype": torch.bfloat16}


def _code_rows(device: torch.device) -> Sample:
    return (
        torch.randn(3, 25, device=device)[:, :24],
        torch.randint(0, 256, (5, 12), device=device).to(torch.uint8),
        torch.rand(5, 3, device=device),
        torch.arange(15, device=device, dtype=torch.int32).view(5, 3),
        torch.randn(5, device=device),
    ), {"bits": 4}


CODE_SAMPLES: dict[str, Callable[[torch.device], Sample]] = {
    "quantize_rows": _rows,
    "row_extents": lambda device: (_rows(device)[0][:1], {"symmetric": False}),
    "scale_product": _sums,
    "scale_sums_": lambda device: (_sums(device)[0], {}),
    "code_rows_product": _code_rows,
    "decode_rows": lambda device: (
        _code_rows(device)[0][1:4],
        {"width": 24, "bits": 4, "dtype": torch.bfloat16},
    ),
}

"""Arguments for the ops of pruning; see tests/ops/samples.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["SPARSE_SAMPLES"]

SPARSE_SAMPLES: dict[str, Callable[[torch.device], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "radix_count_": lambda device: (
        (
            [torch.ones(5, device=device), 1.0 + torch.rand(3, 4, device=device) / 128],
            torch.zeros(65536, dtype=torch.int64, device=device),
        ),
        {"prefix": 0x3F80},
    ),
    "keep_bits_": lambda device: (
        (
            [torch.randn(11, device=device), torch.randn(3, 4, device=device).bfloat16()],
            [torch.tensor(b, dtype=torch.uint8, device=device) for b in ([90, 5], [201, 3])],
        ),
        {},
    ),
}

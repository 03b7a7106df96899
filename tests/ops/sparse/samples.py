"""Arguments for the ops of pruning and of sparse matrices, for tests/ops/samples.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["SPARSE_SAMPLES"]

SPARSE_SAMPLES: dict[str, Callable[[torch.device], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "nm_mask": lambda device: (
        (torch.randn(3, 10, 7, device=device)[:, :8],),
        {"n": 1, "m": 4, "dim": 1},
    ),
    "csr_product": lambda device: (
        (
            torch.tensor([0, 1, 1, 3], device=device),
            torch.tensor([1, 0, 3], dtype=torch.int32, device=device),
            torch.randn(3, device=device),
            torch.randn(4, 5, device=device),
        ),
        {},
    ),
    "stripe_search": lambda device: (
        (torch.rand(7, 12, device=device, dtype=torch.float64),),
        {"escapes": 5, "seed": 3},
    ),
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

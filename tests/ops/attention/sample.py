"""Arguments for the attention ops, with pairwise different, non-default numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Sample = tuple[tuple[Any, ...], dict[str, Any]]


def _attention(device: torch.device) -> tuple[list[Tensor], list[Tensor | None], dict[str, Any]]:
    """q, k and v; the other tensors, each of which hides something; the numbers."""
    q, k, v = (torch.randn(2, n, h, 8, device=device) for n, h in ((6, 4), (9, 2), (9, 2)))
    documents = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1, -1]] * 2, device=device, dtype=torch.int32)
    operands = [
        torch.randn(1, 4, 1, 9, device=device),
        torch.randn(3, 4, device=device),
        torch.tensor([0, 1, 2, 1, 0], device=device, dtype=torch.int32),
        torch.rand(4, device=device),
        torch.arange(18, device=device).view(2, 9) % 5 != 3,
        documents[:, 1:7].contiguous(),
        documents,
        torch.arange(6, device=device) + 3,
        torch.arange(9, device=device) + 2,
        torch.ones(4, 1, device=device, dtype=torch.int32),
        torch.zeros(4, 1, 2, device=device, dtype=torch.int32),
        torch.ones(4, 1, device=device, dtype=torch.int32),
        torch.zeros(4, 1, 2, device=device, dtype=torch.int32),
        torch.tensor([-7, 5], device=device),
    ]
    numbers = {
        "scale": 0.7,
        "soft_cap": 5.0,
        "causal": False,
        "before": 4,
        "after": 3,
        "block": 16,
        "p": 0.3,
        "first": 7,
        "row_stride": 640,
        "num_queries": 10,
        "num_keys": 13,
    }
    return [q, k, v], operands, numbers


def attention_backward(device: torch.device) -> Sample:
    qkv, operands, numbers = _attention(device)
    y, lse = torch.ops.pyops.attention_forward.default(*qkv, *operands, **numbers)
    given = (torch.randn_like(y), torch.randn_like(lse), y, lse, *qkv, *operands)
    return given, {**numbers, "bias_grad": True, "table_grad": True}


def attention_forward(device: torch.device) -> Sample:
    qkv, operands, numbers = _attention(device)
    return (*qkv, *operands), numbers

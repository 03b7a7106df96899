"""Arguments for the ops of fake quantization, for tests/ops/samples.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

__all__ = ["FAKE_QUANTIZE_SAMPLES"]

Sample = tuple[tuple[Any, ...], dict[str, Any]]


def _fake_quantize(device: torch.device, *, backward: bool) -> Sample:
    """[dy and] x [2, 3, 5], transposed, a scale and a zero point for each row; some beyond an
    end."""
    many = [torch.randn(3, 2, 5, device=device).transpose(0, 1) for _ in range(1 + backward)]
    scale = torch.rand(6, device=device) * 0.3 + 0.1
    zero = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.0, 1.0], device=device)
    options: dict[str, Any] = {"lo": -3, "hi": 5, "inner": 5, "factor": 0.7}
    asked = {"input_grad": True, "scale_grad": True} if backward else {}
    return (*many, scale, zero), options | asked


FAKE_QUANTIZE_SAMPLES: dict[str, Callable[[torch.device], Sample]] = {
    "fake_quantize": partial(_fake_quantize, backward=False),
    "fake_quantize_backward": partial(_fake_quantize, backward=True),
}

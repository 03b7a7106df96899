"""How close the interpreter comes: it truncates where a GPU rounds to nearest, so one unit in the
last place is its own."""

from __future__ import annotations

import torch

__all__ = ["assert_within_roundings"]


def assert_within_roundings(
    actual: torch.Tensor, expected: torch.Tensor, *, units: float = 8.0
) -> None:
    """Equal up to `units` in the last place of fp32 (of float64), at the size of the largest
    element, and one of the dtype."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    wide = torch.float64 if expected.dtype == torch.float64 else torch.float32
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    last_place = torch.finfo(expected.dtype).eps if expected.dtype != wide else 0.0
    torch.testing.assert_close(
        actual, expected, rtol=last_place, atol=units * torch.finfo(wide).eps * max(scale, 1.0)
    )

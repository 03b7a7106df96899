"""The Triton kernels of the stem `fake_quantize`, run by the interpreter on CPU tensors; see
test_interpreter.py."""

from __future__ import annotations

import pytest
import torch

from pyops.ops.layers import fake_quantize as contract
from pyops.ops.triton import fake_quantize as kernels
from tests.ops.triton.rounding import assert_within_roundings

# x's shape, scales, neighbors that share one: rows with a rest, columns over several tiles, one
# scale for all, groups.
CASES = (
    ((5, 70), 5, 70, torch.float32),
    ((9, 3), 3, 1, torch.bfloat16),
    ((2, 30), 1, 60, torch.float16),
    ((4, 8), 8, 4, torch.float64),
    ((2, 3, 5), 3, 5, torch.float32),
)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits, but in 16 bits, which the interpreter rounds in its own way."""
    if expected.dtype in (torch.float32, torch.float64):
        assert torch.equal(actual, expected)
    else:
        assert_within_roundings(actual, expected)


@pytest.mark.parametrize(("shape", "channels", "inner", "dtype"), CASES)
def test_forward_and_backward(
    shape: tuple[int, ...],
    channels: int,
    inner: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(kernels, "NUMBERS", 64)
    monkeypatch.setattr(kernels, "COLUMNS", 16)
    monkeypatch.setattr(kernels, "MOST_TILES", 2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, dy = torch.randn(2, *shape, dtype=torch.float64).to(dtype)
    scale = torch.rand(channels, dtype=wide) * 0.3 + 0.1
    x.flatten()[1] = torch.nan
    for zero in (None, torch.randint(-2, 3, (channels,)).to(wide)):
        options = {"lo": -4, "hi": 5, "inner": inner, "factor": 0.3}
        y = kernels.fake_quantize(x, scale, zero, **options)
        expected = contract.fake_quantize_reference(x, scale, zero, **options)
        same(y.nan_to_num(99.0), expected.nan_to_num(99.0))
        assert y.isnan().sum() == 1
        fine = x.nan_to_num(0.7)
        for asked in ((True, True), (False, True), (True, False)):
            back = {**options, "input_grad": asked[0], "scale_grad": asked[1]}
            found = kernels.fake_quantize_backward(dy, fine, scale, zero, **back)
            wanted = contract.fake_quantize_backward_reference(dy, fine, scale, zero, **back)
            same(found[0], wanted[0])
            torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-6)
            assert not asked[1] or wanted[1].abs().max() > 0


def test_a_scale_that_is_not_above_zero():
    scale = torch.tensor([0.0, torch.nan, 1.0])
    y = kernels.fake_quantize(torch.ones(3, 2), scale, None, lo=-3, hi=3, inner=2, factor=1.0)
    assert y[0].tolist() == [0.0, 0.0]
    assert y[1].isnan().all()
    assert y[2].tolist() == [1.0, 1.0]

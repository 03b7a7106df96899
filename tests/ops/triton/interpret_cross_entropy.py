"""The Triton kernels of the stem `cross_entropy`, run by the interpreter on CPU tensors; see
test_interpreter.py."""

from __future__ import annotations

import pytest
import torch

from pyops.ops.layers import cross_entropy as contract
from pyops.ops.triton import cross_entropy as kernels
from tests.ops.triton.rounding import assert_within_roundings

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_and_gradient(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Of a part with padding that is nan, in rows with gaps, over several tiles; targets here,
    elsewhere and ignored."""
    monkeypatch.setattr(kernels, "COLUMNS", 32)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    z = (5 * torch.randn(5, 84, dtype=torch.float64)).to(dtype)[:, :80]
    z[:, 77:] = torch.nan
    z[3, :40] = -torch.inf
    y = torch.tensor([1000 + 3, 1000 + 76, 12, 1000 + 50, -100])
    place = {"ignore_index": -100, "first_column": 1000, "columns": 77}
    for numbers in (3, 4):
        rows = slice(0, 3) if numbers == 4 else slice(None)  # the sum of a row with -inf is -inf
        actual, expected = (torch.empty(len(z[rows]), numbers, dtype=wide) for _ in range(2))
        kernels.cross_entropy_statistics_(actual, z[rows], y[rows], **place)
        contract.cross_entropy_statistics_reference(expected, z[rows], y[rows], **place)
        assert_within_roundings(actual, expected)
    maxima, coefficients = torch.randn(5, dtype=wide) + 15, torch.randn(5, 3, dtype=wide)
    actual, expected = z.clone(), torch.empty_like(z)
    kernels.cross_entropy_gradient_(actual, actual, y, maxima, coefficients, **place)
    contract.cross_entropy_gradient_reference(expected, z, y, maxima, coefficients, **place)
    assert_within_roundings(actual, expected)
    assert not actual[:, 77:].any()
    assert actual[0].abs().max() > 0.1


def test_a_word_that_is_ignored_and_another_layout_of_the_gradient():
    """ignore_index is a word of this part, whose row is nan throughout; a row of -inf; the
    gradient's rows have other gaps."""
    z = torch.randn(4, 9)
    z[1], z[2] = torch.nan, -torch.inf
    y, place = torch.tensor([5, 3, 4, 8]), {"ignore_index": 3, "first_column": 0, "columns": 9}
    actual, expected = torch.empty(4, 3), torch.empty(4, 3)
    kernels.cross_entropy_statistics_(actual, z, y, **place)
    contract.cross_entropy_statistics_reference(expected, z, y, **place)
    assert actual[1].tolist() == [0.0, 1.0, 0.0]
    torch.testing.assert_close(actual, expected)
    out, wanted = torch.full((4, 13), 7.0), torch.empty(4, 9)
    coefficients = torch.randn(4, 3)
    kernels.cross_entropy_gradient_(
        out[:, :9], z, y, actual[:, 0].contiguous(), coefficients, **place
    )
    contract.cross_entropy_gradient_reference(
        wanted, z, y, expected[:, 0].contiguous(), coefficients, **place
    )
    torch.testing.assert_close(out[:, :9], wanted)
    assert wanted.isfinite().all()
    assert wanted[[0, 2, 3]].abs().min() > 0
    assert (out[:, 9:] == 7.0).all()


def test_extremes():
    """Rows of -inf, with inf, with nan; logits with a large number in common; no columns; no
    rows."""
    z = torch.randn(5, 40)
    z[0], z[1, 7], z[2, 39] = -torch.inf, torch.inf, torch.nan
    z[3] += 1e6
    y = torch.zeros(5).long()
    for columns in (40, 0):
        place = {"ignore_index": -100, "first_column": 0, "columns": columns}
        actual, expected = torch.empty(5, 4), torch.empty(5, 4)
        kernels.cross_entropy_statistics_(actual, z, y, **place)
        contract.cross_entropy_statistics_reference(expected, z, y, **place)
        if columns:
            assert actual[:, 1].isnan().tolist() == [False, True, True, False, False]
            assert actual[0, :2].tolist() == [-torch.inf, 0.0]
            torch.testing.assert_close(actual[3:], expected[3:])
            exact = (z[3].double() - z[3].double().max()).sum()
            assert (actual[3, 3].double() - exact).abs() < 1e-4
        else:
            assert actual.tolist() == [[-torch.inf, 0.0, 0.0, 0.0]] * 5
    none = torch.empty(0, 3)
    kernels.cross_entropy_statistics_(
        none, z[:0], y[:0], ignore_index=-100, first_column=0, columns=40
    )

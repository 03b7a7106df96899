"""The Triton kernels of the stems `scaled` and `code_rows`, run by the interpreter on CPU tensors;
see test_interpreter.py."""

from __future__ import annotations

import pytest
import torch

from pyops.ops.codes import code_rows as rows_contract
from pyops.ops.codes import scaled as contract
from pyops.ops.triton import code_rows, scaled
from tests.ops.triton.rounding import assert_within_roundings


def same_bits(found, expected) -> None:
    for a, e in zip(found, expected, strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("symmetric", [True, False])
def test_rows(symmetric: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scaled, "WIDEST", 16)  # wider rows go in chunks
    for width, dtype in ((1, torch.float32), (13, torch.bfloat16), (45, torch.float32)):
        x = torch.randn(6, width) * torch.logspace(-9, 4, 6)[:, None]
        x[1], x[2], x[3, 0], x[4, -1] = 0, x[2].abs(), torch.nan, -torch.inf
        x = x.to(dtype)
        options = {"symmetric": symmetric}
        same_bits(
            scaled.quantize_rows(x, None, None, **options),
            contract.quantize_rows_reference(x, None, None, **options),
        )
        same_bits(scaled.row_extents(x, **options), contract.row_extents_reference(x, **options))
        for n in (1, 6):
            scales, zeros = torch.rand(n) + 0.01, None
            if not symmetric:
                zeros = torch.arange(n, dtype=torch.int32) + 100
            same_bits(
                scaled.quantize_rows(x, scales, zeros, **options),
                contract.quantize_rows_reference(x, scales, zeros, **options),
            )


def test_sums():
    acc = torch.randint(-9999, 9999, (5, 600)).to(torch.int32)
    s, t, bias = torch.rand(5), torch.rand(600), torch.randn(600)
    for given, dtype in (
        ((acc, s, t, None, None, bias), torch.float32),
        ((acc, s[:1], t, None, None, None), torch.bfloat16),
        ((acc, s, t, acc[:, 0] % 256, acc[0] // 9, bias), torch.float32),
    ):
        for activation in (None, "relu"):
            options = {"activation": activation, "dtype": dtype}
            found = scaled.scale_product(*given, **options)
            expected = contract.scale_product_reference(*given, **options)
            if dtype == torch.float32:
                same_bits([found], [expected])
                if activation is None:
                    taken = given[0].clone()
                    scaled.scale_sums_(taken, *given[1:])
                    same_bits([taken.view(torch.float32)], [expected])
            else:  # which the interpreter rounds in its own way
                assert_within_roundings(found, expected)


# Bits, inputs, groups, whether there are zero points, x: 16 bytes that share a scale and fewer,
# rows that end within them, more than a tile
ROWS = (
    (8, 48, 3, False, torch.float32),
    (8, 9, 1, True, torch.bfloat16),
    (4, 11, 1, False, torch.float32),
    (4, 96, 12, True, torch.float16),
    (4, 192, 3, False, torch.bfloat16),
    ("e4m3", 70, 1, False, torch.float32),
)


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_code_rows(case, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(code_rows, "BYTES", 32)
    kind, width, groups, affine, dtype = case
    bits = 4 if kind == 4 else 8
    codes = torch.randint(0, 256, (10, width if bits == 8 else (width + 1) // 2)).to(torch.uint8)
    scales, zeros = torch.rand(10, groups), None
    if affine:
        zeros = torch.randint(0, 15, (10, groups)).to(torch.int32)
    elif kind == "e4m3":
        codes = codes.masked_fill(codes & 127 == 127, 126).view(torch.float8_e4m3fn)
        assert (codes.float().abs() < 2**-6).any(), "no number below the normal ones"
    elif kind == 8:
        codes = codes.view(torch.int8)
    x, bias = torch.randn(3, width).to(dtype)[1:], torch.randn(10)  # begins at an odd number
    given = (x, codes, scales, zeros, bias)
    found = code_rows.code_rows_product(*given, bits=bits)
    expected = rows_contract.code_rows_product_reference(*given, bits=bits)
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    else:
        assert_within_roundings(found, expected)
    assert expected.abs().max() > 1

"""int8_linear has the bits of a product and of what makes numbers of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.ops import library
from pyops.ops.codes.int8_linear import int8_linear, is_fast
from pyops.ops.codes.scaled import LONGEST, scale_product_reference

F32, BF16 = torch.float32, torch.bfloat16
# Rows, inputs, outputs: few rows, a tile of 12 rows and what is left of it, panels of 32 outputs
# and less, inputs that neither 4 nor 64 divide.
SHAPES = ((1, 1, 1), (3, 70, 33), (8, 64, 32), (9, 131, 40), (29, 66, 70), (961, 5, 3))


def codes(rows: int, inner: int, device: torch.device) -> Tensor:
    found = torch.randint(-127, 128, (rows, inner), device=device).to(torch.int8)
    found[0] = -127  # ends of the range, alike
    return found


def operands(rows: int, out: int, device: torch.device) -> tuple[Any, ...]:
    s, t, bias = torch.rand(rows), torch.rand(out), torch.randn(out)
    if rows > 1:
        s[rows // 2] = torch.nan
    return tuple(x.to(device) for x in (s, t, bias))


def exact(a: Tensor, weight: Tensor, *rest: Any, **options: Any) -> Tensor:
    acc = (a.cpu().long() @ weight.cpu().long().t()).to(torch.int32).to(a.device)
    return scale_product_reference(acc, *rest, **{"activation": None, **options})


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits(shape: tuple[int, int, int], device: torch.device, isa: str):
    rows, inner, out = shape
    a, weight = codes(rows, inner, device), codes(out, inner, device)
    s, t, bias = operands(rows, out, device)
    sums = weight.sum(1, dtype=torch.int32)
    op = torch.ops.pyops.int8_linear.default
    for dtype in (F32, BF16):
        for given in ((s, t, None, None, bias), (s[:1], t, None, None, None)):
            expected = exact(a, weight, *given, dtype=dtype)
            same(op(a, weight, *given, dtype=dtype), expected)
            same(int8_linear(a, weight, *given, dtype=dtype), expected)
    assert expected.abs().nan_to_num().max() > 0
    plain = (a ^ -128).view(torch.uint8)
    zeros = (torch.arange(rows, device=device) * 7 % 256).to(torch.int32)
    given = (s, t, zeros, sums, bias)
    acc = (plain.cpu().long() @ weight.cpu().long().t()).to(torch.int32).to(device)
    expected = scale_product_reference(acc, *given, activation=None, dtype=F32)
    same(int8_linear(plain, weight, *given), expected)


@pytest.mark.cpu_only
def test_the_longest_rows_and_any_number_of_threads():
    threads = torch.get_num_threads()
    for rows in (1, 13):
        a, weight = (torch.full((n, LONGEST), 127, dtype=torch.int8) for n in (rows, 3))
        weight[1] = -127
        one = torch.ones(1)
        expected = torch.tensor([127.0**2 * LONGEST, -(127.0**2) * LONGEST, 127.0**2 * LONGEST])
        assert torch.equal(int8_linear(a, weight, one, torch.ones(3)), expected.expand(rows, 3))
    a, weight = codes(50, 200, torch.device("cpu")), codes(300, 200, torch.device("cpu"))
    s, t, bias = operands(50, 300, torch.device("cpu"))
    found = []
    for n in (1, 3):
        torch.set_num_threads(n)
        found.append(int8_linear(a, weight, s, t, bias=bias))
    torch.set_num_threads(threads)
    same(*found)


@pytest.mark.cpu_only
def test_it_is_fast_with_the_widest_kernels_alone():
    for isa in library.isas():
        with library.use_isa(isa):
            assert not is_fast() or isa == "avx512"


def test_no_elements(device: torch.device):
    t = torch.ones(3, device=device)
    none = torch.zeros(0, 4, dtype=torch.int8, device=device)
    weight = torch.ones(3, 4, dtype=torch.int8, device=device)
    assert int8_linear(none, weight, t[:0], t).shape == (0, 3)
    assert int8_linear(none, weight, t[:1], t).shape == (0, 3)
    empty = int8_linear(none.new_zeros(2, 0), weight[:, :0], t[:2], t, bias=t)
    assert torch.equal(empty, torch.ones(2, 3, device=device))


A, ONES = torch.zeros(2, 4, dtype=torch.int8), torch.ones(3)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((A.float(), A, ONES[:2], ONES[:2]), "must be int8"),
        ((A, A[:, :3], ONES[:2], ONES[:2]), r"\[rows, K\] and weight \[out, K\]"),
        ((A, A, ONES, ONES[:2]), "row_scales must"),
        ((A, A, ONES[:2], ONES), "column_scales must"),
    ],
)
def test_what_is_refused(args, message):
    with pytest.raises((ValueError, TypeError), match=message):
        int8_linear(*args)
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        torch.ops.pyops.int8_linear(*args, None, None, None, dtype=F32)

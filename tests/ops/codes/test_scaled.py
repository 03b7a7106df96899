"""Rows to codes, exact sums, sums to numbers: bits, ends of the range, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyops.ops.codes import scaled

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def rows(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[4, 3, width]: of sizes far apart, with zeros, and rows that are not finite."""
    x = torch.randn(4, 3, width, device=device) * torch.logspace(-30, 4, 4, device=device).view(
        4, 1, 1
    )
    x[1, 1] = 0
    x[2, 0] = x[2, 0].abs()
    x[2, 2] = -x[2, 2].abs()
    if width > 1:
        x[1, 0, width // 2] = torch.nan
        x[1, 2, -1] = -torch.inf
        x[3, 2, 0] = torch.inf
    return x.to(dtype)


def same_bits(found, expected) -> None:
    for a, e in zip(found, expected, strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_have_the_bits_of_plain_torch(symmetric: bool, device: torch.device, isa: str):
    for width in (1, 7, 64, 1025):
        for dtype in (F32, BF16, F16):
            x = rows(width, dtype, device)
            found = torch.ops.pyops.quantize_rows(x, None, None, symmetric=symmetric)
            same_bits(found, scaled.quantize_rows_reference(x, None, None, symmetric=symmetric))
            assert found[0].float().abs().max() > 100
            extents = scaled.row_extents(x, symmetric=symmetric)
            same_bits(extents, scaled.row_extents_reference(x, symmetric=symmetric))
            lowest, highest = extents
            low, high = (-127, 127) if symmetric else (0, 255)
            scales, zeros = scaled.range_scales(lowest, highest, low=low, high=high)
            again = torch.ops.pyops.quantize_rows(x, scales, zeros, symmetric=symmetric)
            same_bits(again, found)


@pytest.mark.parametrize("symmetric", [True, False])
def test_one_scale_for_all_clips(symmetric: bool, device: torch.device, isa: str):
    x = torch.randn(5, 33, device=device)
    x[2, 4] = torch.nan
    scale = torch.tensor([0.01], device=device)
    zero = None if symmetric else torch.tensor([100], device=device, dtype=torch.int32)
    found = scaled.quantize_rows(x, scale, zero, symmetric=symmetric)
    expected = scaled.quantize_rows_reference(x, scale, zero, symmetric=symmetric)
    same_bits(found[:2], expected[:2])
    limits = (-127, 127) if symmetric else (0, 255)
    assert (int(found.codes.min()), int(found.codes.max())) == limits
    assert found.scales[2].isnan()
    assert (found.codes[2] == 0).all()
    assert (found.scales[[0, 1, 3, 4]] == scale).all()


def test_rows_by_hand(device: torch.device, isa: str):
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0], [-1.0, 0.0, 254.0, 3.0, 0.5]], device=device)
    found = scaled.quantize_rows(x)
    assert found.codes[0].tolist() == [127, 0, 2, -2, -127]
    assert found.scales.tolist() == [1.0, 2.0]
    odd = scaled.quantize_rows(x[1:], symmetric=False)
    assert (odd.codes[0].tolist(), odd.zero_points.tolist()) == ([0, 1, 255, 4, 1], [1])


@pytest.mark.parametrize("out_dtype", [F32, BF16, F16], ids=str)
def test_sums_have_the_bits_of_plain_torch(out_dtype: torch.dtype, device: torch.device, isa: str):
    for width in (1, 19, 1027):
        acc = torch.randint(-(2**31), 2**31 - 1, (3, 2, width), device=device).to(torch.int32)
        s, t, bias = torch.rand(3, 2), torch.rand(width) * 1e-9, torch.randn(width)
        s[1, 1] = torch.nan
        small = torch.randint(-(2**20), 2**20, (3, 2, width), device=device).to(torch.int32)
        zeros = torch.randint(0, 256, (3, 2), device=device).to(torch.int32)
        sums = torch.randint(-999, 999, (width,), device=device).to(torch.int32)
        s, t, bias = (x.to(device) for x in (s, t, bias))
        for given in (
            (acc, s, t, None, None, bias),
            (acc, s[:1, :1], t, None, None, None),
            (small, s, t, zeros, sums, None),
            (small, s, t, zeros, sums, bias),
        ):
            found = scaled.scale_product(*given, dtype=out_dtype)
            expected = scaled.scale_product_reference(*given, activation=None, dtype=out_dtype)
            same_bits([found], [expected])
            if out_dtype == F32:  # in the place of the sums, and with the very bits
                taken = given[0].clone()
                there = scaled.scale_sums_(taken, *given[1:])
                same_bits([there], [expected])
                assert there.data_ptr() == taken.data_ptr()
            relu = scaled.scale_product(*given, activation="relu", dtype=out_dtype)
            same_bits([relu], [torch.relu(expected)])
        assert found.float().abs().nan_to_num().max() > 0


def test_activations(device: torch.device, isa: str):
    acc = torch.arange(-60, 60, device=device, dtype=torch.int32).view(2, 60)
    s, t = torch.tensor([0.1, 0.2], device=device), torch.full((60,), 0.5, device=device)
    for name in scaled.ACTIVATIONS:
        found = scaled.scale_product(acc, s, t, activation=name)
        expected = scaled.scale_product_reference(
            acc.cpu(), s.cpu(), t.cpu(), None, None, None, activation=name, dtype=F32
        )
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.cpu_only
def test_sums_are_exact_up_to_the_longest_row():
    """At the ends of the codes, where sums of pairs would not fit 16 bits."""
    a = torch.full((2, scaled.LONGEST), 127, dtype=torch.int8)
    a[1] = -127
    weight = torch.full((3, scaled.LONGEST), -127, dtype=torch.int8)
    weight[1] = 127
    weight[2, ::2] = 127
    exact = (a.long() @ weight.long().t()).tolist()
    assert scaled.int8_product(a, weight).tolist() == exact
    assert abs(exact[0][0]) == 127 * 127 * scaled.LONGEST > 2**31 - 127 * 127
    n = scaled.LONGEST_ASYMMETRIC
    plain = torch.full((1, n), 255, dtype=torch.uint8)
    short = weight[:, :n].contiguous()
    found = scaled.int8_product(plain, short, short.sum(1, dtype=torch.int32))
    assert found.tolist() == (plain.long() @ short.long().t()).tolist()
    assert abs(found[0, 0].item()) == 255 * 127 * n > 2**31 - 255 * 127


def test_products_of_any_size(device: torch.device):
    for n, k, out in ((1, 1, 1), (3, 37, 5), (17, 64, 24), (0, 4, 3), (2, 0, 3)):
        a = torch.randint(-127, 128, (n, k), device=device).to(torch.int8)
        weight = torch.randint(-127, 128, (out, k), device=device).to(torch.int8)
        exact = (a.cpu().long() @ weight.cpu().long().t()).to(torch.int32)
        assert torch.equal(scaled.int8_product(a, weight).cpu(), exact)


@pytest.mark.cpu_only
def test_the_same_bits_for_any_number_of_threads(isa: str):
    x, threads, found = torch.randn(97, 1031), torch.get_num_threads(), []
    acc = torch.randint(-9999, 9999, (97, 1031)).to(torch.int32)
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            codes, scales, _ = scaled.quantize_rows(x)
            found.append((codes, scales, scaled.scale_product(acc, scales, x[0])))
    finally:
        torch.set_num_threads(threads)
    same_bits(*found)


ACC = torch.zeros(2, 4, dtype=torch.int32)
BYTES, ONES = ACC.to(torch.int8), torch.ones(4)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scaled.quantize_rows(ONES.double()), r"x must be float32.*got torch.float64"),
        (lambda: scaled.quantize_rows(torch.tensor(1.0)), r"x must be \[..., width\]; got one"),
        (lambda: scaled.quantize_rows(ACC.float(), ONES), r"scales must have 1 number or 2"),
        (
            lambda: scaled.quantize_rows(ONES, symmetric=False, scales=ONES[:1]),
            "zero_points belong",
        ),
        (lambda: scaled.scale_product(ACC.long(), ONES, ONES), "acc must be int32"),
        (lambda: scaled.scale_product(ACC, ONES[:3], ONES), r"row_scales must be.*1 or 2 numbers"),
        (lambda: scaled.scale_product(ACC, ONES[:2], ONES[:3]), r"column_scales must be.*of 4"),
        (lambda: scaled.scale_product(ACC, ONES[:1], ONES, ACC[0, :1]), "belong together"),
        (lambda: scaled.scale_product(ACC, ONES[:1], ONES, bias=ONES[:2]), "bias must be.*of 4"),
        (lambda: scaled.scale_product(ACC, ONES[:1], ONES, activation="tanh"), "got 'tanh'"),
        (lambda: scaled.scale_sums_(ACC.long(), ONES, ONES), "acc must be int32"),
        (lambda: scaled.int8_product(ACC, ACC), "a must be int8 or uint8"),
        (
            lambda: scaled.int8_product(ACC.to(torch.int8), ACC[:, :3].to(torch.int8)),
            r"\[rows, K\]",
        ),
        (lambda: scaled.int8_product(ACC.byte(), ACC.to(torch.int8)), "want `sums`"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ops: ops.quantize_rows(ACC.float(), ONES, None, symmetric=True), "1 number or 2"),
        (lambda ops: ops.row_extents(ONES.double(), symmetric=True), "x must be float32"),
        (
            lambda ops: ops.scale_product(
                ACC, ONES[:2], ONES, ACC[0, :1], ONES.int(), None, activation=None, dtype=F32
            ),
            "row_zeros must be int32 of 2",
        ),
    ],
)
def test_the_op_itself_refuses_what_does_not_fit(call, message):
    with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
        call(torch.ops.pyops)

"""accumulate_, sum_rows_, scale_cast_: bit for bit what plain torch gives in fp32 with one
rounding."""

from __future__ import annotations

import itertools

import pytest
import torch

from pyops.ops.communication import reduce

F = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 7, 31, 64, 2085)  # around a register and a tile
PAIRS = [*itertools.product(F, F), (torch.float64, torch.float64)]


def values(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers of many sizes, with infinities, nans, zeros and subnormals of the dtype among
    them."""
    x = torch.randn(n, device=device, dtype=torch.float64) * torch.exp2(
        torch.randint(-6, 7, (n,), device=device)
    )
    x = x.to(dtype)
    tiny = torch.finfo(dtype).tiny
    special = torch.tensor(
        [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, tiny / 4, tiny, -torch.finfo(dtype).max]
    )
    if n >= 64:
        x[8:24] = special.to(x).repeat(2)
        x[-8:] = special.to(x)
    return x


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())
    assert torch.equal(actual[~actual.isnan()].signbit(), expected[~expected.isnan()].signbit())


@pytest.mark.parametrize(("to", "source"), PAIRS, ids=str)
def test_every_pair_of_dtypes(to: torch.dtype, source: torch.dtype, device: torch.device, isa: str):
    for n in (*SIZES, 40001 if to == source else 100):  # enough for several threads
        out, rows = values(n, to, device), [values(n, source, device) for _ in range(4)]
        for op, reference, args in (
            (reduce.accumulate_, reduce.accumulate_reference, rows[0]),
            (reduce.scale_cast_, reduce.scale_cast_reference, rows[0]),
            (reduce.sum_rows_, reduce.sum_rows_reference, rows[:1]),
            (reduce.sum_rows_, reduce.sum_rows_reference, rows[:2]),
            (reduce.sum_rows_, reduce.sum_rows_reference, rows),
        ):
            for scale in (1.0, 0.3):
                actual, expected = out.clone(), out.clone()
                op(actual, args, scale=scale)
                reference(expected, args, scale=scale)
                assert_same_bits(actual, expected)


@pytest.mark.parametrize("dtype", [*F, torch.float64], ids=str)
def test_out_may_be_any_of_the_rows(dtype: torch.dtype, device: torch.device, isa: str):
    for n, position in itertools.product((5, 2085), range(3)):
        rows = [values(n, dtype, device) for _ in range(3)]
        expected = torch.empty_like(rows[0])
        reduce.sum_rows_reference(expected, rows, scale=0.5)
        reduce.sum_rows_(rows[position], rows, scale=0.5)
        assert_same_bits(rows[position], expected)


def test_the_order_of_the_list_is_the_order_of_the_sum(device: torch.device, isa: str):
    rows = [torch.full((40,), x, device=device) for x in (1e8, 1.0, -1e8)]
    out = torch.empty(40, device=device)
    reduce.sum_rows_(out, rows)
    assert out.unique().tolist() == [0.0]
    reduce.sum_rows_(out, [rows[0], rows[2], rows[1]])
    assert out.unique().tolist() == [1.0]


def test_one_rounding_for_many_16_bit_rows(device: torch.device, isa: str):
    """Seven rows of 1 on top of 256: each addition alone would be lost in bf16, whose spacing is 2
    there."""
    rows = [torch.full((33,), x, device=device, dtype=torch.bfloat16) for x in (256.0, *[1.0] * 7)]
    out = torch.empty(33, device=device, dtype=torch.bfloat16)
    reduce.sum_rows_(out, rows)
    assert out.unique().tolist() == [264.0]


def test_any_alignment_and_nothing_beside(device: torch.device, isa: str):
    for shift in (1, 3):
        memory = torch.full((200,), 9.0, device=device, dtype=torch.bfloat16)
        a = torch.ones(200, device=device, dtype=torch.bfloat16)
        reduce.accumulate_(memory[shift : shift + 77], a[shift + 2 : shift + 79])
        assert memory[:shift].unique().tolist() == [9.0]
        assert memory[shift + 77 :].unique().tolist() == [9.0]
        assert memory[shift : shift + 77].unique().tolist() == [10.0]


def test_refusals(device: torch.device):
    x = torch.zeros(4, device=device)
    error = (RuntimeError, ValueError)
    with pytest.raises(error, match="one size"):
        reduce.accumulate_(x, torch.zeros(5, device=device))
    with pytest.raises(error, match="contiguous"):
        reduce.scale_cast_(x, torch.zeros(8, device=device)[::2])
    with pytest.raises(error, match="dtypes must be of"):
        reduce.accumulate_(x, x.double())
    with pytest.raises(error, match="dtypes must be of"):
        reduce.accumulate_(x.int(), x.int())
    with pytest.raises(error, match="at least one row"):
        reduce.sum_rows_(x, [])
    with pytest.raises(error, match="one dtype"):
        reduce.sum_rows_(x, [x, x.half()])

"""The Triton kernels of the stem `dropout`, run by the interpreter on CPU tensors; see
test_interpreter.py."""

from __future__ import annotations

import pytest
import torch

from pyops.ops.layers import dropout as contract
from pyops.ops.triton import dropout as kernels
from tests.grids import full
from tests.ops.triton.rounding import assert_within_roundings

KEYS = (-7, (1 << 62) + 12345)


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize(
    ("dtype", "whole"),
    [*((dtype, False) for dtype in DTYPES[:2]), *(full(dtype, True) for dtype in DTYPES)],
    ids=str,
)
def test_bias_dropout_add_and_its_derivative(dtype: torch.dtype, whole: bool):
    """Of wide rows, unless `whole`, what a width can change: a row that is dropped whole, or to
    which nothing is added, is as a narrow one."""
    for shape, offset in (((3, 5), 5), ((0, 4), 0), ((2, 1100), (1 << 34) - 3)):
        each = whole or shape[-1] < 1000
        x = torch.randn(shape, dtype=torch.float64).to(dtype)
        residual, bias = (
            torch.randn(shape[::-1], dtype=torch.float64).to(dtype).mT,
            torch.randn(shape[-1]).to(dtype),
        )
        for key, p in list(zip(KEYS, (0.3, 1.0), strict=True))[: 2 if each else 1]:
            for state in (None, torch.tensor([key, offset])):
                for b, r in ((bias, residual), (None, None))[: 2 if each else 1]:
                    actual = kernels.bias_dropout_add(x, b, r, state, p=p)
                    assert_within_roundings(
                        actual, contract.bias_dropout_add_reference(x, b, r, state, p=p)
                    )
                dx, dbias = kernels.bias_dropout_add_backward(residual, state, p=p, bias_grad=True)
                expected, _ = contract.bias_dropout_add_backward_reference(
                    residual, state, p=p, bias_grad=True
                )
                assert_within_roundings(dx, expected)
                summed = (
                    residual if state is None else dx
                )  # the second launch reads what the first one wrote
                assert_within_roundings(dbias, summed.double().sum(0).to(dtype))


def dropped_as_the_reference_does(x: torch.Tensor, row: int, row_stride: int, offset: int) -> None:
    options = {"p": 0.4, "row": row, "row_stride": row_stride}
    state = torch.tensor([KEYS[1], offset])
    actual, expected = (
        kernels.dropout(x, state, **options),
        contract.dropout_reference(x, state, **options),
    )
    assert torch.equal(actual == 0, expected == 0)
    assert 0 < (actual == 0).sum() < x.numel()
    assert_within_roundings(actual, expected)


def test_dropout_of_part_of_each_row():
    small = torch.randn(4, 7, 10)
    for row, row_stride, offset in ((70, 210, 9), (7, 11, 2), (280, 280, 0), (1000, 5, 3)):
        dropped_as_the_reference_does(small, row, row_stride, offset)


@pytest.mark.full
def test_dropout_of_part_of_wide_rows():
    """Tiles are filled but for the start: one more block of the stream takes part."""
    wide = torch.randn(2, 4 * kernels.BLOCKS)
    dropped_as_the_reference_does(wide, 4 * kernels.BLOCKS, 1500, 3)


def test_a_bias_and_a_state_with_gaps():
    x, bias, state = torch.randn(3, 5), torch.randn(5, 2), torch.tensor([[KEYS[0], 4], [5, 6]])
    actual = kernels.bias_dropout_add(x, bias[:, 0], None, state[:, 0], p=0.4)
    assert torch.equal(
        actual, kernels.bias_dropout_add(x, bias[:, 0].clone(), None, state[:, 0].clone(), p=0.4)
    )
    options = {"p": 0.4, "row": 15, "row_stride": 15}
    assert torch.equal(
        kernels.dropout(x, state[:, 0], **options),
        kernels.dropout(x, state[:, 0].clone(), **options),
    )


def test_refusals():
    """The launchers check what memory they will touch, also where no wrapper did."""
    x, state = torch.zeros(2, 5), torch.tensor([KEYS[0], 0])
    with pytest.raises(ValueError, match=r"residual must be as x, \[2, 5\]"):
        kernels.bias_dropout_add(x, None, x[:1], state, p=0.5)
    with pytest.raises(ValueError, match=r"bias must be \[5\]"):
        kernels.bias_dropout_add(x, torch.zeros(4), None, state, p=0.5)
    with pytest.raises(ValueError, match="need row >= 1"):
        kernels.dropout(x, state, p=0.5, row=0, row_stride=1)
    with pytest.raises(ValueError, match=r"state must be int64 \[2\]"):
        kernels.bias_dropout_add_backward(x, state[:1], p=0.5, bias_grad=True)

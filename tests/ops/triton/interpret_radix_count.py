"""The Triton kernels of the stem `radix_count`, run by the interpreter on CPU tensors; see
test_interpreter.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyops.ops.sparse import radix_count as contract
from pyops.ops.triton.sparse import radix_count as kernels

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def numbers(n: int, dtype: torch.dtype) -> Tensor:
    """Equal ones, zeros of both signs, subnormals, inf."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    x[::3] = (x[::3] * 2).round() / 2
    x[1::7], x[2::7] = 0.0, -0.0
    x[3::11] *= 1e-40
    x[4::97] = -torch.inf
    return x.to(dtype)


@pytest.mark.parametrize("block", [64, 1024])
def test_counts(block: int, monkeypatch: pytest.MonkeyPatch):
    """Of one block and of several for each program; added to what is there."""
    monkeypatch.setattr(kernels, "BLOCK", block)
    monkeypatch.setattr(kernels, "PROGRAMS", 5)
    monkeypatch.setattr(kernels, "SHARES", 3)
    tensors = [numbers(n, dtype) for n, dtype in ((1, F32), (0, F32), (700, BF16), (77, F16))]
    tensors += [numbers(90, F32).view(9, 10).t(), torch.full((50,), -1.5)]
    for prefix in (None, 0, 0x3FC0):
        found, expected = (torch.full((contract.BINS,), 5) for _ in range(2))
        kernels.radix_count_(tensors, found, prefix=prefix)
        contract.radix_count_reference(tensors, expected, prefix=prefix)
        assert torch.equal(found, expected)
        assert int(found.max()) > 50


def test_a_row_of_counts_is_emptied_before_it_is_full(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "MOST", 100)
    found, expected = (torch.zeros(contract.BINS, dtype=torch.int64) for _ in range(2))
    tensors = [numbers(n, F32) for n in (60, 40, 80)]
    kernels.radix_count_(tensors, found, prefix=None)
    contract.radix_count_reference(tensors, expected, prefix=None)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [F32, BF16, F16, torch.float64], ids=str)
def test_bits(dtype: torch.dtype):
    for n in (0, 1, 7, 8, 65, 5000):
        x = numbers(n, F32).to(dtype)
        x[::5] = torch.nan
        bits = torch.randint(0, 256, (-(-n // 8),), dtype=torch.uint8)
        found, expected = x.clone(), x.clone()
        kernels.keep_bits_([found, found[:0]], [bits, bits[:0]])
        contract.keep_bits_reference([expected], [bits])
        assert torch.equal(found.nan_to_num(7.5), expected.nan_to_num(7.5))
        assert torch.equal(found.signbit(), expected.signbit())


def test_refusals():
    """The launchers check what memory they will touch, also where no wrapper did."""
    with pytest.raises(ValueError, match=r"counts must be int64 \[65536\]"):
        kernels.radix_count_([torch.zeros(2)], torch.zeros(4, dtype=torch.int64), prefix=None)
    with pytest.raises(ValueError, match=r"bits\[0\] must be uint8 \[2\]"):
        kernels.keep_bits_([torch.zeros(9)], [torch.zeros(1, dtype=torch.uint8)])

"""The Triton kernels of the stem `radix_count`, run by the interpreter on CPU tensors; see
test_interpreter.py."""

from __future__ import annotations

import pytest
import torch

from pyops.ops.sparse import radix_count as contract
from pyops.ops.triton import radix_count as kernels


def test_counts_and_masks():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = (torch.randn(5000) * 2).round().div(3).to(dtype)
        tensors = [x, x[:0], x[:7].neg()]
        for prefix in (None, int(contract.magnitude_patterns(x)[0]) >> 16):
            ours, plain = (torch.zeros(contract.BINS, dtype=torch.int64) for _ in range(2))
            kernels.radix_count_(tensors, ours, prefix=prefix)
            contract.radix_count_reference(tensors, plain, prefix=prefix)
            assert torch.equal(ours, plain)
            assert ours.any()
        bits = torch.randint(0, 256, (625,), dtype=torch.uint8)
        ours, plain = x.clone(), x.clone()
        kernels.keep_bits_([ours], [bits])
        contract.keep_bits_reference([plain], [bits])
        assert torch.equal(ours, plain)


def test_refusals():
    """The launcher checks what memory it will touch, also where no wrapper did."""
    with pytest.raises(ValueError, match="counts must be int64"):
        kernels.radix_count_([torch.ones(2)], torch.zeros(3), prefix=None)

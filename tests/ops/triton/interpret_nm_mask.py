"""The Triton kernel of the stem `nm_mask`, run by the interpreter on CPU tensors; see
test_interpreter.py."""

from __future__ import annotations

import pytest
import torch

from pyops.ops.sparse import nm_mask as contract
from pyops.ops.triton.sparse import nm_mask as kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_nm_mask(dtype: torch.dtype):
    for shape, dim, n, m in (
        ((7, 36), 1, 2, 4),
        ((2, 8, 3, 3), 1, 2, 4),
        ((24, 60), 0, 3, 8),
        ((0, 4), 1, 2, 4),
    ):
        w = torch.randint(-3, 4, shape).to(dtype)
        w = torch.where(torch.rand(shape) < 0.5, torch.randn(shape).to(dtype), w)
        if w.numel():
            w.view(-1)[1] = torch.nan
        options = {"n": n, "m": m, "dim": dim}
        expected = contract.nm_mask_reference(w, **options)
        for a, b in zip(kernels.nm_mask(w, **options), expected, strict=True):
            assert torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))


def test_refusals():
    """The launcher checks what memory it will touch, also where no wrapper did."""
    with pytest.raises(ValueError, match=r"dim 1 of \[2, 6\] must be a multiple of m = 4"):
        kernels.nm_mask(torch.zeros(2, 6), n=2, m=4, dim=1)

"""The Triton kernel of the stem `rotary`, run by the interpreter on CPU tensors; see
test_interpreter.py."""

from __future__ import annotations

import pytest
import torch

from pyops.ops.layers import rotary as contract
from pyops.ops.triton import rotary as kernels
from tests.ops.triton.rounding import assert_within_roundings


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved: bool):
    for dtype, (B, T, H, K, R), batched in (
        (torch.float32, (2, 3, 9, 12, 8), True),
        (torch.bfloat16, (1, 2, 3, 8, 8), False),
        (torch.float64, (2, 1, 1, 7, 6), False),
        (torch.float16, (1, 0, 2, 4, 2), True),
    ):
        x = torch.randn(B, H, T, K + 1, dtype=torch.float64).to(dtype).transpose(1, 2)[..., 1:]
        angle = torch.randn(*((B,) if batched else ()), T, R // 2)
        for inverse in (False, True):
            options = {"interleaved": interleaved, "inverse": inverse}
            actual = kernels.rotary(x, angle.cos(), angle.sin(), **options)
            assert_within_roundings(
                actual, contract.rotary_reference(x, angle.cos(), angle.sin(), **options)
            )


def test_refusals():
    """The launcher checks what memory it will touch, also where no wrapper did."""
    table = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"cos and sin must be float32 \[3, R/2\]"):
        kernels.rotary(torch.zeros(2, 3, 2, 6), table, table, interleaved=False, inverse=False)

"""No odd tensor brings an op down, or gets a wrong answer out of it: an error by name, or plain
torch's numbers."""

from __future__ import annotations

import pytest
import torch

from pyops.ops.optimizers.step import lists_of
from pyops.ops.optimizers.table import COLUMNS
from tests.odd_input.runs import wrong_in

pytestmark = pytest.mark.cpu_only
GRID = "tests.ops.odd_grid"


def test_odd_tensors_dealt_out_to_every_argument():
    assert wrong_in(GRID, "diagonal") == []


@pytest.mark.full
def test_every_odd_tensor_in_every_argument():
    assert wrong_in(GRID, "all") == []


def test_a_source_that_is_a_negative_view_is_read_with_its_sign():
    """torch's own answer for such an op is to write into a copy of `out` and to drop it."""
    source, out = torch.randn(6), torch.zeros(6)
    torch.ops.pyops.accumulate_.default(out, torch._neg_view(source), scale=1.0)
    assert torch.equal(out, -source)


def test_a_target_that_is_a_negative_view_is_refused_by_name():
    out = torch.zeros(6)
    with pytest.raises(ValueError, match=r"pyops::accumulate_: out is a view whose sign"):
        torch.ops.pyops.accumulate_.default(torch._neg_view(out), torch.ones(6), scale=1.0)
    assert torch.equal(out, torch.zeros(6))


@pytest.mark.parametrize("bytes_left", [0, 20])
def test_a_storage_that_is_too_short_is_named(bytes_left: int):
    short = torch.zeros(6)
    short.untyped_storage().resize_(bytes_left)
    with pytest.raises(
        RuntimeError,
        match=r"squared_norm.*argument 1\[1\] has elements but no memory.*24 bytes.* has "
        rf"{bytes_left};",
    ):
        torch.ops.pyops.squared_norm.default([torch.ones(3), short])


def test_meta_beside_real_tensors_is_refused_as_plain_torch_does():
    with pytest.raises(RuntimeError, match=r"argument 1 is on cpu, argument 2 is on meta"):
        torch.ops.pyops.rms_norm.default(
            torch.ones(2, 3), torch.ones(3, device="meta"), eps=1e-6, offset=0.0
        )


def test_pointers_are_read_of_a_table_alone():
    table = torch.zeros(2, COLUMNS, dtype=torch.int64)
    assert len(lists_of(table)[0][0]) == 2
    for other in (table.int(), table[:1].expand(2, -1), table[:, 1:], table[0]):
        with pytest.raises(ValueError, match=rf"contiguous int64 \[n, {COLUMNS}\].*got torch.int"):
            lists_of(other)


def test_zero_points_and_biases_of_other_shapes_are_named():
    codes, scales = torch.zeros(4, 6, dtype=torch.uint8), torch.ones(4, 1)
    zeros, x = torch.zeros(4, 1, dtype=torch.int32), torch.ones(2, 6)
    with pytest.raises(RuntimeError, match=r"zero_points must be \[4, 1\], got shape \[1, 4, 1\]"):
        torch.ops.pyops.code_rows_product.default(x, codes, scales, zeros[None], None, bits=8)
    with pytest.raises(RuntimeError, match=r"bias must be \[4\], got shape \[1, 4\]"):
        torch.ops.pyops.code_rows_product.default(
            x, codes, scales, zeros, torch.zeros(1, 4), bits=8
        )

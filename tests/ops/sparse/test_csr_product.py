"""The product of a sparse matrix against float64, and what it does not read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyops.ops.sparse.csr_product import csr_product, csr_product_reference
from tests.tolerance import assert_close_to_reference

pytestmark = pytest.mark.cpu_only


def taken_apart(dense: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """starts, columns and values."""
    csr = dense.to_sparse_csr()
    return csr.crow_indices(), csr.col_indices().int(), csr.values()


def sparse(rows: int, inputs: int, share: float, dtype: torch.dtype) -> Tensor:
    return torch.where(torch.rand(rows, inputs) < share, torch.randn(rows, inputs), 0.0).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_against_float64(dtype: torch.dtype, isa: str):
    for rows, inputs, width, share in (
        (7, 5, 3, 0.4),
        (33, 64, 300, 0.1),
        (4, 9, 129, 1.0),
        (3, 4, 16, 0.0),
        (0, 4, 5, 0.5),
        (6, 4, 0, 0.5),
    ):
        A, straight = sparse(rows, inputs, share, dtype), torch.randn(inputs, width).to(dtype)
        for x in (straight, straight.t().contiguous().t()):
            exact = A.double() @ x.double()
            size = max(1.0, float(exact.abs().max())) if exact.numel() else 1.0
            found = csr_product(*taken_apart(A), x)
            assert found.dtype == dtype
            tiny = 2 * torch.finfo(dtype).eps * size
            assert_close_to_reference(found, A @ x, exact, tiny=tiny)
    assert float(csr_product(*taken_apart(torch.eye(3)), torch.eye(3)).sum()) == 3.0


def test_the_same_bits_for_any_number_of_threads(isa: str):
    A, x, threads = sparse(201, 120, 0.2, torch.float32), torch.randn(120, 150), 0
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(csr_product(*taken_apart(A), x))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    # A row's bits do not depend on those beside it
    assert torch.equal(csr_product(*taken_apart(A[50:60]), x), found[0][50:60])


def test_memory_that_is_not_there_is_not_read(isa: str):
    starts, columns, values = taken_apart(sparse(4, 6, 0.5, torch.float32))
    x = torch.randn(6, 5)
    worse = starts.clone()
    worse[2] = len(values) + 1
    for changed, message in (
        ((starts, torch.full_like(columns, 6), values), "columns"),
        ((starts, torch.full_like(columns, -1), values), "columns"),
        ((worse, columns, values), "starts must rise"),
        ((starts + 1, columns, values), "starts must (go|rise) from 0"),
    ):
        for call in (csr_product, csr_product_reference):
            with pytest.raises(RuntimeError, match=message):
                call(*changed, x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 2).half()}, r"both float64; got torch.float32 and torch.float16"),
        ({"x": torch.zeros(3)}, r"x must be \[inputs, width\].*got \[3\]"),
        ({"starts": torch.zeros(3, dtype=torch.int32)}, r"starts must be int64.*torch.int32"),
        ({"columns": torch.zeros(2, dtype=torch.int32)}, r"got \[2\] and \[1\]"),
        ({"starts": torch.zeros(0, dtype=torch.int64)}, r"starts \[rows \+ 1\]; got"),
    ],
)
def test_what_is_refused(change: dict, message: str):
    given = {
        "starts": torch.tensor([0, 1]),
        "columns": torch.zeros(1, dtype=torch.int32),
        "values": torch.ones(1),
        "x": torch.zeros(3, 2),
    } | change
    with pytest.raises((ValueError, TypeError), match=message):
        csr_product(**given)
    with pytest.raises(RuntimeError, match="csr_product"):
        torch.ops.pyops.csr_product.default(*given.values())

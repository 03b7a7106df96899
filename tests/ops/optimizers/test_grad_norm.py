"""squared_norm: float64 accuracy, the count of what is not finite, and the same bits for any number
of threads."""

from __future__ import annotations

import pytest
import torch

from pyops.ops.optimizers import grad_norm
from pyops.ops.optimizers.table import optimizer_table
from tests.ops.samples import adam_lists

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(dtype: torch.dtype, device: torch.device, isa: str):
    tensors = [torch.randn(n, device=device).to(dtype) for n in (0, 1, 31, 64, 16384, 16385, 50001)]
    tensors += [
        torch.randn(5, 40, device=device).to(dtype).t(),
        torch.tensor(2.0, device=device).to(dtype),
    ]
    out = grad_norm.squared_norm(tensors)
    expected = sum(float(t.double().square().sum()) for t in tensors)
    assert out.dtype == torch.float64
    assert out.shape == (2,)
    assert out[0].item() == pytest.approx(expected, rel=1e-13)
    assert out[1].item() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nonfinite_elements_are_counted(dtype: torch.dtype, device: torch.device, isa: str):
    x = torch.ones(40003, device=device).to(dtype)
    x[[3, 20000, 40002]] = torch.tensor([torch.inf, torch.nan, -torch.inf], device=device).to(dtype)
    assert grad_norm.squared_norm([x])[1].item() == 3
    assert grad_norm.squared_norm([x])[0].isnan()
    only_inf = torch.ones(9, device=device).to(dtype)
    only_inf[4] = -torch.inf
    assert grad_norm.squared_norm([x[100:300], only_inf]).tolist() == [torch.inf, 1.0]


def test_largest_numbers_do_not_overflow(device: torch.device, isa: str):
    x = torch.full((1000,), torch.finfo(torch.float32).max, device=device)
    squares, nonfinite = grad_norm.squared_norm([x]).tolist()
    assert nonfinite == 0
    assert squares == pytest.approx(1000 * float(torch.finfo(torch.float32).max) ** 2, rel=1e-13)


@pytest.mark.cpu_only
def test_same_bits_for_any_number_of_threads(isa: str):
    if isa == "one":
        pytest.skip("plain torch promises no order")
    tensors = [torch.randn(n) for n in (70001, 5, 33333)]
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(grad_norm.squared_norm(tensors))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_from_table_is_the_norm_of_the_gradients(device: torch.device, isa: str):
    lists = adam_lists(device, ((5,), (0,), (3, 40), (20000,)))
    lists[1][0] = lists[1][0].half()
    table = optimizer_table(*lists)
    if device.type == "cpu":
        assert torch.equal(
            grad_norm.squared_norm_from_table(table), grad_norm.squared_norm(lists[1])
        )
    torch.testing.assert_close(
        grad_norm.squared_norm_from_table(table),
        grad_norm.squared_norm_reference(lists[1]),
        rtol=1e-13,
        atol=0.0,
    )


def test_refusals(device: torch.device):
    with pytest.raises(ValueError, match="at least one tensor"):
        grad_norm.squared_norm([])
    with pytest.raises((RuntimeError, ValueError), match="gaps or overlaps"):
        grad_norm.squared_norm([torch.zeros(4, 4, device=device)[:, :2]])
    with pytest.raises((RuntimeError, ValueError), match="float32, bfloat16 or float16"):
        grad_norm.squared_norm([torch.zeros(4, device=device, dtype=torch.int32)])
    with pytest.raises((RuntimeError, ValueError), match="optimizer_table"):
        grad_norm.squared_norm_from_table(torch.zeros(3, 5, dtype=torch.int64, device=device))

"""linear of few rows: values, bits, when the kernel is used, what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pyops.ops.layers import few_rows

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# Rows below, of and above a group; widths below a register, with a rest; outputs of each block.
SHAPES = ((1, 3, 1), (1, 37, 21), (2, 64, 13), (3, 33, 9), (4, 20, 4), (7, 50, 6), (16, 19, 3))


def operands(
    rows: int, width: int, outputs: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    shapes = ((rows, width), (outputs, width), (outputs,))
    return [torch.randn(shape, device=device, dtype=F64).to(dtype) for shape in shapes]


def kernel(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.pyops.few_rows_linear.default(x, weight, bias)


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
def test_against_float64(dtype: torch.dtype, device: torch.device, isa: str):
    for shape in SHAPES:
        x, weight, bias = operands(*shape, dtype, device)
        for b in (None, bias):
            found = kernel(x, weight, b)
            exact = functional.linear(
                x.double(), weight.double(), None if b is None else b.double()
            )
            assert found.dtype == dtype
            assert found.shape == exact.shape
            bound = {F64: 1e-13, F32: 1e-5, BF16: 2**-8, F16: 2**-11}[dtype]
            error = (found.double() - exact).abs().max()
            assert error <= bound * max(1.0, float(exact.abs().max()))


@pytest.mark.cpu_only
def test_a_row_has_the_same_bits_beside_others_and_on_any_number_of_threads(isa: str):
    x, weight, bias = operands(16, 67, 1203, F32, torch.device("cpu"))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([kernel(row[None], weight, bias) for row in x])
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            for rows in (2, 3, 5, 16):
                assert torch.equal(kernel(x[:rows], weight, bias), alone[:rows])
        assert torch.equal(kernel(x, weight[5:99], bias[5:99]), alone[:, 5:99])
    finally:
        torch.set_num_threads(threads)


class Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.cpu_only
@pytest.mark.parametrize("case", ["used", "gradients", "many rows", "autocast", "other dtype"])
def test_where_the_kernel_is_used(case: str):
    device = torch.device("cpu")
    x, weight, bias = operands(65 if case == "many rows" else 64, 8, 5, F32, device)
    if case == "other dtype":
        x = x.to(BF16)
        weight = weight.double()
    with (
        torch.set_grad_enabled(case == "gradients"),
        torch.autocast("cpu", enabled=case == "autocast"),
        Called() as called,
    ):
        if case == "other dtype":
            with pytest.raises(RuntimeError):
                few_rows.linear(x, weight)
            return
        y = few_rows.linear(x, weight.requires_grad_(case == "gradients"), bias)
    assert ("pyops::few_rows_linear" in called.names) == (case == "used")
    assert y.requires_grad == (case == "gradients")
    bound = 0.05 if case == "autocast" else 1e-5
    torch.testing.assert_close(y.float(), functional.linear(x, weight, bias), rtol=0, atol=bound)


def test_no_rows_and_no_width(device: torch.device):
    x, weight, bias = operands(2, 4, 3, F32, device)
    assert kernel(x[:0], weight, bias).shape == (0, 3)
    assert torch.equal(kernel(x[:, :0], weight[:, :0], bias), bias.expand(2, 3))
    assert kernel(x, weight[:0]).shape == (2, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, b: (x, w[:, :3], b), "weight"),
        (lambda x, w, b: (x, w[0], b), "weight"),
        (lambda x, w, b: (x, w.double(), b), "float64|dtype"),
        (lambda x, w, b: (x.int(), w.int(), None), "int32|float32"),
        (lambda x, w, b: (x, w, b[:2]), "bias"),
        (lambda x, w, b: (x, w, b.double()), "bias"),
    ],
)
def test_what_is_refused(change, message: str, device: torch.device):
    given = change(*operands(2, 4, 3, F32, device))
    for call in (kernel, few_rows.few_rows_linear_reference):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            call(*given)

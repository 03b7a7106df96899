"""The Triton kernels of the stem `activation`, run by the interpreter on CPU tensors; see
test_interpreter.py."""

from __future__ import annotations

import pytest
import torch

from pyops.ops.layers import activation as contract
from pyops.ops.triton import activation as kernels
from tests.ops.triton.rounding import assert_within_roundings

SHAPES = ((2, 3, 6), (0, 4), (5, 700), (6,))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def operands(
    shape: tuple[int, ...], dtype: torch.dtype, *, gated: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x with gaps between its rows, bias, and dy, transposed where that is possible."""
    width = 2 * shape[-1] if gated else shape[-1]
    x = (3 * torch.randn(*shape[:-1], width + 1, dtype=torch.float64)).to(dtype)[..., :width]
    return (
        x,
        torch.randn(width, dtype=torch.float64).to(dtype),
        torch.randn(shape[::-1], dtype=torch.float64).to(dtype).mT
        if len(shape) == 2
        else torch.randn(shape, dtype=torch.float64).to(dtype),
    )


@pytest.mark.parametrize("op", ["bias_activation", "bias_gated"])
def test_forward_and_backward(op: str):
    """Each activation and each dtype once, then other shapes."""
    cases = [
        ((3, 5), name, dtype) for name, dtype in zip(contract.ACTIVATIONS, DTYPES, strict=True)
    ]
    for i, (shape, name, dtype) in enumerate(
        [*cases, *((shape, "gelu", torch.float32) for shape in SHAPES)]
    ):
        x, bias, dy = operands(shape, dtype, gated=op == "bias_gated")
        b = bias if i % 3 else None
        actual = getattr(kernels, op)(x, b, activation=name)
        assert_within_roundings(actual, getattr(contract, f"{op}_reference")(x, b, activation=name))
        options = {"activation": name, "bias_grad": b is not None}
        gradients = getattr(kernels, f"{op}_backward")(dy, x, b, **options)
        for a, e in zip(
            gradients,
            getattr(contract, f"{op}_backward_reference")(dy, x, b, **options),
            strict=True,
        ):
            assert_within_roundings(a, e)
            assert not x.numel() or not e.numel() or e.abs().max() > 0


def test_the_slope_of_gelu_near_its_root_has_the_digits_of_fp16():
    """Between -0.76 and -0.745 it is a difference of two numbers of 0.22, from which an
    approximation that serves the value would leave nothing."""
    z = torch.linspace(-0.76, -0.745, 400, dtype=torch.float64).half()
    bias = torch.full((1,), 1e-4, dtype=torch.float16).expand(400).contiguous()
    dy = torch.ones_like(z)[None]
    found, _ = kernels.bias_activation_backward(
        dy, z[None], bias, activation="gelu", bias_grad=False
    )
    exact = (z.double() + bias.double()).requires_grad_()
    torch.nn.functional.gelu(exact).sum().backward()
    error = (found[0].double() - exact.grad).abs()
    assert (error <= 1e-6 + 2**-11 * exact.grad.abs()).all()
    assert found.abs().max() > 1e-3


def test_many_row_blocks_add_up_in_order(monkeypatch: pytest.MonkeyPatch):
    """More tiles than blocks: each block walks several tiles, the last ones past the end."""
    monkeypatch.setattr("pyops.ops.triton.column_sum.MOST_BLOCKS", 3)
    x, bias, dy = operands((29, 5), torch.float32, gated=False)
    options = {"activation": "gelu", "bias_grad": True}
    for a, e in zip(
        kernels.bias_activation_backward(dy, x, bias, **options),
        contract.bias_activation_backward_reference(dy, x, bias, **options),
        strict=True,
    ):
        assert_within_roundings(a, e)


def test_small_values_keep_their_digits():
    """Far out, where 1 + erf and 1 - s have none left. The interpreter does not fuse: 2e-5."""
    z = torch.linspace(-12.0, -3.0, 200).view(4, 50)
    exact = z.double() * torch.special.erfc(z.double() * -(0.5**0.5)) / 2
    density = torch.exp(-(z.double() ** 2) / 2) / (2 * torch.pi) ** 0.5
    one = torch.ones_like(z)
    for dtype in (torch.float32, torch.bfloat16):
        x, tolerance = z.to(dtype), 2e-5 if dtype == torch.float32 else 1e-2
        if dtype == torch.bfloat16:
            exact = x.double() * torch.special.erfc(x.double() * -(0.5**0.5)) / 2
            density = torch.exp(-(x.double() ** 2) / 2) / (2 * torch.pi) ** 0.5
        y = kernels.bias_activation(x, None, activation="gelu")
        torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=0.0)
        slope, _ = kernels.bias_activation_backward(
            one.to(dtype), x, None, activation="gelu", bias_grad=False
        )
        expected = exact / x.double() + x.double() * density
        torch.testing.assert_close(slope.double(), expected, rtol=2 * tolerance, atol=0.0)
    rest, _ = kernels.bias_activation_backward(one, -z, None, activation="silu", bias_grad=False)
    s = torch.sigmoid(-z.double())
    torch.testing.assert_close(
        rest.double(), s * (1 - z.double() * torch.sigmoid(z.double())), rtol=1e-6, atol=0.0
    )


@pytest.mark.parametrize("name", contract.ACTIVATIONS)
def test_a_nan_stays_one(name: str):
    """In y and in dx: a minimum or a maximum on the way would swallow it. relu's slope is 1 there,
    as plain torch has it."""
    x, dy = torch.tensor([[torch.nan, 1.0, -2000.0]]), torch.ones(1, 3)
    assert kernels.bias_activation(x, None, activation=name).isnan().tolist() == [
        [True, False, False]
    ]
    dx, _ = kernels.bias_activation_backward(dy, x, None, activation=name, bias_grad=False)
    expected, _ = contract.bias_activation_backward_reference(
        dy, x, None, activation=name, bias_grad=False
    )
    torch.testing.assert_close(dx, expected, equal_nan=True)
    assert dx.isnan().tolist() == [[name != "relu", False, False]]


def test_a_bias_with_gaps():
    x, bias, dy = operands((3, 6), torch.float32, gated=True)
    gaps = torch.stack([bias, bias + 9.0], dim=-1)[:, 0]
    dense, options = torch.randn(3, 12), {"activation": "silu"}
    assert torch.equal(
        kernels.bias_gated(x, gaps, **options), kernels.bias_gated(x, bias, **options)
    )
    assert torch.equal(
        kernels.bias_activation(x, gaps, **options), kernels.bias_activation(x, bias, **options)
    )
    for kernel, d in ((kernels.bias_gated_backward, dy), (kernels.bias_activation_backward, dense)):
        for a, e in zip(
            *(kernel(d, x, b, **options, bias_grad=True) for b in (gaps, bias)), strict=True
        ):
            assert torch.equal(a, e)


def test_refusals():
    """The launchers check what memory they will touch, also where no wrapper did."""
    x, wide, options = (
        torch.zeros(2, 5),
        torch.zeros(2, 6),
        {"activation": "gelu", "bias_grad": False},
    )
    with pytest.raises(
        ValueError, match=r"bias_activation: dy must be \[2, 5\] torch.float32, as y; got \[1, 5\]"
    ):
        kernels.bias_activation_backward(x[:1], x, None, **options)
    with pytest.raises(
        ValueError, match=r"bias_gated: dy must be \[2, 3\] torch.float32, as y; got \[2, 6\]"
    ):
        kernels.bias_gated_backward(wide, wide, None, **options)
    with pytest.raises(ValueError, match="its size is even"):
        kernels.bias_gated(x, None, activation="silu")
    for kernel in (kernels.bias_activation, kernels.bias_gated):
        with pytest.raises(ValueError, match=r"activation must be one of .*; got 'elu'"):
            kernel(wide, None, activation="elu")
        with pytest.raises(ValueError, match=r"bias must be \[6\]"):
            kernel(wide, torch.zeros(5), activation="silu")

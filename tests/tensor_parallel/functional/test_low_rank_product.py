"""A frozen linear layer and its adapter as one Function, against the operations one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pyops.adapters import LoRA
from pyops.mesh import ALONE
from pyops.tensor_parallel import ColumnParallelLinear
from pyops.tensor_parallel.functional.low_rank_product import low_rank_product

SCALE = 1.5


def operands(dtype: torch.dtype, *, bias: bool = True) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    x, weight, a, b = (
        torch.randn(*shape, dtype=torch.float64) for shape in ((2, 3, 6), (5, 6), (2, 6), (5, 2))
    )
    found = {"x": x, "weight": weight, "bias": torch.randn(5) if bias else None, "a": a, "b": b}
    return {name: t if t is None else t.to(dtype) for name, t in found.items()}


def one_by_one(x, weight, bias, a, b) -> Tensor:
    return functional.linear(x, weight, bias) + SCALE * (x @ a.t() @ b.t())


def fused(x, weight, bias, a, b) -> Tensor:
    return low_rank_product(x, weight, bias, (a, b), scale=SCALE)


def trained(given: dict[str, Tensor | None]) -> list[Tensor]:
    return [given[name].requires_grad_() for name in ("x", "a", "b")]


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_first_and_second_order(bias):
    given = operands(torch.float64, bias=bias)

    def of(x, a, b) -> Tensor:
        return fused(x, given["weight"], given["bias"], a, b)

    leaves = trained(given)
    assert torch.autograd.gradcheck(of, leaves)
    assert torch.autograd.gradgradcheck(of, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_the_operations_one_by_one(dtype):
    exact, rounded = operands(torch.float64), operands(dtype)
    results = []
    for given, product in ((exact, one_by_one), (rounded, fused)):
        trained(given)
        y = product(**given)
        results.append([y, *torch.autograd.grad(y.sum(), [given[n] for n in "xab"])])
    for want, got in zip(*results, strict=True):
        assert got.dtype == dtype
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["x", "a", "b"])
def test_only_what_requires_a_gradient_has_one(name):
    found = []
    for product in (fused, one_by_one):
        given = operands(torch.float64)
        given[name].requires_grad_()
        product(**given).square().sum().backward()
        assert all(t.grad is None for key, t in given.items() if key != name)
        found.append(given[name].grad)
    assert found[0].any()
    torch.testing.assert_close(*found)


def test_gradients_of_single_samples():
    given = operands(torch.float64)
    xs, weight, bias = given["x"], given["weight"], given["bias"]

    def loss(factors: tuple[Tensor, Tensor], x: Tensor, product=fused) -> Tensor:
        return product(x, weight, bias, *factors).square().sum()

    factors = (given["a"], given["b"])
    of_each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(factors, xs)
    for i, x in enumerate(xs):
        want = torch.func.grad(lambda f, x=x: loss(f, x, one_by_one))(factors)
        for found, expected in zip(of_each, want, strict=True):
            torch.testing.assert_close(found[i], expected)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_layer_whose_weight_is_trained_too(frozen):
    """It is computed by the operations one by one: the weight has its gradient."""
    layer = ColumnParallelLinear(6, 5, group=ALONE, dtype=torch.float64)
    adapters = LoRA(torch.nn.Sequential(layer), rank=2)
    with torch.no_grad():
        layer.adapter.B.normal_()
    layer.weight.requires_grad_(not frozen)
    x = torch.randn(3, 6, dtype=torch.float64)
    y = layer(x)
    y.square().sum().backward()
    scale = adapters.alpha / adapters.rank
    expected = functional.linear(x, layer.weight, layer.bias)
    expected = expected + scale * (x @ layer.adapter.A.t() @ layer.adapter.B.t())
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(layer.adapter.B.grad, scale * 2 * y.t() @ (x @ layer.adapter.A.t()))
    if frozen:
        assert layer.weight.grad is None
    else:
        torch.testing.assert_close(layer.weight.grad, 2 * y.t() @ x)


def test_no_break_of_a_compiled_graph():
    given = operands(torch.float64)
    leaves = trained(given)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(**given).sum(), leaves)
    expected = torch.autograd.grad(one_by_one(**given).sum(), leaves)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)

"""bias_activation and bias_gated: values and gradients against float64, special numbers, shapes,
and what they save."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pyops.ops.layers import activation
from tests.tolerance import assert_close_to_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
    "relu": torch.relu,
    "silu": functional.silu,
}
SHAPES = (
    (7,),
    (3, 5),
    (2, 3, 64),
    (2100, 17),
    (5, 2080),
)  # 2100 rows: several blocks, the last not full; 2080: two tiles
EPS = torch.finfo(torch.float32).eps


def plain(x: Tensor, bias: Tensor | None, name: str, *, gated: bool) -> Tensor:
    z = x if bias is None else x + bias
    if not gated:
        return PLAIN[name](z)
    gate, up = z.chunk(2, dim=-1)
    return PLAIN[name](gate) * up


def ours(x: Tensor, bias: Tensor | None, name: str, *, gated: bool) -> Tensor:
    return (activation.bias_gated if gated else activation.bias_activation)(
        x, bias, activation=name
    )


def results(
    f: Callable[..., Tensor], x: Tensor, bias: Tensor | None, dy: Tensor, name: str, *, gated: bool
) -> list[Tensor]:
    """y, dx and, with a bias, dbias."""
    leaves = [t.detach().requires_grad_() for t in (x, bias) if t is not None]
    y = f(*leaves, *[None] * (2 - len(leaves)), name, gated=gated)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def operands(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, gated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x, bias and dy for a y of `shape`."""
    width = 2 * shape[-1] if gated else shape[-1]
    x = 3 * torch.randn(*shape[:-1], width, device=device, dtype=torch.float64)
    bias, dy = (torch.randn(n, device=device, dtype=torch.float64) for n in ((width,), shape))
    return x.to(dtype), bias.to(dtype), dy.to(dtype)


def largest_terms(x: Tensor, bias: Tensor | None, dy: Tensor, *, gated: bool) -> list[Tensor]:
    """What is rounded on the way to y, dx and dbias, in float64: 1 + erf, not the small number that
    it may leave, times z."""
    z, dy = (x if bias is None else x + bias).double().abs(), dy.double().abs()
    gate, up = z.chunk(2, dim=-1) if gated else (z, torch.ones_like(z))
    dx = torch.cat([dy * up, dy * gate], dim=-1) if gated else dy
    return [gate * up, dx, dx.reshape(-1, x.shape[-1]).sum(0)]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", activation.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_worse_than_twice_plain_torch(
    dtype: torch.dtype, name: str, gated: bool, device: torch.device, isa: str
):
    for i, shape in enumerate(SHAPES):
        x, b, dy = operands(shape, dtype, device, gated=gated)
        bias = b if i % 2 else None
        exact = results(
            plain,
            x.double(),
            None if bias is None else bias.double(),
            dy.double(),
            name,
            gated=gated,
        )
        torchs = results(plain, x, bias, dy, name, gated=gated)
        terms = largest_terms(x, bias, dy, gated=gated)
        for actual, other, reference, term in zip(
            results(ours, x, bias, dy, name, gated=gated),
            torchs,
            exact,
            terms,
            strict=bias is not None,
        ):
            assert reference.abs().max() > 0, "a zero gradient would pass"
            tiny = torch.finfo(dtype).eps * reference.abs() + 2 * EPS * term
            assert_close_to_reference(actual, other, reference, tiny=tiny.cpu())  # type: ignore[arg-type]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", activation.ACTIVATIONS)
def test_float64(name: str, gated: bool, device: torch.device):
    x, bias, dy = operands((70, 33), torch.float64, device, gated=gated)
    for actual, expected in zip(
        results(ours, x, bias, dy, name, gated=gated),
        results(plain, x, bias, dy, name, gated=gated),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", activation.ACTIVATIONS)
def test_gradcheck(name: str, device: torch.device):
    for gated in (False, True):
        x, bias, _ = operands((3, 4), torch.float64, device, gated=gated)
        for strided in (x, x.mT.contiguous().mT):
            leaves = strided.requires_grad_(), bias.requires_grad_()
            assert torch.autograd.gradcheck(lambda x, b, g=gated: ours(x, b, name, gated=g), leaves)


@pytest.mark.cpu_only
def test_a_small_gelu_keeps_its_digits(device: torch.device, isa: str):
    """z Phi(z) for z down to -9 within 48 units in the last place, where 1 + erf(z / sqrt(2)) has
    no digit left.

    Half of the rounding of z^2 is 40 units at -9; nearer to 0 it is as little as everywhere.
    """
    if isa == "one":
        pytest.skip("plain torch's own gelu")
    z = torch.linspace(-9, 9, 20001, device=device)
    y = activation.bias_activation(z, activation="gelu").double()
    exact = z.double() * 0.5 * torch.erfc(-z.double() * 0.5**0.5)
    units = torch.where(z.abs() < 2, 6.0, 48.0)
    assert ((y - exact).abs() <= units * EPS * exact.abs()).all()


@pytest.mark.parametrize("name", activation.ACTIVATIONS)
def test_special_numbers_are_plain_torchs(name: str, device: torch.device, isa: str):
    """Infinities, a nan, numbers whose cube or exponential overflows: in registers and in what is
    left over."""
    special = [
        torch.inf,
        -torch.inf,
        torch.nan,
        0.0,
        1e30,
        -1e30,
        1e-40,
        -1e-40,
        88.0,
        -88.0,
        -104.0,
        -2000.0,
    ]
    z = torch.tensor(special * 3, device=device)
    y, dx = results(ours, z, None, torch.ones_like(z), name, gated=False)
    exact = results(
        plain, z.double().cpu(), None, torch.ones_like(z).double().cpu(), name, gated=False
    )
    torch.testing.assert_close(y.cpu(), exact[0].float(), equal_nan=True, rtol=1e-5, atol=1e-30)
    wide = ours(z.double(), None, name, gated=False)
    torch.testing.assert_close(wide.cpu(), exact[0], equal_nan=True, rtol=1e-12, atol=1e-30)
    finite = (
        z.isfinite().cpu() | z.isnan().cpu()
    )  # at infinity plain torch's slope is nan where there is a limit of 0 or 1
    torch.testing.assert_close(
        dx.cpu()[finite], exact[1].float()[finite], equal_nan=True, rtol=1e-5, atol=1e-30
    )


def test_any_strides_and_sizes(device: torch.device, isa: str):
    for gated in (False, True):
        for shape in ((0, 4), (3, 0), (0,), (2, 0, 4)):
            x, bias, dy = operands(shape, torch.float32, device, gated=gated)
            y, dx, dbias = results(ours, x, bias, dy, "gelu", gated=gated)
            assert (y.shape, dx.shape, dbias.shape) == (shape, x.shape, bias.shape)
            assert not dbias.any()
        x, bias, dy = operands((6, 5, 8), torch.float32, device, gated=gated)
        expected = results(ours, x, bias, dy, "silu", gated=gated)
        gaps = torch.stack([x, x], dim=-1)[..., 0]
        strided = results(
            ours,
            gaps,
            torch.stack([bias, bias], -1)[:, 0],
            dy.transpose(0, 1).contiguous().transpose(0, 1),
            "silu",
            gated=gated,
        )
        assert all(torch.equal(a, b) for a, b in zip(expected, strided, strict=True))
        assert strided[0].is_contiguous()
        assert not gaps.is_contiguous()


@pytest.mark.cpu_only
def test_the_bits_depend_on_no_number_of_threads(isa: str):
    x, bias, dy = operands((2100, 48), torch.float32, torch.device("cpu"), gated=True)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(results(ours, x, bias, dy, "silu", gated=True))
    finally:
        torch.set_num_threads(before)
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )


@pytest.mark.cpu_only
def test_a_part_of_a_row_has_the_bits_of_the_whole(isa: str):
    """Columns shared out over ranks: a number is computed alike in a register and beside one."""
    x, bias, dy = operands((3, 67), torch.float32, torch.device("cpu"), gated=False)
    for name in activation.ACTIVATIONS:
        whole = results(ours, x, bias, dy, name, gated=False)
        part = results(ours, x[:, 3:40], bias[3:40], dy[:, 3:40], name, gated=False)
        assert all(torch.equal(a[..., 3:40], b) for a, b in zip(whole, part, strict=True))


def test_saves_its_input_and_nothing_else(device: torch.device):
    for gated in (False, True):
        x, bias, _ = operands((4, 8), torch.float32, device, gated=gated)
        x, bias, saved = x.requires_grad_(), bias.requires_grad_(), []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t) or t, lambda t: t
        ):
            ours(x, bias, "silu", gated=gated)
        assert {t.data_ptr() for t in saved} == {x.data_ptr(), bias.data_ptr()}


def test_only_what_is_asked_for(device: torch.device):
    x, bias, dy = operands((4, 8), torch.float32, device, gated=False)
    y = ours(x, bias.requires_grad_(), "gelu", gated=False)
    y.backward(dy)
    assert bias.grad is not None
    assert x.grad is None
    with pytest.raises(NotImplementedError, match="no second derivative"):
        (g,) = torch.autograd.grad(
            ours(x.requires_grad_(), None, "gelu", gated=False).sum(), x, create_graph=True
        )
        g.sum().backward()


def test_refusals(device: torch.device):
    x = torch.zeros(2, 5, device=device)
    with pytest.raises(
        ValueError, match=r"activation must be one of gelu, gelu_tanh, relu, silu; got 'tanh'"
    ):
        activation.bias_activation(x, activation="tanh")
    with pytest.raises(ValueError, match="its size is even"):
        activation.bias_gated(x)
    with pytest.raises(ValueError, match=r"bias must be \[5\] torch.float32"):
        activation.bias_activation(x, torch.zeros(4, device=device))
    with pytest.raises(ValueError, match=r"bias must be \[5\] torch.float32"):
        activation.bias_activation(x, torch.zeros(5, device=device).half())
    with pytest.raises(ValueError, match=r"got torch.int64"):
        activation.bias_activation(x.long())
    error = (RuntimeError, ValueError)  # the ops check what memory they will touch
    with pytest.raises(error, match=r"dy must be|size|match"):
        torch.ops.pyops.bias_activation_backward(x[:1], x, None, activation="gelu", bias_grad=False)
    with pytest.raises(error, match=r"activation must be one of"):
        torch.ops.pyops.bias_activation(x, None, activation="elu")

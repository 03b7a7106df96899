"""bias_dropout_add and dropout: the mask's bits are those of pyops.random, forward and backward,
for any part of a whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyops import random
from pyops.ops.layers import dropout as ops
from pyops.ops.random import signed64
from tests.ops.conftest import isa  # noqa: F401 - a fixture, found by name
from tests.tolerance import assert_close_to_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SEED, NAME = 11, "mlp.dropout@3"


def state_at(offset: int, device: torch.device) -> Tensor:
    return torch.tensor([signed64(random.key_of(SEED, NAME)), offset], device=device)


def plain(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, mask: Tensor | None, p: float
) -> Tensor:
    y = x if bias is None else x + bias
    if mask is not None:
        y = y * mask * (1.0 / (1.0 - p))
    return y if residual is None else residual + y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(dtype: torch.dtype, device: torch.device, isa: str):  # noqa: F811
    for i, (shape, offset) in enumerate(
        [((7,), 0), ((3, 5), 3), ((2100, 17), 1 << 33), ((4, 2085), 1), ((2, 3, 256), 0)]
    ):
        p, numel = 0.1 + 0.2 * i, torch.Size(shape).numel()
        x, residual, dy = (
            torch.randn(shape, device=device, dtype=torch.float64).to(dtype) for _ in range(3)
        )
        bias = torch.randn(shape[-1], device=device, dtype=torch.float64).to(dtype)
        mask = random.dropout_mask(SEED, NAME, (numel,), p=p, offset=offset, device=device).view(
            shape
        )
        for b, r, state in (
            (bias, residual, state_at(offset, device)),
            (bias, residual, None),
            (None, None, state_at(offset, device)),
        ):
            leaves = [t.detach().clone().requires_grad_() for t in (x, b, r) if t is not None]
            y = ops.bias_dropout_add(*leaves, p=p, state=state)
            found = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
            drawn = None if state is None else mask
            for wide, results in ((torch.float64, []), (dtype, [])):
                twins = [t.detach().to(wide).requires_grad_() for t in leaves]
                z = plain(*twins, *[None] * (3 - len(twins)), drawn, p)
                results += [z.detach(), *torch.autograd.grad(z, twins, dy.to(wide))]
                exact = results if wide == torch.float64 else exact  # noqa: F821 - the first turn sets it
            for k, (actual, other, reference) in enumerate(zip(found, results, exact, strict=True)):
                assert reference.abs().max() > 0
                terms = (
                    dy.double().abs().reshape(-1, shape[-1]).sum(0) / (1 - p)
                    if k == 2 and b is not None
                    else reference.abs()
                )
                assert_close_to_reference(
                    actual, other, reference, tiny=(torch.finfo(dtype).eps * terms).cpu()
                )  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mask_is_that_of_pyops_random(dtype: torch.dtype, device: torch.device, isa: str):  # noqa: F811
    for n, offset in ((1, 0), (5, 2), (300, 7), (70001, (1 << 34) - 3)):
        for p in (0.0, 0.25, 1.0):
            mask = random.dropout_mask(SEED, NAME, (n,), p=p, offset=offset, device=device)
            x = torch.ones(n, device=device, dtype=dtype).requires_grad_()
            y = ops.bias_dropout_add(x, p=p, state=state_at(offset, device))
            assert torch.equal(y != 0, mask)
            y.backward(torch.ones_like(y))
            assert torch.equal(x.grad, y.detach()), "backward draws the same mask"


def test_part_of_each_row_of_a_whole(device: torch.device, isa: str):  # noqa: F811
    """Heads 2 and 3 of 6, of attention probabilities [B, H, T, S]."""
    B, H, T, S = 3, 6, 4, 7
    x = torch.ones(B, H, T, S, device=device)
    whole = ops.dropout(x, p=0.4, state=state_at(9, device))
    assert torch.equal(
        whole != 0,
        random.dropout_mask(SEED, NAME, (x.numel(),), p=0.4, offset=9, device=device).view(x.shape),
    )
    own = x[:, 2:4].clone().requires_grad_()
    part = ops.dropout(
        own, p=0.4, state=state_at(9 + 2 * T * S, device), row=2 * T * S, row_stride=H * T * S
    )
    assert torch.equal(part, whole[:, 2:4])
    part.backward(3 * torch.ones_like(part))
    assert torch.equal(own.grad, 3 * whole[:, 2:4])
    strided = x.permute(3, 1, 0, 2)  # counted in its own order
    assert torch.equal(
        ops.dropout(strided, p=0.4, state=state_at(9, device)).flatten(), whole.flatten()
    )


def test_what_is_dropped_is_zero_whatever_it_was(device: torch.device, isa: str):  # noqa: F811
    x = torch.full((64,), torch.inf, device=device)
    y = ops.bias_dropout_add(x, p=0.5, state=state_at(0, device))
    mask = random.dropout_mask(SEED, NAME, (64,), p=0.5, device=device)
    assert not y[~mask].any()
    assert y[mask].isinf().all()


def test_nothing_to_do_is_nothing(device: torch.device):
    x, state = torch.randn(3, 4, device=device), state_at(0, device)
    assert ops.bias_dropout_add(x, p=0.0, state=state) is x
    assert ops.bias_dropout_add(x, p=0.5) is x
    assert ops.dropout(x, p=0.5, state=None) is x
    for shape in ((0, 4), (3, 0)):
        x = torch.empty(shape, device=device, requires_grad=True)
        bias = torch.zeros(shape[-1], device=device, requires_grad=True)
        y = ops.bias_dropout_add(x, bias, x, p=0.5, state=state)
        y.backward(torch.ones_like(y))
        assert y.shape == x.grad.shape == shape
        assert bias.grad.shape == (shape[-1],)
        dx, dbias = ops.bias_dropout_add_backward_reference(
            torch.ones_like(y), state, p=0.5, bias_grad=True
        )
        assert (dx.shape, dbias.shape) == (shape, (shape[-1],))


def test_the_residuals_gradient_is_not_copied_and_only_the_state_is_saved(device: torch.device):
    x, residual = (torch.randn(8, 4, device=device, requires_grad=True) for _ in range(2))
    saved: list[Tensor] = []
    state = state_at(0, device)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = ops.bias_dropout_add(x, None, residual, p=0.5, state=state)
    assert [t.data_ptr() for t in saved] == [state.data_ptr()]
    dy = torch.ones_like(y)
    assert torch.autograd.grad(y, residual, dy)[0].data_ptr() == dy.data_ptr()


@pytest.mark.cpu_only
def test_the_bits_depend_on_no_number_of_threads(isa: str):  # noqa: F811
    x, bias, before, found = torch.randn(2100, 48), torch.randn(48), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            leaves = x.clone().requires_grad_(), bias.clone().requires_grad_()
            y = ops.bias_dropout_add(*leaves, p=0.3, state=state_at(1, torch.device("cpu")))
            found.append([y, *torch.autograd.grad(y, leaves, x)])
    finally:
        torch.set_num_threads(before)
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )


def test_gradcheck(device: torch.device):
    x, residual = (
        torch.randn(3, 4, device=device, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    bias, state = (
        torch.randn(4, device=device, dtype=torch.float64, requires_grad=True),
        state_at(2, device),
    )
    for s in (state, None):
        assert torch.autograd.gradcheck(
            lambda *a, s=s: ops.bias_dropout_add(*a, p=0.4, state=s),
            (x, bias, residual.mT.clone().mT),
        )
    assert torch.autograd.gradcheck(
        lambda a: ops.dropout(a, p=0.4, state=state, row=4, row_stride=9), (x,)
    )


def test_refusals(device: torch.device):
    x, state = torch.zeros(2, 5, device=device), state_at(0, device)
    with pytest.raises(ValueError, match=r"p must be a probability in \[0, 1\], got 1.5"):
        ops.bias_dropout_add(x, p=1.5, state=state)
    with pytest.raises(ValueError, match=r"state must be int64 \[2\]"):
        ops.bias_dropout_add(x, p=0.5, state=state.float())
    with pytest.raises(ValueError, match=r"bias must be \[5\]"):
        ops.bias_dropout_add(x, torch.zeros(4, device=device), p=0.5, state=state)
    with pytest.raises(ValueError, match=r"residual must be as x, \[2, 5\]"):
        ops.bias_dropout_add(x, None, x[:1], p=0.5, state=state)
    with pytest.raises(ValueError, match=r"got torch.int32"):
        ops.dropout(x.int(), p=0.5, state=state)
    with pytest.raises(ValueError, match="row >= 1"):
        ops.dropout(x, p=0.5, state=state, row=0)
    error = (RuntimeError, ValueError)
    with pytest.raises(error, match=r"residual must be|size|match"):
        torch.ops.pyops.bias_dropout_add(x, None, x[:1], state, p=0.5)
    with pytest.raises(error, match="row >= 1"):
        torch.ops.pyops.dropout(x, state, p=0.5, row=0, row_stride=1)

"""Parameters and gradients that are not contiguous: exact, and memory that is not theirs stays as
it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyops.optim import AdamW
from tests.optim.pairs import HYPER, assert_equal, give_gradients

OPTIONS = [{}, {"max_grad_norm": 0.5}, {"zero_grad": True}, {"amsgrad": True}]


def contiguous_twin(values, grads, **options):
    """What a contiguous parameter of the same values becomes."""
    param = nn.Parameter(values.clone().contiguous())
    optimizer = AdamW([param], **HYPER, **options)
    for grad in grads:
        param.grad = grad.clone().contiguous()
        optimizer.step()
    return param.detach()


def random_gradients(shape, device, n=4):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(device) for _ in range(n)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_block_of_columns_is_exact_and_its_neighbours_stay(options, device):
    """torch's fused CPU kernel writes into the neighbours here."""
    base = torch.randn(6, 9, device=device)
    neighbours = base[:, 4:].clone()
    param = nn.Parameter(base[:, :4])
    assert param.data_ptr() == base.data_ptr(), "the parameter is meant to be a view of the base"
    grads = random_gradients((6, 4), device)
    expected = contiguous_twin(param.detach(), grads, **options)
    optimizer = AdamW([param], **HYPER, **options)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
        assert param.grad.abs().sum() == 0 or "zero_grad" not in options
    assert torch.equal(base[:, :4], expected)
    assert torch.equal(base[:, 4:], neighbours)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_gradient_laid_out_otherwise_reaches_its_own_elements(options, device):
    """torch's fused CPU kernel permutes it here."""
    values, grads = torch.randn(5, 8, device=device), random_gradients((5, 8), device)
    param = nn.Parameter(values.clone())
    optimizer = AdamW([param], **HYPER, **options)
    for grad in grads:
        param.grad = grad.t().contiguous().t()
        assert param.grad.stride() != param.stride()
        optimizer.step()
        assert param.grad.abs().sum() == 0 or "zero_grad" not in options
    assert torch.equal(param.detach(), contiguous_twin(values, grads, **options))


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "permuted"])
def test_dense_layouts_are_walked_in_memory_order(layout, device):
    values = torch.randn(2, 4, 4, 5, device=device)
    if layout == "channels_last":
        values = values.to(memory_format=torch.channels_last)
    else:
        values = (
            values.permute(3, 2, 1, 0) if layout == "transposed" else values.permute(2, 0, 3, 1)
        )
    grads = random_gradients(values.shape, device)
    param = nn.Parameter(values.clone(memory_format=torch.preserve_format))
    assert not param.is_contiguous()
    optimizer = AdamW([param], **HYPER)
    for grad in grads:
        param.grad = torch.empty_like(param).copy_(grad)
        optimizer.step()
    assert torch.equal(param.detach(), contiguous_twin(values, grads))
    assert optimizer.state[param]["exp_avg"].stride() == param.stride()
    if optimizer._plans:
        assert optimizer._plans[0][0].leftover == [], "a dense layout needs no stand-in"


def test_size_one_dimensions_have_no_say(device):
    param = nn.Parameter(torch.randn(4, 1, 3, device=device))
    grads = random_gradients((4, 1, 3), device)
    values = param.detach().clone()
    optimizer = AdamW([param], **HYPER)
    for grad in grads:
        param.grad = grad.as_strided((4, 1, 3), (3, 77, 1))
        optimizer.step()
    assert torch.equal(param.detach(), contiguous_twin(values, grads))


def test_an_expanded_gradient_is_read_exactly(device):
    values = torch.randn(4, 3, device=device)
    param = nn.Parameter(values.clone())
    rows = random_gradients((3,), device)
    optimizer = AdamW([param], **HYPER)
    for row in rows:
        param.grad = row.expand(4, 3)
        optimizer.step()
    assert torch.equal(param.detach(), contiguous_twin(values, [row.expand(4, 3) for row in rows]))


def test_parameters_that_share_memory_are_stepped_one_after_the_other(device):
    """As torch does it, whatever the threads: two views of the same memory, and two that meet in a
    column."""

    def run(make):
        base = torch.arange(30.0, device=device).reshape(5, 6) / 10
        params = [
            nn.Parameter(base[:, :4]),
            nn.Parameter(base[:, 3:]),
            nn.Parameter(torch.ones(3, device=device)),
        ]
        optimizer = make(params)
        for step in range(3):
            give_gradients(params, seed=step)
            optimizer.step()
        return base, params[2].detach()

    actual = run(lambda params: AdamW(params, **HYPER))
    expected = run(lambda params: torch.optim.AdamW(params, **HYPER, foreach=False))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_states_laid_out_otherwise_are_stepped_in_place(device):
    """A user's own state tensor, transposed: its values are right and it is still the user's
    tensor."""
    values, grads = torch.randn(5, 8, device=device), random_gradients((5, 8), device)
    param = nn.Parameter(values.clone())
    optimizer = AdamW([param], **HYPER)
    param.grad = grads[0].clone()
    optimizer.step()
    own = optimizer.state[param]["exp_avg"].t().contiguous().t()
    optimizer.state[param]["exp_avg"] = own
    for grad in grads[1:]:
        param.grad = grad.clone()
        optimizer.step()
    assert optimizer.state[param]["exp_avg"] is own
    assert_equal([param], [contiguous_twin(values, grads)])

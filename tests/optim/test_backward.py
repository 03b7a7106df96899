"""fuse_into_backward: the same numbers as step() after backward, gradients freed as they arrive."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyops.optim import AdamW, fuse_into_backward
from tests.optim.pairs import HYPER, assert_equal, assert_moved


def model(device, tied=False):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).to(
        device
    )
    if tied:
        net[2].weight = net[0].weight
    return net


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_a_step_after_backward(tied, dtype, device):
    ours, plain = model(device, tied).to(dtype), model(device, tied).to(dtype)
    options = {"master_weights": dtype != torch.float32}
    fused, stepped = (
        AdamW(ours.parameters(), **HYPER, **options),
        AdamW(plain.parameters(), **HYPER, **options),
    )
    before = [p.detach().clone() for p in ours.parameters()]
    fuse_into_backward(ours, fused)
    x = torch.randn(5, 6, device=device, dtype=dtype)
    for _ in range(3):
        ours(x).square().sum().backward()
        assert all(p.grad is None for p in ours.parameters())
        fused.step()  # finds nothing to do
        stepped.zero_grad()
        plain(x).square().sum().backward()
        stepped.step()
    assert_moved(before, list(ours.parameters()))
    assert_equal(list(ours.parameters()), list(plain.parameters()))


def test_at_most_one_gradient_at_a_time(device):
    net = model(device)
    optimizer = AdamW(net.parameters(), **HYPER)
    fuse_into_backward(net, optimizer)
    alive = []
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(q.grad is not None for q in net.parameters()))
        )
    net(torch.randn(5, 6, device=device)).sum().backward()
    assert len(alive) == 6
    assert max(alive) <= 1


def test_schedulers_groups_and_frozen_parameters(device):
    net = model(device)
    net[0].weight.requires_grad_(False)
    frozen = net[0].weight.detach().clone()
    optimizer = AdamW(
        [
            {"params": net[0].parameters()},
            {"params": net[2:].parameters(), "lr": 0.0, "weight_decay": 0.0},
        ],
        **HYPER,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    still = net[2].weight.detach().clone()
    fuse_into_backward(net, optimizer)
    net(torch.randn(5, 6, device=device)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == HYPER["lr"] / 2
    assert torch.equal(net[0].weight, frozen)
    assert torch.equal(net[2].weight, still)
    assert optimizer.state[net[0].bias]["step"].item() == 1


def test_removed_gradients_stay_again(device):
    net = model(device)
    optimizer = AdamW(net.parameters(), **HYPER)
    with fuse_into_backward(net, optimizer):
        net(torch.randn(5, 6, device=device)).sum().backward()
    before = [p.detach().clone() for p in net.parameters()]
    net(torch.randn(5, 6, device=device)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    assert_equal(list(net.parameters()), before)


def test_what_can_not_be_fused():
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"max_grad_norm=1.0 needs all gradients"):
        fuse_into_backward(net, AdamW(net.parameters(), max_grad_norm=1.0))
    with pytest.raises(ValueError, match="1 of the optimizer's 3 parameters are not the model's"):
        fuse_into_backward(net, AdamW([*net.parameters(), nn.Parameter(torch.ones(3))]))
    with pytest.raises(TypeError, match=r"pyops.optim, got SGD"):
        fuse_into_backward(net, torch.optim.SGD(net.parameters()))

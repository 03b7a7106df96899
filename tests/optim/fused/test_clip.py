"""max_grad_norm, GradScaler, zero_grad and copies: what is done around the step, done inside it."""

from __future__ import annotations

import math

import pytest
import torch

from pyops.optim import AdamW
from tests.optim.pairs import (
    HYPER,
    assert_as_torch,
    assert_equal,
    assert_moved,
    give_gradients,
    parameters,
    run,
    twins,
)

STEPS = 4


def groups(params):
    return [{"params": params[:2], "lr": 0.05}, {"params": params[2:]}]


@pytest.mark.parametrize("max_norm", [0.3, 1e4], ids=["clipped", "not clipped"])
def test_clipping_is_clip_grad_norm(max_norm, device):
    a = parameters(device=device)
    b, c = twins(a), twins(a, torch.float64)
    mine = AdamW(groups(a), **HYPER, max_grad_norm=max_norm)
    plain, exact = torch.optim.AdamW(groups(b), **HYPER), torch.optim.AdamW(groups(c), **HYPER)
    norms = []

    def clip(step):
        torch.nn.utils.clip_grad_norm_(b, max_norm)
        norms.append(torch.nn.utils.clip_grad_norm_(c, max_norm))

    for step in range(STEPS):
        run([mine, plain, exact], [a, b, c], steps=1, first=step, between=clip)
        assert mine.grad_norm.dtype == torch.float32
        assert mine.grad_norm.shape == ()
        assert math.isclose(mine.grad_norm.item(), norms[-1].item(), rel_tol=1e-6)
    assert_as_torch(a, b, c, steps=STEPS)


def test_the_comparison_sees_a_missing_clip():
    a = parameters()
    b, c = twins(a), twins(a, torch.float64)
    # Adam is nearly blind to the scale of gradients; a change of the scale between steps is what
    # shows.
    run(
        [AdamW(a, **HYPER), torch.optim.AdamW(b, **HYPER), torch.optim.AdamW(c, **HYPER)],
        [a, b, c],
        steps=STEPS,
        between=lambda step: [torch.nn.utils.clip_grad_norm_(ps, 0.3) for ps in (b, c)],
    )
    with pytest.raises(AssertionError):
        assert_as_torch(a, b, c, steps=STEPS)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(bad, device):
    a = parameters(device=device)
    optimizer = AdamW(groups(a), **HYPER, max_grad_norm=1.0, zero_grad=True)
    run([optimizer], [a], steps=2)
    before = [p.detach().clone() for p in a]
    states = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in a]
    give_gradients(a, seed=9)
    a[-2].grad.view(-1)[-1] = bad
    optimizer.step()
    assert not math.isfinite(optimizer.grad_norm.item())
    assert_equal(a, before)
    for p, state in zip(a, states, strict=True):
        for key, value in state.items():
            assert torch.equal(optimizer.state[p][key], value), key
    assert all(p.grad.abs().sum() == 0 for p in a), "zero_grad also after a skipped step"
    run([optimizer], [a], steps=1, first=10)
    assert_moved(before, a)


def test_without_clipping_a_nan_spreads_as_in_torch():
    a = parameters(((4,),))
    b = twins(a)
    mine, plain = AdamW(a, **HYPER), torch.optim.AdamW(b, **HYPER)
    give_gradients(a, b, seed=0)
    for p in (a[0], b[0]):
        p.grad[1] = math.nan
    for optimizer in (mine, plain):
        optimizer.step()
    assert torch.equal(a[0].isnan(), b[0].isnan())
    assert a[0].isnan().sum() == 1


def test_the_norm_can_be_made_global(device):
    """Two optimizers that each hold a half behave as one that holds all."""
    a = parameters(device=device)
    b = twins(a)
    whole = AdamW(a, **HYPER, max_grad_norm=0.4)
    halves = [AdamW(b[:3], **HYPER, max_grad_norm=0.4), AdamW(b[3:], **HYPER, max_grad_norm=0.4)]
    parts = []
    for step in range(STEPS):
        give_gradients(a, b, seed=step)
        parts.clear()
        for half in halves:  # what each process would contribute
            probe = AdamW(half.param_groups[0]["params"], lr=0.0, max_grad_norm=1.0)
            probe.reduce_squared_norm = lambda squared: parts.append(squared) or squared
            values = [p.detach().clone() for p in probe.param_groups[0]["params"]]
            probe.step()
            for p, value in zip(probe.param_groups[0]["params"], values, strict=True):
                p.data.copy_(value)
        for half in halves:
            half.reduce_squared_norm = lambda squared: parts[0] + parts[1]
        for optimizer in (whole, *halves):
            optimizer.step()
        assert halves[0].grad_norm == halves[1].grad_norm
        assert math.isclose(halves[0].grad_norm.item(), whole.grad_norm.item(), rel_tol=1e-6)
    torch.testing.assert_close(
        [p.detach() for p in b], [p.detach() for p in a], rtol=1e-5, atol=1e-6
    )


def test_the_norm_is_asked_for_even_where_there_are_no_gradients():
    """Other ranks wait for this one's part."""
    optimizer = AdamW(parameters(), max_grad_norm=1.0)
    asked = []
    optimizer.reduce_squared_norm = lambda squared: asked.append(squared.clone()) or squared + 9.0
    optimizer.step()
    assert [t.tolist() for t in asked] == [[0.0, 0.0]]
    assert optimizer.grad_norm.item() == 3.0


@pytest.mark.parametrize("unscale", [False, True], ids=["unscaled by the step", "unscale_ called"])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_grad_scaler(unscale, max_norm, device):
    """Under GradScaler: as without it, an inf skips the step and halves the scale."""
    a = parameters(device=device)
    b = twins(a)
    mine, plain = (
        AdamW(a, **HYPER, max_grad_norm=max_norm),
        AdamW(b, **HYPER, max_grad_norm=max_norm),
    )
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=1000)
    for step in range(STEPS):
        give_gradients(a, b, seed=step)
        scaler.scale(torch.ones((), device=device))
        for p in a:
            p.grad.mul_(1024.0)
        if step == 2:
            a[0].grad[0, 0] = math.inf
            before = [p.detach().clone() for p in a]
        if unscale:
            scaler.unscale_(mine)
        scaler.step(mine)
        scaler.update()
        if step == 2:
            assert_equal(a, before)
            assert scaler.get_scale() == 512.0
            scaler.update(1024.0)
        else:
            plain.step()
            if max_norm is not None:
                assert mine.grad_norm == plain.grad_norm
    assert_equal(a, b)
    assert mine.state[a[0]]["step"].item() == STEPS - 1


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_zero_grad_zeroes_after_use(max_norm, device):
    a = parameters(device=device)
    b = twins(a)
    mine, plain = (
        AdamW(a, **HYPER, max_grad_norm=max_norm, zero_grad=True),
        AdamW(b, **HYPER, max_grad_norm=max_norm),
    )
    for step in range(STEPS):
        give_gradients(a, b, seed=step)
        kept = [p.grad for p in a]
        for optimizer in (mine, plain):
            optimizer.step()
        assert all(p.grad is g and g.abs().sum() == 0 for p, g in zip(a, kept, strict=True))
    assert_equal(a, b)


def test_copies_receive_the_rounded_parameters(device):
    a = parameters(device=device)
    b = twins(a)
    copies = [
        None if i == 1 else torch.full_like(p, 7.0, dtype=torch.bfloat16) for i, p in enumerate(a)
    ]
    mine, plain = AdamW([{"params": a, "copies": copies}], **HYPER), AdamW(b, **HYPER)
    run([mine, plain], [a, b], steps=STEPS)
    assert_equal(a, b)
    assert_equal(
        [c for c in copies if c is not None],
        [p.to(torch.bfloat16) for i, p in enumerate(a) if i != 1],
    )
    assert "copies" not in mine.state_dict()["param_groups"][0]
    # Another tensor in the list is noticed.
    copies[0] = torch.zeros_like(copies[0], dtype=torch.float16)
    run([mine, plain], [a, b], steps=1, first=STEPS)
    assert torch.equal(copies[0], a[0].detach().half())

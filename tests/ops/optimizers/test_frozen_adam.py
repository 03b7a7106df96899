"""The halves of Adam: together they are Adam, the frozen variance is only read, and an element that
has none only decays."""

from __future__ import annotations

import pytest
import torch

from pyops.ops.optimizers import frozen_adam, optim
from tests.tolerance import assert_close_to_reference

SCALARS = {"lr": 0.013, "eps": 3e-5, "weight_decay": 0.21}
SIZES = (1, 0, 31, 2085)
ERRORS = (RuntimeError, ValueError)


def rows(
    device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], ...]:
    """params, exp_avgs, exp_avg_sqs; one in four variances is 0, with a momentum that must not
    matter there."""
    generator = torch.Generator().manual_seed(1)
    p, m, v = ([torch.randn(n, generator=generator) for n in SIZES] for _ in range(3))
    v = [x.square() * (torch.arange(len(x)) % 4 != 3) for x in v]
    return [x.to(device, dtype) for x in p], [x.to(device) for x in m], [x.to(device) for x in v]


def formula(
    p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, *, lr: float, eps: float, weight_decay: float
) -> torch.Tensor:
    update = torch.where(v > 0, m / (v.sqrt() + eps), torch.zeros_like(m))
    return p * (1 - lr * weight_decay) - lr * update


def test_against_float64(device: torch.device, isa: str):
    params, exp_avgs, exp_avg_sqs = rows(device)
    before = [p.clone() for p in params]
    kept = [t.clone() for t in (*exp_avgs, *exp_avg_sqs)]
    frozen_adam.frozen_adam_(params, exp_avgs, exp_avg_sqs, **SCALARS)
    for p, old, m, v in zip(params, before, exp_avgs, exp_avg_sqs, strict=True):
        plain = formula(old, m, v, **SCALARS)
        exact = formula(old.double(), m.double(), v.double(), **SCALARS)
        assert_close_to_reference(p, plain, exact, tiny=2.0**-22)
        assert not p.numel() or not torch.equal(p, old), "a step that does nothing would pass"
        decayed = old[v == 0].double() * (1 - SCALARS["lr"] * SCALARS["weight_decay"])
        torch.testing.assert_close(p[v == 0].double(), decayed, rtol=1e-6, atol=0.0)
    assert all(torch.equal(a, b) for a, b in zip((*exp_avgs, *exp_avg_sqs), kept, strict=True))


@pytest.mark.parametrize("eps", [0.0, 1e-30])
def test_no_variance_never_explodes(eps: float, device: torch.device, isa: str):
    params, exp_avgs, exp_avg_sqs = rows(device)
    frozen_adam.frozen_adam_(params, exp_avgs, exp_avg_sqs, lr=0.5, eps=eps, weight_decay=0.0)
    assert all(p.isfinite().all() for p in params)
    other, exp_avgs, _ = rows(device)
    frozen_adam.frozen_adam_(
        other, exp_avgs, [torch.zeros_like(p) for p in other], lr=0.5, eps=eps, weight_decay=0.0
    )
    assert all(torch.equal(a, b) for a, b in zip(other, rows(device)[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_copies_and_device_scalars(dtype: torch.dtype, device: torch.device, isa: str):
    masters, exp_avgs, exp_avg_sqs = rows(device)
    params = [p.to(dtype) for p in masters]
    copies = [torch.zeros_like(p, dtype=torch.float16) for p in masters]
    expected = [p.clone() for p in masters]
    lr = torch.tensor(SCALARS["lr"], dtype=torch.float64, device=device)
    options = {**SCALARS, "lr": 123.0}
    skip = torch.ones((), device=device)
    frozen_adam.frozen_adam_(params, exp_avgs, exp_avg_sqs, masters, copies, lr, skip, **options)
    assert all(torch.equal(a, b) for a, b in zip(masters, expected, strict=True))
    frozen_adam.frozen_adam_(
        params, exp_avgs, exp_avg_sqs, masters, copies, lr, skip - 1, **options
    )
    frozen_adam.frozen_adam_(expected, exp_avgs, exp_avg_sqs, **SCALARS)
    for param, master, copy, want in zip(params, masters, copies, expected, strict=True):
        assert torch.equal(master, want)
        assert torch.equal(param, master.to(dtype))
        assert torch.equal(copy, param.to(torch.float16))


def test_momentum_has_the_bits_of_adam(device: torch.device, isa: str):
    params, exp_avgs, exp_avg_sqs = rows(device)
    grads = [torch.cos(torch.arange(n, device=device) * 0.7) for n in SIZES]
    mine, factor = [m.clone() for m in exp_avgs], torch.tensor(0.37, device=device)
    frozen_adam.momentum_(mine, grads, factor, beta=0.87)
    steps = [torch.zeros((), device=device) for _ in SIZES]
    optim.adam_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [],
        [],
        steps,
        None,
        factor,
        None,
        lr=0.1,
        beta1=0.87,
        beta2=0.9,
        eps=1e-3,
        weight_decay=0.0,
        decoupled=True,
        maximize=False,
        zero_grads=False,
        stochastic_rounding=False,
        seed=0,
        offsets=[],
    )
    assert all(torch.equal(a, b) for a, b in zip(mine, exp_avgs, strict=True))
    before = [m.clone() for m in mine]
    frozen_adam.momentum_(
        mine, grads, factor, torch.ones((), device=device), beta=0.87, zero_grads=True
    )
    assert all(torch.equal(a, b) for a, b in zip(mine, before, strict=True))
    assert not any(g.any() for g in grads)


@pytest.mark.cpu_only
def test_a_cut_changes_no_bit(isa: str):
    params, exp_avgs, exp_avg_sqs = rows(torch.device("cpu"))
    p, m, v = params[3], exp_avgs[3], exp_avg_sqs[3]
    whole = p.clone()
    frozen_adam.frozen_adam_([whole], [m], [v], **SCALARS)
    pieces = [list(t.split([5, 1000, 1, 1079])) for t in (p, m, v)]
    frozen_adam.frozen_adam_(*pieces, **SCALARS)
    assert torch.equal(whole, p)


def test_what_does_not_fit_raises_before_anything_is_changed(device: torch.device):
    params, exp_avgs, exp_avg_sqs = rows(device)
    before = [p.clone() for p in params]
    with pytest.raises(ERRORS, match="exp_avg_sqs has 3 tensors for 4 params"):
        frozen_adam.frozen_adam_(params, exp_avgs, exp_avg_sqs[:3], **SCALARS)
    with pytest.raises(ERRORS, match=r"exp_avg_sqs\[3\].*laid out alike"):
        frozen_adam.frozen_adam_(
            params, exp_avgs, [*exp_avg_sqs[:3], exp_avg_sqs[3][:-1]], **SCALARS
        )
    with pytest.raises(ERRORS, match=r"grads\[3\] must be float32"):
        frozen_adam.momentum_(params, [*exp_avgs[:3], exp_avgs[3].double()], beta=0.9)
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))

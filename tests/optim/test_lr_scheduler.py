"""Schedules are closed forms: by hand, against torch's where it has the same one, and across a
save."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import pyops.optim
from pyops.config import OptimizerConfig
from pyops.optim.lr_scheduler import LRRangeTest, OneCycle, Warmup, WarmupCosine, steepest

pytestmark = pytest.mark.cpu_only


def optimizer_of(kind: str = "AdamW", **options: Any) -> torch.optim.Optimizer:
    given = {"lr": 0.5, "betas": (0.8, 0.97)} if kind == "AdamW" else {"lr": 0.5, "momentum": 0.7}
    w, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    groups = [{"params": [w]}, {"params": [b], "lr": 0.25}]
    return getattr(pyops.optim, kind)(groups, **{**given, **options})


def rates(scheduler: Any, steps: int, *, group: int = 0) -> list[float]:
    """What each step is done with."""
    found = []
    for _ in range(steps):
        found.append(float(scheduler.optimizer.param_groups[group]["lr"]))
        scheduler.optimizer.step()
        scheduler.step()
    return found


def test_warmup_by_hand():
    assert rates(Warmup(optimizer_of(), steps=4), 6) == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]
    assert rates(Warmup(optimizer_of(), steps=4), 4, group=1) == [0.0625, 0.125, 0.1875, 0.25]
    log = rates(Warmup(optimizer_of(), steps=3, kind="log"), 4)
    assert log == pytest.approx([0.25, 0.5 * math.log(3) / math.log(4), 0.5, 0.5])
    assert rates(Warmup(optimizer_of(), steps=0), 2) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("steps", "warmup", "final"), [(20, 5, 0.1), (20, 0, 0.0), (7, 7, 0.3), (1, 0, 1.0)]
)
def test_warmup_cosine_is_that_of_the_configuration(steps, warmup, final):
    config = OptimizerConfig(lr=0.5, warmup_steps=warmup, final_lr_ratio=final)
    found = rates(
        WarmupCosine(optimizer_of(), total_steps=steps, warmup_steps=warmup, final_ratio=final),
        steps,
    )
    assert found == pytest.approx(
        [config.lr_at(k, num_steps=steps) for k in range(steps)], rel=1e-12
    )


def test_cosine_is_torchs_and_stays_at_its_end():
    ours, theirs = optimizer_of(), optimizer_of()
    a = rates(WarmupCosine(ours, total_steps=10, final_ratio=0.1), 11)
    b = rates(torch.optim.lr_scheduler.CosineAnnealingLR(theirs, 10, eta_min=0.05), 11)
    assert a == pytest.approx(b, rel=1e-9)
    assert rates(WarmupCosine(optimizer_of(), total_steps=3, final_ratio=0.1), 9)[
        3:
    ] == pytest.approx([0.05] * 6)


def test_one_cycle_by_hand():
    optimizer = optimizer_of()
    scheduler = OneCycle(
        optimizer, min_lr=0.1, max_lr=0.5, first=2, second=4, momentum=(0.6, 0.9), decay_rate=0.5
    )
    found, betas = [], []
    for _ in range(9):
        found.append([group["lr"] for group in optimizer.param_groups])
        betas.append(optimizer.param_groups[1]["betas"])
        optimizer.step()
        scheduler.step()
    assert [a for a, _ in found] == pytest.approx(
        [0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1 / 1.5, 0.1 / 2]
    )
    assert all(a == b for a, b in found)
    assert [b1 for b1, _ in betas] == pytest.approx(
        [0.9, 0.75, 0.6, 0.675, 0.75, 0.825, 0.9, 0.9, 0.9]
    )
    assert {b2 for _, b2 in betas} == {0.97}, "beta2 is none of its business"


def test_one_cycle_of_momentum_and_without():
    optimizer = optimizer_of("SGD")
    scheduler = OneCycle(optimizer, min_lr=0.1, max_lr=0.5, first=2, momentum=(0.5, 0.9))
    rates(scheduler, 2)
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.5)
    optimizer = optimizer_of()
    rates(OneCycle(optimizer, min_lr=0.1, max_lr=0.5, first=2, momentum=None), 3)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.97)
    with pytest.raises(
        ValueError,
        match="param group 0 of Adagrad has neither betas nor momentum; pass momentum=None",
    ):
        OneCycle(
            pyops.optim.Adagrad([nn.Parameter(torch.ones(2))]), min_lr=0.1, max_lr=0.5, first=2
        )


def test_range_test_by_hand():
    def test_of(**options: Any) -> list[float]:
        return rates(LRRangeTest(optimizer_of(), min_lr=0.001, max_lr=1.0, steps=4, **options), 5)

    assert test_of() == pytest.approx([0.001, 0.01, 0.1, 1.0, 1.0])
    assert test_of(kind="linear") == pytest.approx([0.001, 0.334, 0.667, 1.0, 1.0])
    assert test_of(stairs=2) == pytest.approx([0.001, 0.001, 1.0, 1.0, 1.0])


MAKE = {
    "warmup": lambda o: Warmup(o, steps=5, kind="log"),
    "cosine": lambda o: WarmupCosine(o, total_steps=12, warmup_steps=4, final_ratio=0.2),
    "cycle": lambda o: OneCycle(o, min_lr=0.1, max_lr=0.5, first=3, second=5, decay_rate=1.0),
    "range": lambda o: LRRangeTest(o, min_lr=1e-4, max_lr=1.0, steps=10),
}


@pytest.mark.parametrize("name", MAKE)
def test_a_saved_one_continues(name):
    straight = rates(MAKE[name](optimizer_of()), 14)
    assert len(set(straight)) > 4
    first = MAKE[name](optimizer_of())
    rates(first, 6)
    optimizer = optimizer_of()
    second = MAKE[name](optimizer)
    second.load_state_dict(first.state_dict())
    optimizer.load_state_dict(first.optimizer.state_dict())
    assert rates(second, 8) == straight[6:]
    if name == "cycle":
        assert optimizer.param_groups[0]["betas"] == (0.95, 0.97)


@pytest.mark.parametrize("name", MAKE)
def test_a_rate_that_is_a_tensor_stays_one(name):
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.5))
    held = optimizer.param_groups[0]["lr"]
    found = rates(MAKE[name](optimizer), 5)
    assert optimizer.param_groups[0]["lr"] is held
    assert found == pytest.approx(rates(MAKE[name](optimizer_of()), 5), rel=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: Warmup(o, steps=-1), "steps is -1"),
        (lambda o: Warmup(o, steps=2.5), "steps is 2.5"),
        (
            lambda o: Warmup(o, steps=5, kind="quadratic"),
            "kind is 'quadratic'; it must be linear or log",
        ),
        (lambda o: WarmupCosine(o, total_steps=0), "total_steps is 0"),
        (lambda o: WarmupCosine(o, total_steps=5, final_ratio=2), "final_ratio is 2"),
        (
            lambda o: OneCycle(o, min_lr=0.5, max_lr=0.1, first=2),
            r"\(min_lr, max_lr\) is \(0.5, 0.1\)",
        ),
        (lambda o: OneCycle(o, min_lr=0.1, max_lr=0.5, first=0), "first is 0"),
        (lambda o: OneCycle(o, min_lr=0.1, max_lr=0.5, first=2, second=0), "second is 0"),
        (
            lambda o: OneCycle(o, min_lr=0.1, max_lr=0.5, first=2, momentum=(0.9, 1.0)),
            r"momentum is \(0.9, 1.0\)",
        ),
        (lambda o: LRRangeTest(o, min_lr=0, max_lr=1, steps=5), r"\(min_lr, max_lr\) is \(0, 1\)"),
        (lambda o: LRRangeTest(o, min_lr=0.1, max_lr=1, steps=1), "steps is 1"),
        (lambda o: LRRangeTest(o, min_lr=0.1, max_lr=1, steps=9, stairs=1), "stairs is 1"),
    ],
)
def test_what_makes_no_sense_changes_nothing(make, message):
    optimizer = optimizer_of()
    with pytest.raises(ValueError, match=message):
        make(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert "initial_lr" not in optimizer.param_groups[0]


def test_steepest_of_a_curve_with_a_known_one():
    """A logistic fall around 1e-2, then divergence: its steepest point is its middle."""
    x = [10 ** (-5 + 5 * i / 199) for i in range(200)]
    fall = [4 - 2 / (1 + math.exp(-4 * (math.log10(r) + 2))) for r in x]
    noise = torch.randn(200, generator=torch.Generator().manual_seed(3)).mul(0.01).tolist()
    y = [f + n + (50 * (r - 0.3) if r > 0.3 else 0) for f, n, r in zip(fall, noise, x, strict=True)]
    spike = [
        *y[:180],
        *[500.0] * 8,
        *[5.0] * 12,
    ]  # falls faster still, from where training had fallen apart
    for losses in y, [*y[:190], *[math.nan] * 10], spike:
        found = steepest(x, losses)
        assert found is not None
        assert 10**-2.3 < x[found] < 10**-1.7


def test_steepest_where_there_is_none():
    assert steepest([1, 2, 3], [1.0, 2.0, 3.0]) is None
    assert steepest([1, 2], [2.0, 1.0]) is None
    assert steepest([1, 2, 3], [math.inf, 1.0, 0.0]) is None
    with pytest.raises(ValueError, match="3 rates and 2 losses"):
        steepest([1, 2, 3], [1.0, 2.0])

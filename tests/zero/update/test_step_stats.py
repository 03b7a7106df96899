"""The statistics before a step: what is decided on the device has the bits of what the host
decides, and the host reads nothing from the device that it does not have to know."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops import optim
from pyops.precision import LossScale
from pyops.zero import ZeroConfig, ZeroOptimizer
from pyops.zero.update import step_stats
from pyops.zero.update.step_stats import StepStats
from tests.zero.making import zero_optimizer

CPU = torch.device("cpu")


def stats(squares: float, not_finite: float = 0.0) -> StepStats:
    measured = torch.tensor([squares, not_finite], dtype=torch.float64)
    return StepStats([0.0] * 7, measured, CPU, on_host=True)


@pytest.mark.parametrize("squares", [0.0, 1e-30, 0.3, 9.0, 1e12])
def test_the_device_scales_with_the_bits_of_the_host(squares: float):
    found = stats(squares)
    for scale, limit in itertools.product([None, 3.0, 65536.0], [None, 0.7, 1e9]):
        factor, skip = found.factor(scale=scale, max_grad_norm=limit)
        assert not skip
        on_device = found.scaling_on_device(scale=scale, max_grad_norm=limit)
        assert on_device.factor.item() == (1.0 if factor is None else factor.item())
        assert on_device.found_inf.item() == 0
        expected = torch.tensor(found.norm(scale), dtype=torch.float32)
        assert torch.equal(on_device.norm, expected)


@pytest.mark.parametrize(
    ("squares", "not_finite", "limit"),
    [(math.inf, 1.0, 1.0), (math.nan, 2.0, None), (4.0, 1.0, None), (math.inf, 0.0, 1.0)],
)
def test_both_skip_alike(squares: float, not_finite: float, limit: float | None):
    found = stats(squares, not_finite)
    assert found.factor(scale=None, max_grad_norm=limit) == (None, True)
    assert found.scaling_on_device(scale=None, max_grad_norm=limit).found_inf.item() == 1


def train(group: dist.ProcessGroup | None, rank: int, **options: Any) -> list[Tensor]:
    """Parameters and norms after every step; a gradient of the third is not finite on one rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    zero = zero_optimizer(model, optim.AdamW, group=group, lr=0.1, max_grad_norm=0.5, **options)
    found = []
    for step in range(5):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(4, 5)
        if step == 2 and rank == 0:
            x[0, 0] = math.inf
        zero.zero_grad()
        zero.scale(model(x).square().mean()).backward()
        zero.step()
        assert zero.grad_norm is not None
        found.append(zero.grad_norm.clone())
        with zero.whole_parameters():
            found += [p.detach().clone() for p in model.parameters()]
    zero.close()
    return found


class Reads:
    """Counts how often the host reads the measurement."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, of: StepStats, scale: Any) -> float:
        self.count += 1
        return math.nan


def both_ways(rank: int, group: dist.ProcessGroup | None, stage: int) -> tuple[bool, int]:
    """Whether training with two messages has the bits of training with one; how often the host then
    read the norm."""
    one = train(group, rank, stage=stage)
    reads = Reads()
    split = mock.patch.object(step_stats, "_is_host", return_value=False)
    with split, mock.patch.object(StepStats, "norm", lambda of, scale: reads(of, scale)):
        two = train(group, rank, stage=stage)
    assert not torch.equal(one[1], one[-4]), "nothing was trained"
    same = all(
        torch.equal(a, b) or (a.isnan() and b.isnan()) for a, b in zip(one, two, strict=True)
    )
    return same, reads.count


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_that_decide_on_the_device_have_the_bits_of_those_that_wait(world, stage: int):
    assert world(2).run(both_ways, stage) == [(True, 0)] * 2


def test_one_rank_that_decides_on_the_device_has_the_same_bits():
    assert both_ways(0, None, 2) == (True, 0)


def test_a_loss_scale_of_its_own_is_what_the_host_waits_for():
    wrong = AssertionError("the host must know whether the step is skipped")
    model = nn.Linear(3, 2)
    scale = LossScale(initial=4.0, hysteresis=1)
    zero = ZeroOptimizer(
        model, optim.AdamW, ZeroConfig(1, precision="fp16", loss_scale=scale), lr=0.1
    )
    zero.scale(model(torch.full((1, 3), math.inf).half()).float().sum()).backward()
    with (
        mock.patch.object(step_stats, "_is_host", return_value=False),
        mock.patch.object(StepStats, "scaling_on_device", side_effect=wrong),
    ):
        zero.step()
    assert scale.scale < 4.0


def differing(rank: int, group: dist.ProcessGroup) -> str:
    """The error of ranks with different options, before a parameter has changed."""
    model = nn.Linear(3, 2)
    zero = ZeroOptimizer(model, optim.AdamW, ZeroConfig(1), group=group, lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    zero.param_groups[0]["lr"] = 0.1 + rank
    model(torch.ones(1, 3)).sum().backward()
    with (
        mock.patch.object(step_stats, "_is_host", return_value=False),
        pytest.raises(step_stats.DisagreementError) as caught,
    ):
        zero.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return str(caught.value)


def test_ranks_with_different_options_raise_before_anything_has_changed(world):
    for text in world(2).run(differing):
        assert "lr" in text
        assert "options" in text

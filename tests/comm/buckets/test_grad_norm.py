"""grad_norm: against float64, over the ranks of groups, and what sum_of_squares counts."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.buckets.grad_norm import clip_factor, grad_norm, squares_of_each, sum_of_squares
from pyops.comm.collectives.communicator import Communicator

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def gradients(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(7, 5, generator=generator).to(dtype) for dtype in DTYPES]
    return [*made, torch.empty(0), made[0].t()[1:]]


def test_the_squares_of_a_hand_worked_case():
    found = sum_of_squares([torch.tensor([3.0, -4.0]), torch.tensor([12.0], dtype=torch.float64)])
    assert found.tolist() == [169.0, 0.0]
    assert grad_norm([torch.tensor([3.0, -4.0])]).item() == 5.0
    assert squares_of_each([torch.tensor([3.0, -4.0]), torch.tensor([2.0])]).tolist() == [25.0, 4.0]


def test_every_dtype_and_layout_counts_as_in_float64():
    given = gradients(0)
    expected = sum(float(g.double().square().sum()) for g in given)
    assert sum_of_squares(given)[0].item() == pytest.approx(expected, rel=1e-13)
    assert grad_norm(given).item() == pytest.approx(math.sqrt(expected), rel=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_that_are_not_finite_are_counted(dtype: torch.dtype):
    bad = torch.tensor([1.0, math.inf, math.nan], dtype=dtype)
    squares, count = sum_of_squares([torch.ones(3), bad]).tolist()
    assert not math.isfinite(squares)
    assert count == 2


def test_without_gradients_the_norm_is_zero():
    assert sum_of_squares([]).tolist() == [0.0, 0.0]
    assert grad_norm([torch.empty(0)]).item() == 0.0


def test_the_clip_factor_is_torchs():
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    before = parameter.grad.clone()
    factor = clip_factor(grad_norm([before]), 2.0)
    torch.nn.utils.clip_grad_norm_([parameter], 2.0)
    assert torch.equal(parameter.grad, before * factor)
    assert clip_factor(torch.tensor(1.0), 2.0).item() == 1.0


def over_ranks(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
    own = gradients(rank)
    by_group = grad_norm(own, groups=[group])
    by_communicator = grad_norm(own, groups=[Communicator.of(group)])
    return [by_group, by_communicator]


@pytest.mark.parametrize("size", [2, 3])
def test_the_norm_over_ranks_is_that_of_all_their_gradients(world, size: int):
    found = world(size).run(over_ranks)
    whole = grad_norm([g for rank in range(size) for g in gradients(rank)])
    for of_rank in found:
        for norm in of_rank:
            assert torch.equal(norm, found[0][0])
            assert norm.item() == pytest.approx(whole.item(), rel=1e-13)

"""ZeroOptimizer(symmetric_step=True) over ranks of several processes: see mapped_files.py."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pyops.optim
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.cuda.symmetric.mapped_files import MappedFiles
from tests.grids import full
from tests.zero.models import Net, groups, mean_loss, part

pytestmark = pytest.mark.cpu_only

ADAM = {"lr": 3e-2, "betas": (0.85, 0.97), "eps": 1e-6}


def _train(
    rank: int, group: Any, stage: int, precision: str | None, symmetric: bool, backwards: int
) -> tuple[list[Tensor], list[float]]:
    """Five steps of a net with tied, unused and sometimes used parameters and two param groups; in
    one of them a rank has no gradient."""
    size, net = dist.get_world_size(group), Net(mixed=False)
    config = ZeroConfig(
        stage=stage, precision=precision, symmetric_step=symmetric, bucket_bytes=2000
    )
    zero = ZeroOptimizer(net, pyops.optim.AdamW, config, params=groups(net), group=group, **ADAM)
    losses = []
    for step in range(5):
        for k in range(backwards):
            x, y = (t.to(net.first.weight.dtype) for t in part(step + 7 * k, rank, size))
            loss = mean_loss(net, x, y, sometimes=step % 2 == 1)
            if step == 2 and rank == 1:  # what an earlier backward left in memory does not count
                loss = 0.0 * loss
                if zero.symmetric is not None:
                    losses.append(0.0)
                    continue
            with zero.no_sync() if k + 1 < backwards else warnings.catch_warnings():
                loss.backward()
            losses.append(float(loss.detach()) if step != 2 else 0.0)
        zero.step()
    found = [p.detach().clone() for p in net.parameters()]
    state = zero.state_dict()
    zero.close()
    assert state
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), found, strict=True))
    return found, losses


def _both(
    rank: int, group: Any, folder: str, library: str, stage: int, precision: str | None, many: int
) -> list[str]:
    """With the kernel and without it, in the order of summation that both have."""
    train = partial(_train, rank, stage=stage, precision=precision, backwards=many)
    plain, before = train(dist.new_group(), symmetric=False)
    fresh, wrong = dist.new_group(), []
    with MappedFiles(folder, library, fresh, buffers=None) as files:
        fused, after = train(fresh, symmetric=True)
    pyops.comm.release(fresh)
    if files.launches != 10:
        wrong.append(f"{files.launches} launches, not one a step and group")
    close = {"rtol": 2e-2, "atol": 2e-3} if precision else {"rtol": 3e-5, "atol": 3e-6}
    for i, (got, want) in enumerate(zip(fused, plain, strict=True)):
        if not torch.allclose(got.float(), want.float(), **close):
            wrong.append(f"parameter {i}: {float((got - want).abs().max())}")
    if not torch.allclose(torch.tensor(after), torch.tensor(before), rtol=1e-2):
        wrong.append(f"losses {after} {before}")
    if torch.equal(fused[0], Net(mixed=False).first.weight):
        wrong.append("nothing was trained")
    everyone = [torch.empty_like(fused[0]) for _ in range(dist.get_world_size(group))]
    for mine in fused:
        everyone = [torch.empty_like(mine) for _ in everyone]
        dist.all_gather(everyone, mine, group=group)
        if not all(torch.equal(mine, each) for each in everyone):
            wrong.append("the ranks differ")
    return wrong


@pytest.mark.parametrize(
    ("size", "stage", "precision", "many"),
    [full(2, 1, None, 1), (3, 2, None, 2), (2, 2, "bf16", 1), full(3, 1, "bf16", 2)],
)
def test_one_kernel_trains_as_three_collectives_do(
    world, symmetric, tmp_path: Path, size, stage, precision, many
):
    found = world(size).run(_both, str(tmp_path), symmetric._name, stage, precision, many)
    assert found == [[]] * size


def _fallen_back(rank: int, group: Any, folder: str, library: str, buffers: int) -> list[str]:
    """Rank 1 has no memory for one of the buffers: all ranks train as without it."""
    plain, _ = _train(rank, dist.new_group(), 1, None, False, 1)
    fresh, wrong = dist.new_group(), []
    with (
        warnings.catch_warnings(record=True) as said,
        MappedFiles(folder, library, fresh, buffers=buffers if rank == 1 else None) as files,
    ):
        warnings.simplefilter("always")
        found, _ = _train(rank, fresh, 1, None, True, 1)
    pyops.comm.release(fresh)
    if files.launches:
        wrong.append("a kernel ran")
    if not all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)):
        wrong.append("not the steps of the three collectives")
    words = [str(w.message) for w in said if "rank 1: CUDA driver error" in str(w.message)]
    if len(words) != (rank == 0):
        wrong.append(f"said {len(words)} times")
    return wrong


@pytest.mark.parametrize("buffers", [0, 2, 3])  # pads, workspace, parameters, gradients
def test_all_ranks_fall_back_together(world, symmetric, tmp_path: Path, buffers):
    found = world(2).run(_fallen_back, str(tmp_path), symmetric._name, buffers)
    assert found == [[], []]


@pytest.mark.parametrize(
    ("options", "optimizer", "words"),
    [
        ({"stage": 3}, pyops.optim.AdamW, "it is for stages 1 and 2"),
        ({"stage": 0}, pyops.optim.AdamW, "it is for stages 1 and 2"),
        ({"max_grad_norm": 1.0}, pyops.optim.AdamW, "max_grad_norm is 1.0"),
        ({"offload": "cpu"}, pyops.optim.AdamW, "offload is 'cpu'"),
        ({}, pyops.optim.SGD, "the optimizer is SGD"),
        ({}, torch.optim.AdamW, "pyops.optim.Adam and AdamW"),
        ({}, partial(pyops.optim.Adam, amsgrad=True), "amsgrad is True"),
    ],
)
def test_what_the_kernel_does_not_have_is_refused(options, optimizer, words):
    net = Net(mixed=False)
    before = [p.detach().clone() for p in net.parameters()]
    config = ZeroConfig(**{"stage": 1, "symmetric_step": True, **options})
    with pytest.raises(ValueError, match="symmetric_step is True") as error:
        ZeroOptimizer(net, optimizer, config, lr=1e-3)
    assert words in str(error.value)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))

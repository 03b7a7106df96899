"""GroupBatchNorm2d: several ranks as one process, ghosts, running statistics, mistakes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.mesh import ALONE
from pyops.models.coatnet.batch_norm import GroupBatchNorm2d, set_micro_batches
from pyops.recompute import checkpoint

F64 = torch.float64
CHANNELS = 5
# Images of each rank: as many, uneven, one image on a rank, none on a rank.
PARTS = {2: ((3, 3), (5, 1), (0, 6)), 3: ((2, 2, 2), (4, 1, 1), (3, 0, 3))}


def images(count: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, CHANNELS, 3, 2, generator=generator, dtype=F64) * 2.0 + 7.0


def norm_with(*, group: Any = ALONE, micro_batches: int = 1, **options: Any) -> GroupBatchNorm2d:
    norm = GroupBatchNorm2d(CHANNELS, group, eps=0.1, momentum=0.3, dtype=F64, **options)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1.0, 2.0, CHANNELS))
        norm.bias.copy_(torch.linspace(0.5, -0.5, CHANNELS))
    set_micro_batches(nn.Sequential(norm), micro_batches)
    return norm


def results(norm: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Of one step: y, the gradients, and the running statistics."""
    leaf = x.clone().requires_grad_()
    y = norm(leaf)
    gradients = torch.autograd.grad(y, [leaf, norm.weight, norm.bias], dy)
    return {
        "y": y.detach(),
        **dict(zip(("dx", "dweight", "dbias"), gradients, strict=True)),
        "running_mean": norm.running_mean.clone(),
        "running_var": norm.running_var.clone(),
    }


def torchs() -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(CHANNELS, eps=0.1, momentum=0.3, dtype=F64)
    norm.load_state_dict(norm_with().state_dict())
    return norm


def on_rank(rank: int, group: dist.ProcessGroup, ranks: int) -> list[dict[str, Tensor]]:
    found = []
    for parts in PARTS[ranks]:
        start = sum(parts[:rank])
        own = slice(start, start + parts[rank])
        found.append(results(norm_with(group=group), images()[own], images(seed=1)[own]))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks_are_one_process(ranks: int, world):
    found = world(ranks).run(on_rank, ranks)
    exact = results(torchs(), images(), images(seed=1))
    assert all(t.abs().max() > 1e-3 for t in exact.values())
    for parts in zip(*found, strict=True):
        for name in ("y", "dx"):
            whole = torch.cat([part[name] for part in parts])
            torch.testing.assert_close(whole, exact[name], rtol=1e-12, atol=1e-12)
        for name in ("dweight", "dbias"):  # as data parallelism sums them
            total = sum(part[name] for part in parts)
            torch.testing.assert_close(total, exact[name], rtol=1e-12, atol=1e-12)
        for name in ("running_mean", "running_var"):
            assert all(torch.equal(part[name], parts[0][name]) for part in parts)
            torch.testing.assert_close(parts[0][name], exact[name], rtol=1e-12, atol=1e-12)


def test_one_process_is_torchs():
    norm, other = norm_with(), torchs()
    for _ in range(2):  # in training, then by the running statistics
        exact = results(other, images(), images(seed=1))
        for name, found in results(norm, images(), images(seed=1)).items():
            torch.testing.assert_close(found, exact[name], rtol=1e-12, atol=1e-12)
        assert norm.num_batches_tracked == 1
        norm.eval(), other.eval()


@pytest.mark.parametrize("mode", ["batch", "ghost"])
def test_micro_batches_and_recomputation_change_the_statistics_once(mode: str):
    """By the mean of the parts; a part that backward computes again counts once."""
    x = images(8)
    ghost = {"ghost_size": 2, "mode": "ghost"} if mode == "ghost" else {}
    norm = norm_with(micro_batches=2, **ghost)
    size = 2 if mode == "ghost" else 4
    for _ in range(2):
        before = norm.running_mean.clone(), norm.running_var.clone()
        for part in x.split(4):
            leaf = part.clone().requires_grad_()
            checkpoint(norm, leaf).square().sum().backward()
        parts = x.split(size)
        mean = torch.stack([p.mean((0, 2, 3)) for p in parts]).mean(0)
        variance = torch.stack([p.transpose(0, 1).flatten(1).var(1) for p in parts]).mean(0)
        for running, old, now in zip(
            (norm.running_mean, norm.running_var), before, (mean, variance), strict=True
        ):
            torch.testing.assert_close(running, 0.7 * old + 0.3 * now, rtol=1e-12, atol=0)
    assert norm.num_batches_tracked == 2


def test_ghosts_do_not_depend_on_the_micro_batch():
    """Four ghosts in one forward pass or in two: the same bits of everything."""
    x, dy = images(8), images(8, seed=1)
    one = norm_with(mode="ghost", ghost_size=2)
    two = norm_with(mode="ghost", ghost_size=2, micro_batches=2)
    whole = results(one, x, dy)
    parts = [results(two, a, b) for a, b in zip(x.split(4), dy.split(4), strict=True)]
    assert torch.equal(whole["y"], torch.cat([p["y"] for p in parts]))
    assert torch.equal(whole["dx"], torch.cat([p["dx"] for p in parts]))
    assert torch.equal(one.running_mean, two.running_mean)
    assert torch.equal(one.running_var, two.running_var)
    total = sum(p["dweight"] for p in parts)
    torch.testing.assert_close(whole["dweight"], total, rtol=1e-12, atol=0)
    exact = results(torchs(), x[2:4], dy[2:4])
    torch.testing.assert_close(whole["y"][2:4], exact["y"], rtol=1e-12, atol=0)


def ghosts_on_rank(rank: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
    own = slice(4 * rank, 4 * rank + 4)
    norm = norm_with(group=group, mode="ghost", ghost_size=2)
    return results(norm, images(8)[own], images(8, seed=1)[own])


def test_ghosts_of_several_ranks(world):
    found = world(2).run(ghosts_on_rank)
    exact = results(norm_with(mode="ghost", ghost_size=2), images(8), images(8, seed=1))
    for name in ("y", "dx"):
        assert torch.equal(torch.cat([part[name] for part in found]), exact[name])
    for name in ("running_mean", "running_var"):
        assert torch.equal(found[0][name], found[1][name])
        torch.testing.assert_close(found[0][name], exact[name], rtol=1e-12, atol=0)


def one_number_on_rank(rank: int, group: dist.ProcessGroup, numbers: int) -> str:
    norm = norm_with(group=group)
    x = torch.ones(1 if rank < numbers else 0, CHANNELS, 1, 1, dtype=F64)
    try:
        norm(x)
    except ValueError as error:
        return f"{error} {norm.running_mean.abs().max():.0f}"
    return "taken"


def test_one_number_a_channel_is_refused_on_every_rank(world):
    said = world(2).run(one_number_on_rank, 1)
    assert all("more than one value a channel; got 1 of x" in text for text in said)
    assert all(text.endswith(" 0") for text in said)  # nothing was changed
    assert world(2).run(one_number_on_rank, 2) == ["taken", "taken"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "layer"}, 'mode must be "batch" or "ghost"; got \'layer\''),
        ({"mode": "ghost"}, "takes a ghost_size"),
        ({"ghost_size": 2}, "ghost_size=2"),
        ({"mode": "ghost", "ghost_size": 0}, "ghost_size must be 1 or more; got 0"),
        ({"micro_batches": 0}, "a step has one micro-batch or more; got 0"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        norm_with(**options)


def test_images_that_are_refused():
    with pytest.raises(ValueError, match=r"x must be \[B, 5, H, W\].*got \[2, 4, 3, 3\]"):
        norm_with()(torch.ones(2, 4, 3, 3, dtype=F64))
    with pytest.raises(ValueError, match=r"3 images are no multiple of ghost_size=2"):
        norm_with(mode="ghost", ghost_size=2)(images(3))


def test_a_copy_is_a_norm_of_its_own():
    norm = norm_with()
    norm(images())
    twin = copy.deepcopy(norm)
    twin(images(seed=3))
    assert not torch.equal(twin.running_mean, norm.running_mean)
    assert "mode='batch', ranks=1" in repr(twin)

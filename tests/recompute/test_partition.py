"""Inputs split over a group: each rank keeps its n-th, and gradients have the bits of a run without
recomputation."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.data_parallel import DataParallel
from pyops.recompute import apply, checkpoint
from pyops.recompute.inputs import Keeping
from tests.recompute.parts import WIDTH, Part, Stack, run

pytestmark = pytest.mark.on_device


def _layouts() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, 3, generator=generator)
    return {
        "whole": x,
        "transposed": x.permute(2, 0, 1),
        "with gaps": x[:, 1:6:2, :2],
        "repeated": x[:, :1].expand(5, 7, 3),
        "one element": x[0, 0, 0],
        "none": x[:0],
        "bf16": x.bfloat16(),
        "bool": x > 0,
        "int64": torch.arange(11),
        "complex": torch.complex(x, -x).conj(),
    }


def _round_trip(rank: int, group: Any) -> dict[str, list[Any]]:
    keeping, size, found = Keeping(group), dist.get_world_size(group), {}
    for name, x in _layouts().items():
        kept = keeping.pack(x)
        part = kept if isinstance(kept, Tensor) else kept.part
        assert part.numel() <= -(-x.numel() // size)
        assert part.untyped_storage().nbytes() == part.nbytes, (
            "a part of the whole would keep the whole"
        )
        back = keeping.unpack(kept)
        assert torch.equal(back, x), name
        assert back.dtype == x.dtype
        found[name] = [part.numel(), back.stride() == x.stride()]
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_any_tensor_comes_back_from_its_parts(world, size):
    found = world(size).run(_round_trip)
    for name, x in _layouts().items():
        assert sum(rank[name][0] for rank in found) == x.numel(), "each element lies on one rank"
        if name in ("whole", "transposed", "bf16"):
            assert all(rank[name][1] for rank in found), (
                f"{name}: other strides would take other kernels"
            )


def _train(rank: int, group: Any) -> list[bool]:
    torch.manual_seed(0)
    plain = Stack()
    model = copy.deepcopy(plain)
    kept = []

    def call(part: nn.Module, x: Tensor) -> Tensor:
        kept.append(weakref.ref(x))
        return checkpoint(part, x, partition_group=group)

    model.call = call
    x = torch.randn(5, WIDTH)  # 60 elements over 2, 3: and 5 x 7 below does not divide
    same = [torch.equal(a, b) for a, b in zip(run(model, x), run(plain, x), strict=True)]
    odd = Part(7)
    leaf = torch.randn(5, 7, requires_grad=True)
    hidden = leaf * 2
    y = checkpoint(odd, hidden, partition_group=group)
    alive = weakref.ref(hidden)
    del hidden
    same.append(alive() is None)
    y.sum().backward()
    same.append(bool(leaf.grad.abs().max() > 0))
    return same


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_have_the_same_bits_and_whole_inputs_are_gone(world, size):
    for same in world(size).run(_train):
        assert all(same)


def _under_data_parallel(rank: int, group: Any, use: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = Stack()
    alone = dist.new_subgroups(1)[0] if use == "partition" else None
    if use != "none":
        assert apply(net, ["parts.*"], partition_group=alone) == ["parts.0", "parts.1", "parts.2"]
    model = DataParallel(net, group=group, bucket_bytes=600)
    torch.manual_seed(rank)
    x = torch.randn(4, WIDTH)
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(9)
        model(x).square().mean().backward()
    return [p.grad.clone() for p in net.parameters()]


@pytest.mark.parametrize("use", ["apply", "partition"])
def test_data_parallel_sees_one_ordinary_backward(world, use):
    plain = world(2).run(_under_data_parallel, "none")[0]
    assert all(g.abs().max() > 0 for g in plain)
    for found in world(2).run(_under_data_parallel, use):
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))

"""Replicas are compared bit for bit; the odd rank and its tensors are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyops.observe.replicas import OddReplica, compare_replicas, digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (1 << 20, 2)])
def test_every_bit_and_every_place_counts(dtype, shape, device):
    x = torch.randint(0, 100, shape, device=device).to(dtype)
    assert digest(x) == digest(x.clone())
    other = x.clone()
    other.view(-1)[-1] += 1
    assert digest(x) != digest(other)
    if x.numel() > 2:
        swapped = x.clone().view(-1)
        swapped[0], swapped[-1] = 1, 2
        back = swapped.clone()
        back[0], back[-1] = 2, 1
        assert digest(swapped) != digest(back)


def test_the_sign_of_zero_and_strides_are_seen(device):
    x = torch.zeros(4, device=device)
    assert digest(x) != digest(-x)
    square = torch.arange(9.0, device=device).view(3, 3)
    assert digest(square.T) == digest(square.T.contiguous())


def one_bit_flipped(rank: int, group: Any) -> list[OddReplica]:
    tensors = {"w": torch.arange(100.0), "b": torch.ones(3)}
    if rank == 1:
        tensors["w"].view(torch.int32)[57] ^= 1 << 3
    return compare_replicas(tensors, group=group)


def test_the_odd_rank_is_named_on_all_ranks(world):
    assert world(3).run(one_bit_flipped) == [[OddReplica("w", (1,))]] * 3


def test_of_two_that_differ_both_are_named(world):
    assert world(2).run(one_bit_flipped) == [[OddReplica("w", (0, 1))]] * 2


def test_one_process_is_equal_to_itself():
    assert compare_replicas({"w": torch.ones(3)}) == []

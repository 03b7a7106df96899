"""Placement: cut, pad, give back; and where any run of a rank's elements stands in the whole."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from torch import nn

from pyops.flat import Placement, Shards


def whole_of(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1, prod(shape) + 1, dtype=torch.float32).view(shape)


def pasted(parts: list[Shards], shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole that the parts make, and how often each element came."""
    whole, count = torch.zeros(shape), torch.zeros(shape)
    for shards in parts:
        for part in shards:
            where = tuple(
                slice(o, o + n) for o, n in zip(part.offset, part.tensor.shape, strict=True)
            )
            whole[where] = part.tensor
            count[where] += 1
    return whole, count


def test_seven_rows_over_three_ranks() -> None:
    whole = whole_of((7, 2))
    parts = [Placement.cut((7, 2), dim=0, rank=r, ranks=3) for r in range(3)]
    assert [(p.start, p.stop, p.length) for p in parts] == [(0, 3, 3), (3, 6, 3), (6, 7, 3)]
    assert torch.equal(parts[2].take(whole), torch.tensor([[13.0, 14.0], [0, 0], [0, 0]]))
    assert parts[2].local_shape == (3, 2)
    assert parts[2].size == (1, 2)
    assert parts[2].offset == (6, 0)
    assert torch.equal(torch.cat([p.part(p.take(whole)) for p in parts]), whole)


def test_units_are_not_cut() -> None:
    parts = [Placement.cut((12, 2), dim=0, rank=r, ranks=2, unit=4) for r in range(2)]
    assert [(p.start, p.stop, p.length) for p in parts] == [(0, 8, 8), (8, 12, 8)]


def test_copies_are_neighbours_and_partial() -> None:
    parts = [Placement.cut((2, 3), dim=0, rank=r, ranks=4, copies=2) for r in range(4)]
    assert [(p.start, p.stop) for p in parts] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [p.first for p in parts] == [True, False, True, False]
    assert all(p.partial and p.copies == 2 for p in parts)


def test_whole_counts_once() -> None:
    parts = [Placement.whole((3,), rank=r, ranks=3, partial=True) for r in range(3)]
    assert [p.first for p in parts] == [True, False, False]
    assert all(p.partial and p.copies == 3 for p in parts)
    assert not Placement.whole((3,), rank=0, ranks=1, partial=True).partial


@pytest.mark.parametrize("shape", [(7,), (5, 4), (3, 5, 4)])
def test_any_runs_of_the_local_elements_make_the_whole(shape: tuple[int, ...]) -> None:
    whole = whole_of(shape)
    for dim, ranks in itertools.product(range(len(shape)), (1, 2, 3, 4)):
        parts = []
        for rank in range(ranks):
            placement = Placement.cut(shape, dim=dim, rank=rank, ranks=ranks)
            flat = placement.take(whole).view(-1)
            cuts = sorted(
                {0, 1, flat.numel() // 3, flat.numel() // 2 + 1, flat.numel()}
                & set(range(flat.numel() + 1))
            )
            parts += [placement.shards(flat[a:b], start=a) for a, b in itertools.pairwise(cuts)]
        made, count = pasted(parts, shape)
        assert torch.equal(made, whole), (dim, ranks)
        assert bool((count == 1).all()), (dim, ranks)


def test_shards_are_views() -> None:
    placement = Placement.cut((4, 6), dim=1, rank=1, ranks=2)
    flat = placement.take(whole_of((4, 6))).view(-1)
    for part in placement.shards(flat[2:8], start=2):
        part.tensor.zero_()
    assert flat.eq(0).nonzero().flatten().tolist() == [2, 3, 4, 5, 6, 7]


def test_refusals_name_the_values() -> None:
    with pytest.raises(ValueError, match=r"dim 0 of \(7, 2\) must be a multiple of 4"):
        Placement.cut((7, 2), dim=0, rank=0, ranks=2, unit=4)
    with pytest.raises(ValueError, match="3 ranks one of 2 copies"):
        Placement.cut((8, 2), dim=0, rank=0, ranks=3, copies=2)
    with pytest.raises(ValueError, match=r"\(3, 2\) is not the whole of \(7, 2\)"):
        Placement.cut((7, 2), dim=0, rank=0, ranks=2).take(torch.zeros(3, 2))


def test_of_names_parameters_as_the_model_does() -> None:
    class Cut(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.placements = {"weight": Placement.cut((6, 4), dim=0, rank=1, ranks=2)}

    model = nn.Sequential(nn.Linear(4, 4), Cut(), Cut())
    model[2].weight = model[1].weight
    assert set(Placement.of(model)) == {"1.weight"}
    assert Placement.of(model)["1.weight"].start == 3
    model[1].placements = {"weight": Placement.cut((8, 4), dim=0, rank=1, ranks=2)}
    with pytest.raises(
        ValueError, match=r"1.weight is of shape \(3, 4\), its placement is for \(4, 4\)"
    ):
        Placement.of(model)

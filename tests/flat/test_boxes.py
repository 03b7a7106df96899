"""Placements with several cuts: boxes of random grids make the whole once, in memory, in
checkpoints and when ranks save."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pyops import checkpoint
from pyops.flat import Cut, Placement, Shards, whole_of_boxes
from pyops.hub.part_gathering import gather_parts
from pyops.tensor_parallel import Ranks, clip_grad_norm_, sync_partial_grads
from pyops.zero.layout.shard_range import ShardRange
from tests.flat.test_placement import pasted, whole_of

SHAPE = (5, 3, 4)


def grid_of(rank: int) -> Placement:
    """Rank's box of [5, 3, 4] over 2 x 2 ranks, the first dim padded."""
    return Placement.grid(SHAPE, parts={0: (rank // 2, 2), 2: (rank % 2, 2)})


def test_literals_of_a_box() -> None:
    place = grid_of(3)
    assert place.cuts == (Cut(0, 3, 5, 3), Cut(2, 2, 4, 2))
    assert (place.local_shape, place.box) == ((3, 3, 2), ((3, 0, 2), (2, 3, 2)))
    assert [grid_of(rank).index for rank in range(4)] == [0, 1, 2, 3]
    local = place.take(whole_of(SHAPE))
    assert local[1, 2].tolist() == [59.0, 60.0]
    assert not local[2].any()
    with pytest.raises(ValueError, match=r"is cut along dims \[0, 2\]"):
        _ = place.start


@pytest.mark.parametrize("seed", range(12))
def test_any_runs_of_random_boxes_make_the_whole(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(2, 4)))
    dims = draw.sample(range(len(shape)), draw.randint(1, len(shape)))
    degrees = {dim: draw.randint(1, 3) for dim in dims}
    whole, parts, places, taken = whole_of(shape), [], [], []
    for number in range(prod(degrees.values())):
        at, chosen = number, {}
        for dim in sorted(dims, reverse=True):
            at, rank = divmod(at, degrees[dim])
            chosen[dim] = (rank, degrees[dim])
        place = Placement.grid(shape, parts=chosen)
        assert place.index == number
        local = place.take(whole)
        places.append(place)
        taken.append(local)
        cut = draw.randint(0, local.numel())
        for start, stop in ((0, cut), (cut, local.numel())):
            run = local.view(-1)[start:stop]
            parts.append(place.shards(run, start=start))
            # The same run, found in the whole, and in boxes of a state that the layout gave
            where = ShardRange(tuple(local.shape), start, stop, place)
            assert torch.equal(where.find(whole, "w")(), run)
            assert torch.equal(where.find(where.shards(run.clone()), "w")(), run)
    made, count = pasted(parts, shape)
    assert torch.equal(made, whole)
    assert bool((count == 1).all())
    assert torch.equal(places[0].joined(taken, places), whole)
    copies = [replace(place, copies=2, first=False) for place in places]
    assert torch.equal(places[0].joined(taken * 2, [*places, *copies]), whole)


def test_boxes_that_do_not_cover_the_whole_are_refused() -> None:
    boxes = [(grid_of(r).box, grid_of(r).part(grid_of(r).take(whole_of(SHAPE)))) for r in range(4)]
    with pytest.raises(ValueError, match=r"element \[0, 0, 2\] of .* is in 0 of the 3 parts"):
        whole_of_boxes([boxes[0], *boxes[2:]], SHAPE)
    with pytest.raises(ValueError, match=r"element \[3, 0, 0\] of .* is in 2 of the 5 parts"):
        whole_of_boxes([*boxes, boxes[2]], SHAPE)


def test_one_cut_of_a_pickle_from_before() -> None:
    new = Placement.cut((8, 6), dim=1, rank=2, ranks=4, copies=2)
    old = copy.copy(new)
    state = dict(vars(old))
    cut = state.pop("cuts")[0]
    state.pop("index")
    state |= {"dim": cut.dim, "start": cut.start, "stop": cut.stop, "length": cut.length}
    read = Placement.__new__(Placement)
    read.__setstate__(state)
    assert read == new
    assert read.dim == 1
    assert pickle.loads(pickle.dumps(new)) == new


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: Placement.grid(SHAPE, parts={3: (0, 2)}), r"dim 3 is none of \(5, 3, 4\)"),
        (lambda: Placement.grid(SHAPE, parts={0: (2, 2)}), "part 2 of 2: give a number from 0 to"),
        (lambda: Placement.grid(SHAPE, parts={1: (0, 2)}, units={1: 2}), "must be a multiple of 2"),
        (lambda: Placement.grid(SHAPE, parts={}, copy=1), "copy 1 of 1"),
        (lambda: Placement(SHAPE, (Cut(2, 0, 1, 1), Cut(0, 0, 1, 1))), r"cuts along dims \[2, 0\]"),
        (lambda: Placement(SHAPE, (Cut(0, 0, 6, 6),)), "does not fit"),
    ],
)
def test_refusals_of_boxes(made: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made()


class _Boxes(nn.Module):
    """A box, and a part whose copies are not neighbors."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.placements = {
            "box": grid_of(rank),
            "far": Placement.grid(
                (4, 2), parts={0: (rank % 2, 2)}, copy=rank // 2, copies=2, partial=True
            ),
        }
        for name, place in self.placements.items():
            whole = whole_of(place.global_shape).double()
            self.register_parameter(name, nn.Parameter(place.take(whole)))


def _on_ranks(rank: int, group: Any, folder: str) -> None:
    model = _Boxes(rank)
    ranks = Ranks.of(group)
    for name, p in model.named_parameters():
        place = model.placements[name]
        p.grad = p.detach() * (1.0 if place.copies == 1 else 1.0 + rank // 2)
        whole = gather_parts(p.detach(), place, ranks)
        if name == "box":
            assert (whole is None) == (rank > 0)
            assert whole is None or torch.equal(whole, whole_of(SHAPE).double())
    # Copies 1 and 2 times the values: three times in sum
    sync_partial_grads(model, group=group)
    assert torch.equal(model.far.grad, 3 * model.far.detach())
    expected = (
        whole_of(SHAPE).double().square().sum() + 9 * whole_of((4, 2)).double().square().sum()
    ).sqrt()
    norm = clip_grad_norm_(model, 1e9, group=group)
    torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)
    state = {
        name: place.shards(model.get_parameter(name).detach().view(-1))
        for name, place in model.placements.items()
    }
    checkpoint.save(folder, state, group=group)
    # Read as another grid: one cut along the dim that was whole
    place = Placement.cut(SHAPE, dim=1, rank=rank, ranks=4)
    mine = torch.full(place.local_shape, -1.0, dtype=torch.float64)
    into: dict[str, Shards] = {"box": place.shards(mine.view(-1))}
    checkpoint.load(folder, into=into, group=group)
    assert torch.equal(place.part(mine), place.part(place.take(whole_of(SHAPE).double())))


def test_boxes_over_ranks(world: Any, tmp_path: Path) -> None:
    world(4).run(_on_ranks, str(tmp_path / "a"))
    state, _ = checkpoint.load(tmp_path / "a")
    assert torch.equal(state["box"], whole_of(SHAPE).double())
    assert torch.equal(state["far"], whole_of((4, 2)).double())

"""GPT and ViT train on every grid as on one rank: 20 losses with dropout, the gradient's norm, and
checkpoints that any other layout reads."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.flat import Placement
from pyops.flat.shard import whole_of_boxes
from pyops.mesh import ALONE
from pyops.models import GPT, GPTConfig, ViT, ViTConfig
from pyops.tensor_parallel import Ranks, clip_grad_norm_
from pyops.tensor_parallel.grids import Grid
from tests.grids import full
from tests.tensor_parallel.grids.virtual_grids import Shape, numbers, on_grid

pytestmark = pytest.mark.cpu_only

GRIDS: list[tuple[str, Shape]] = [("2d", (2, 2)), ("2.5d", (2, 2, 2)), ("3d", (2, 2, 2))]
MORE: list[tuple[str, Shape]] = [("2d", (1, 2)), ("2d", (2, 1)), ("2.5d", (2, 1, 1))]
STEPS = 20
B, T = 6, 8
GPTS: dict[str, dict[str, Any]] = {
    "gpt2": {"dim": 18, "hidden": 30, "dropout": 0.1, "attention_dropout": 0.1},
    "llama": {
        "dim": 16,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "positions": "rotary",
        "bias": False,
        "tied_head": False,
        "num_kv_heads": 2,
        "hidden": 30,
        "dropout": 0.1,
    },
}


def gpt(kind: str, **where: Any) -> GPT:
    config = GPTConfig(
        vocab_size=23, sequence_length=T, num_layers=2, num_heads=4, head_dim=4, **GPTS[kind]
    )
    return GPT(config, **where)


def vit(kind: str = "vit", **where: Any) -> ViT:
    config = ViTConfig(
        num_labels=5,
        image_size=8,
        patch_size=4,
        num_channels=2,
        num_layers=2,
        num_heads=4,
        dim=16,
        hidden=24,
        dropout=0.1,
        attention_dropout=0.1,
    )
    return ViT(config, **where)


def batch_of(model: GPT | ViT, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    if isinstance(model, ViT):
        labels = torch.randint(0, 5, (B,), generator=generator)
        noise = torch.randn(B, 2, 8, 8, generator=generator)
        return noise + labels.view(-1, 1, 1, 1), labels
    tokens = torch.randint(0, 23, (B, T), generator=generator) // 2
    targets = tokens.roll(-1, 1)
    targets[: step % B, :3] = -100  # the sequences have unequally many that count
    return tokens, targets


def train(model: GPT | ViT, steps: int = STEPS) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    losses = []
    for step in range(steps):
        model.set_dropout(B if isinstance(model, ViT) else (B, T), seed=5, step=step)
        optimizer.zero_grad()
        loss = model.loss(*batch_of(model, step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def held(model: GPT | ViT) -> dict[str, tuple[Placement, Tensor]]:
    """This rank's parameters; those without a placement are the same on every rank."""
    places, ranks = Placement.of(model), model.layout.ranks
    return {
        n: (
            places.get(n) or Placement.whole(p.shape, rank=ranks.rank, ranks=ranks.size),
            p.detach(),
        )
        for n, p in model.named_parameters()
    }


def whole_models(ranks: list[dict[str, tuple[Placement, Tensor]]]) -> dict[str, Tensor]:
    """The parameters of the first copies put together; the others must be bitwise the same."""
    found = {}
    for name, (place, _) in ranks[0].items():
        parts = [rank[name] for rank in ranks]
        first = {p.index: p.part(t) for p, t in parts if p.first}
        assert all(torch.equal(first[p.index], p.part(t)) for p, t in parts), name
        boxes = [(p.box, p.part(t)) for p, t in parts if p.first]
        found[name] = whole_of_boxes(boxes, place.global_shape)
    return found


@cache
def alone(make: Any, kind: str, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of one rank, and the model's first values."""
    model = make(kind, seed=3)
    first = {n: p.detach().clone() for n, p in model.named_parameters()}
    return train(model, steps), first


def check(make, kind: str, mode: str, shape: Shape, steps: int) -> None:
    losses, first = alone(make, kind, steps)
    assert losses[-1] != losses[0]

    def body(grid: Grid) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
        model = make(kind, group=grid, seed=3)
        before = {n: (p, t.clone()) for n, (p, t) in held(model).items()}
        return before, train(model, steps), held(model)

    results = on_grid(mode, shape, body)
    begun = whole_models([before for before, *_ in results])
    assert begun.keys() == first.keys()
    assert all(torch.equal(begun[n], first[n]) for n in begun)
    for rank, (_, found, _) in enumerate(results):
        assert found == results[0][1], rank  # the same bits on every rank
        expected = torch.tensor(losses[:steps])
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=0)
    whole_models([after for *_, after in results])  # copies are still the same, bit for bit


CASES = [(gpt, "gpt2"), (gpt, "llama"), (vit, "vit")]


@pytest.mark.full
@pytest.mark.parametrize(("make", "kind"), CASES)
@pytest.mark.parametrize(("mode", "shape"), GRIDS + MORE)
def test_models_have_the_20_losses_of_one_rank_on_every_grid(mode, shape, make, kind):
    check(make, kind, mode, shape, STEPS)


@pytest.mark.parametrize(
    ("mode", "shape", "make", "kind", "steps"),
    [
        full("2d", (2, 2), gpt, "gpt2", 5),
        full("2.5d", (2, 2, 2), gpt, "gpt2", 2),
        ("3d", (2, 2, 2), gpt, "llama", 2),
        ("2d", (2, 2), vit, "vit", 2),
    ],
)
def test_models_have_the_losses_of_one_rank(mode, shape, make, kind, steps):
    check(make, kind, mode, shape, steps)


def test_models_refuse_what_a_grid_does_not_go_with():
    grid = Grid(None, mode="2d")
    for make, kind in CASES:
        with pytest.raises(ValueError, match=r"a grid and sequence_parallel=True; .* leave"):
            make(kind, group=grid, sequence_parallel=True)
    model = gpt("gpt2", group=grid)
    with pytest.raises(ValueError, match="a grid keeps no keys: load the checkpoint into GPT"):
        model(torch.zeros(1, 2, dtype=torch.int64), past=model.new_kv_caches())


def test_logits_of_a_grid_have_a_gradient():
    model = gpt("gpt2", seed=3).double().eval()
    tokens = batch_of(model, 0)[0]
    logits = model(tokens)
    dy = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).double()
    logits.backward(dy)
    expected = {n: p.grad for n, p in model.named_parameters()}

    def body(grid: Grid) -> None:
        own = gpt("gpt2", group=grid, seed=3).double().eval()
        found = own(tokens)
        torch.testing.assert_close(found, logits)
        found.backward(dy)
        places = Placement.of(own)
        for name, p in own.named_parameters():
            torch.testing.assert_close(p.grad, places[name].take(expected[name]))

    on_grid("2d", (2, 2), body)


def test_parts_of_one_layout_make_those_of_any_other_bit_for_bit():
    """What a checkpoint writes on 2 x 2 ranks, on 4 of one dimension, and on 2 x 2 x 2."""
    first = {n: p.detach() for n, p in gpt("gpt2", seed=3).named_parameters()}
    values = {n: numbers(*p.shape, seed=len(n)).float() for n, p in first.items()}

    def placed(ranks: list[GPT]) -> dict[str, Tensor]:
        """Cut the values, and put together what these ranks write of them."""
        written: dict[str, list[Any]] = {n: [] for n in values}
        for rank, model in enumerate(ranks):
            places = Placement.of(model)
            for name, value in values.items():
                place = places.get(name) or Placement.whole(
                    value.shape, rank=rank, ranks=len(ranks)
                )
                own = place.take(value)
                written[name] += [s for s in place.shards(own.flatten()) if not s.copy]
        return {
            n: whole_of_boxes([((s.offset, s.shape), s.tensor) for s in some], values[n].shape)
            for n, some in written.items()
        }

    for mode, shape in (("2d", (2, 2)), ("", (4,)), ("3d", (2, 2, 2)), ("2d", (2, 2))):
        if mode:
            ranks = on_grid(mode, shape, lambda grid: gpt("gpt2", group=grid, seed=None))
        else:
            ranks = [gpt("gpt2", group=Ranks(ALONE, rank, 4), seed=None) for rank in range(4)]
        found = placed(ranks)
        assert all(torch.equal(found[n], values[n]) for n in values), mode
        values = found


def clipped(rank: int, group: Any, **of: Any) -> tuple[list[float], list[float], Any]:
    """Two losses and gradient norms, clipped, of processes on a grid or of one rank, and what this
    rank holds then."""
    where = ALONE if group is ALONE else Grid.of(group, **of)
    model = gpt("gpt2", group=where, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, norms = [], []
    for step in range(2):
        model.set_dropout((B, T), seed=5, step=step)
        optimizer.zero_grad()
        loss = model.loss(*batch_of(model, step))
        loss.backward()
        norms.append(clip_grad_norm_(model, 0.1, group=group).item())
        losses.append(loss.item())
        optimizer.step()
    return losses, norms, held(model)


@pytest.mark.parametrize(
    ("mode", "shape"),
    [
        ("2d", (2, 2)),
        full("2.5d", (4, 1, 1)),
        full("2.5d", (2, 2, 2)),
        full("3d", (2, 2, 2)),
    ],
)
def test_processes_clip_the_norm_of_the_whole_gradient(world, mode, shape):
    losses, norms, _ = clipped(0, ALONE)
    assert min(norms) > 0.1
    results = world(math.prod(shape)).run(clipped_on, mode, shape)
    for found, found_norms, _ in results:
        assert found == pytest.approx(losses, rel=1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-5)
    whole_models([after for *_, after in results])  # copies are the same bits behind the steps


def clipped_on(rank: int, group: Any, mode: str, shape: Shape) -> Any:
    return clipped(rank, group, mode=mode, shape=shape)

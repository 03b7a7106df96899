"""Each region operator and its backward are adjoints: the sums over ranks of <y, dy> and of <x, dx>
are one number."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm import Communicator
from pyops.tensor_parallel.functional import regions

pytestmark = pytest.mark.on_device

# name: (operator, shape of x for t ranks, x is the same on all ranks, y is)
OPERATORS = {
    "copy": (regions.copy, lambda t: (3, 2), True, False),
    "reduce": (regions.reduce, lambda t: (3, 2), False, True),
    "scatter last": (regions.scatter, lambda t: (3, 2 * t), True, False),
    "scatter 0": (partial(regions.scatter, dim=0), lambda t: (3 * t, 2), True, False),
    "scatter 1 of 3": (partial(regions.scatter, dim=1), lambda t: (2, 2 * t, 3), True, False),
    "gather last": (regions.gather, lambda t: (3, 2), False, False),
    "gather last, duplicated": (
        partial(regions.gather, duplicated=True),
        lambda t: (3, 2),
        False,
        True,
    ),
    "gather 1 of 3": (partial(regions.gather, dim=1), lambda t: (2, 2, 3), False, False),
    "gather 0, duplicated": (
        partial(regions.gather, dim=0, duplicated=True),
        lambda t: (3, 2),
        False,
        True,
    ),
    "reduce_scatter last": (regions.reduce_scatter, lambda t: (3, 2 * t), False, False),
    "reduce_scatter 0": (
        partial(regions.reduce_scatter, dim=0),
        lambda t: (2 * t, 3),
        False,
        False,
    ),
    "scatter tokens": (regions.scatter_tokens, lambda t: (5, 2), True, False),
    "gather tokens": (
        partial(regions.gather_tokens, tokens=5),
        lambda t: (-(-5 // t), 2),
        False,
        False,
    ),
    "gather tokens, duplicated": (
        partial(regions.gather_tokens, tokens=5, duplicated=True),
        lambda t: (-(-5 // t), 2),
        False,
        True,
    ),
    "reduce_scatter tokens": (regions.reduce_scatter_tokens, lambda t: (5, 2), False, False),
}


def draw(shape: tuple[int, ...], seed: int, *, rank: int, same: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed if same else seed + 100 + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def products(
    rank: int, group: dist.ProcessGroup, second: bool
) -> dict[str, tuple[float, float, float]]:
    return {name: products_of(rank, group, name, second) for name in OPERATORS}


def products_of(
    rank: int, group: dist.ProcessGroup, name: str, second: bool
) -> tuple[float, float, float]:
    """(<y, dy>, <x, dx>) of this rank, a tensor that all hold counted on rank 0 only, and the size
    of dx.

    second: of the backward as an operator itself, dy -> dx, and of its own backward.
    """
    operator, shape, same_x, same_y = OPERATORS[name]
    x = draw(shape(dist.get_world_size(group)), 1, rank=rank, same=same_x).requires_grad_()
    y = operator(x, group=group)
    dy = draw(tuple(y.shape), 2, rank=rank, same=same_y).requires_grad_(second)
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=second)
    if second:
        x, same_x, y, same_y = dy, same_y, dx, same_x
        dy = draw(tuple(y.shape), 3, rank=rank, same=same_y)
        (dx,) = torch.autograd.grad(y, x, dy)

    def inner(a: Tensor, b: Tensor, same: bool) -> float:
        return 0.0 if same and rank > 0 else float((a * b).sum())

    return inner(y, dy, same_y), inner(x, dx, same_x), float(dx.abs().sum())


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("second", [False, True], ids=["operator", "its backward"])
def test_adjoint(world, size: int, second: bool):
    by_rank = world(size).run(products, second)
    for name in OPERATORS:
        found = [each[name] for each in by_rank]
        left, right = (sum(values) for values in zip(*(f[:2] for f in found), strict=True))
        assert abs(left - right) <= 1e-12 * max(1.0, abs(left)), name
        assert abs(left) > 1e-6, name
        # A rank whose tokens are all padding has no gradient; no other may be zero.
        assert all(f[2] > 0 for f in found[: 1 if "tokens" in name else size]), name


def test_one_rank_alone_returns_x_itself():
    for name, (operator, shape, _, _) in OPERATORS.items():
        x = torch.randn(shape(1))
        assert operator(x) is x or ("tokens" in name and torch.equal(operator(x), x))
    x = torch.randn(4, 2)
    assert regions.all_to_all(x) is x


def values(rank: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
    x = torch.arange(6.0).view(2, 3) + 10 * rank
    return {
        "reduce": regions.reduce(x, group=group),
        "gather": regions.gather(x, group=group),
        "scatter": regions.scatter(torch.arange(8.0).view(2, 4), group=group),
        "reduce_scatter": regions.reduce_scatter(torch.arange(4.0).view(1, 4) + rank, group=group),
        "tokens": regions.scatter_tokens(torch.arange(3.0).view(3, 1) + 1, group=group),
    }


def test_values(world):
    first, second = world(2).run(values)
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(first["reduce"], 2 * x + 10)
    assert torch.equal(second["gather"], torch.cat([x, x + 10], dim=1))
    assert torch.equal(second["scatter"], torch.tensor([[2.0, 3], [6, 7]]))
    assert torch.equal(second["reduce_scatter"], torch.tensor([[5.0, 7]]))
    assert torch.equal(first["tokens"], torch.tensor([[1.0], [2]]))
    assert torch.equal(second["tokens"], torch.tensor([[3.0], [0]]))


def flag(rank: int, group: dist.ProcessGroup) -> dict[str, float]:
    """d/dx of a loss that all ranks compute alike, and of one to which each gives its share: 1
    where the flag is right."""
    found = {}
    for name, duplicated in (("right", True), ("wrong", False)):
        x = torch.ones(2, 1, requires_grad=True)
        regions.gather_tokens(x, duplicated=duplicated, group=group).sum().backward()
        found[name] = float(x.grad.mean())
    x = torch.ones(2, 1, requires_grad=True)
    (regions.gather_tokens(x, group=group).sum() / dist.get_world_size(group)).backward()
    return {**found, "shares": float(x.grad.mean())}


def test_flag_for_duplicated_consumers(world):
    for found in world(3).run(flag):
        assert found == {"right": 1.0, "wrong": 3.0, "shares": pytest.approx(1.0)}


SENT = [[1, 0, 3], [2, 2, 0], [0, 1, 1]]  # rows from rank to rank


def exchange(rank: int, group: dist.ProcessGroup, told: bool) -> tuple[Tensor, float, float, int]:
    sizes = SENT[rank]
    x = (draw((sum(sizes), 2), 3, rank=rank, same=False)).requires_grad_()
    before = Communicator.of(group).bytes_sent
    y = regions.all_to_all(
        x, sizes=sizes, received=[row[rank] for row in SENT] if told else None, group=group
    )
    sent = Communicator.of(group).bytes_sent - before
    dy = draw(tuple(y.shape), 4, rank=rank, same=False)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert dx.abs().sum() > 0
    x, y = x.detach(), y.detach()
    return y, float((y * dy).sum()), float((x * dx).sum()), sent


@pytest.mark.parametrize("told", [False, True])
def test_all_to_all_with_uneven_sizes(world, told: bool):
    found = world(3).run(exchange, told)
    xs = [draw((sum(sizes), 2), 3, rank=rank, same=False) for rank, sizes in enumerate(SENT)]
    parts = [x.split(sizes) for x, sizes in zip(xs, SENT, strict=True)]
    for rank, (y, *_) in enumerate(found):
        assert torch.equal(y, torch.cat([part[rank] for part in parts]))
    assert sum(f[1] for f in found) == pytest.approx(sum(f[2] for f in found), rel=1e-12)
    for rank, (*_, sent) in enumerate(found):
        others = sum(SENT[rank]) - SENT[rank][rank]
        assert sent - 16 * others in (
            2 * 6 * 8,
            2 * 6 * 8 + 2 * 32,
        )  # the sizes, and a card to agree about them


def refused(rank: int, group: dist.ProcessGroup) -> list[str]:
    texts = []
    for call in (
        lambda: regions.scatter(torch.ones(3, 5), group=group),
        lambda: regions.gather_tokens(torch.ones(3, 5), tokens=7, group=group),
        lambda: regions.all_to_all(torch.ones(3, 1), group=group),
        lambda: regions.all_to_all(torch.ones(3, 1), sizes=[1, 1], group=group),
        lambda: regions.all_to_all(torch.ones(4, 1), received=[1, 2], group=group),
        lambda: regions.reduce(torch.ones(3 + rank), group=group),
        lambda: regions.gather(torch.ones(3 + rank, 2), dim=0, group=group),
    ):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        texts.append(str(caught.value))
    assert torch.equal(
        regions.reduce(torch.ones(2), group=group), torch.full((2,), 2.0)
    )  # the group is as good as before
    return texts


def test_refusals_on_every_rank(world):
    for texts in world(2).run(refused):
        expected = (
            "which 2 ranks do not divide",
            "of 7 tokens over 2 ranks is 4",
            "which 2 ranks do not divide",
            "sum up to the 3 rows",
            "expects [1, 2] rows",
            "same collectives in the same order",
            "same collectives in the same order",
        )
        for part, text in zip(expected, texts, strict=True):
            assert part in text, text

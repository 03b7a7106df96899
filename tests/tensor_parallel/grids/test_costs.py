"""The cost functions are what grids of threads receive, and give the table of the layouts."""

from __future__ import annotations

import math

import pytest
import torch

from pyops.tensor_parallel.grids import Grid, GridLinear, GridLinearConfig
from pyops.tensor_parallel.grids.costs import (
    AS_PUBLISHED,
    FEWEST,
    best_with_zero,
    cost_1d,
    cost_grid,
    cost_with_zero,
    layer_costs,
)
from tests.tensor_parallel.grids.virtual_grids import Shape, on_grid

pytestmark = pytest.mark.cpu_only

H = 16


GPT = [(H, 3 * H), (H, H), (H, 4 * H), (4 * H, H)]
GATED = [(H, 2 * H), (H, H), (H, 6 * H), (3 * H, H)]
"""Of groups of keys half as wide as the queries, and an MLP with a gate."""


def counted(
    mode: str, shape: Shape, tokens: int, forms=AS_PUBLISHED, keep: bool = False, products=GPT
):
    """{(elements forward, elements backward, collectives, weights, kept)} of all ranks."""

    def body(grid: Grid) -> tuple[int, ...]:
        layers, cuts = [], grid.cuts
        for (inner, outer), form in zip(products, forms, strict=True):
            config = GridLinearConfig(form=form, keep_gathered=keep, seed=None)
            layer = GridLinear(inner, outer, grid=grid, bias=False, config=config, cuts=cuts)
            torch.nn.init.ones_(layer.weight)
            layers.append(layer)
            cuts = layer.behind
        kept: list[torch.Tensor] = []

        def keep_tensor(t: torch.Tensor) -> torch.Tensor:
            kept.append(t)
            return t

        outputs = []
        with torch.autograd.graph.saved_tensors_hooks(keep_tensor, lambda t: t):
            for layer in layers:
                width = grid.columns(layer.in_features, layer.cuts).length
                rows = grid.rows(tokens, layer.cuts)[2]
                outputs.append(layer(torch.ones(rows, width, requires_grad=True)))
        forward, collectives = grid.traffic.bytes_received // 4, grid.traffic.collectives
        grid.traffic.clear()
        for y in outputs:
            y.sum().backward()
        weights = sum(layer.weight.numel() for layer in layers)
        activations = sum(t.numel() for t in kept) - weights
        return forward, grid.traffic.bytes_received // 4, collectives, weights, activations

    found = set(on_grid(mode, shape, body))
    assert len(found) == 1
    return next(iter(found))


@pytest.mark.parametrize(
    ("mode", "shape", "tokens"),
    [
        ("2d", (2, 2), 32),
        ("2d", (4, 4), 16),
        ("2.5d", (2, 2, 2), 32),
        ("3d", (2, 2, 2), 32),
        pytest.param("3d", (4, 4, 4), 32, marks=pytest.mark.full),
        pytest.param("2.5d", (4, 4, 4), 64, marks=pytest.mark.full),
        pytest.param("2d", (8, 8), 32, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("forms", [AS_PUBLISHED, FEWEST])
def test_costs_are_what_is_received_and_kept(mode, shape, tokens, forms):
    cost = cost_grid(tokens, H, ranks=math.prod(shape), mode=mode, shape=shape, forms=forms)
    assert counted(mode, shape, tokens, forms) == (
        cost.forward,
        cost.backward,
        cost.collectives,
        cost.weights,
        cost.activations,
    )


@pytest.mark.parametrize(("mode", "shape"), [("2d", (2, 2)), ("2.5d", (2, 2, 2)), ("3d", (2,) * 3)])
def test_costs_of_other_widths(mode, shape):
    """Of grouped keys and a gate, on a grid and of what it is compared with."""
    for forms in (AS_PUBLISHED, FEWEST):
        cost = cost_grid(32, H, ranks=math.prod(shape), mode=mode, forms=forms, products=GATED)
        expected = (cost.forward, cost.backward, cost.collectives, cost.weights, cost.activations)
        assert counted(mode, shape, 32, forms, products=GATED) == expected
    zero = cost_with_zero(32, H, tp=2, zero=2, products=GATED)
    assert counted("2d", (2, 2), 32, FEWEST, products=GATED)[:2] == (zero.forward, zero.backward)


def test_what_is_kept_is_not_received_again():
    for mode, shape in (("2d", (2, 2)), ("3d", (2, 2, 2))):
        cost = cost_grid(32, H, ranks=math.prod(shape), mode=mode, keep_gathered=True)
        assert cost.forward == cost.backward
        assert counted(mode, shape, 32, keep=True)[:2] == (cost.forward, cost.backward)


@pytest.mark.parametrize(("tp", "zero"), [(4, 1), (2, 2), (4, 2), (1, 4)])
def test_tensor_parallelism_with_zero_is_a_grid_whose_products_take_turns(tp, zero):
    """Columns first (A B gathers x), rows behind (A B^T sums y), weights gathered over the rows of
    the grid: what is received is the same."""
    cost = cost_with_zero(32, H, tp=tp, zero=zero)
    forward, backward, *_, weights, _ = counted("2d", (zero, tp), 32, FEWEST)
    assert (forward, backward, weights) == (cost.forward, cost.backward, cost.weights)
    assert zero > 1 or cost == cost_1d(32, H, ranks=tp)


# bs / h, ranks: 1d, the best t x z, 2d, 2.5d with q = 2, 3d; units of h^2 in forward.
TABLE = [
    (1, 4, 3.00, (4, 1), 3.00, 4.75, None, None),
    (1, 8, 3.50, (4, 2), 3.00, None, 3.88, 3.50),
    (1, 16, 3.75, (8, 2), 2.50, 3.56, 3.44, None),
    (1, 64, 3.94, (16, 4), 1.50, 2.08, None, 1.31),
    (2, 8, 7.00, (4, 2), 4.50, None, 4.75, 5.50),
    (2, 64, 7.88, (8, 8), 2.19, 2.84, None, 2.06),
    (4, 4, 12.0, (2, 2), 7.00, 10.0, None, None),
    (4, 8, 14.0, (2, 4), 6.50, None, 6.50, 9.50),
    (4, 64, 15.75, (8, 8), 3.06, 4.38, None, 3.56),
]


@pytest.mark.parametrize("row", TABLE)
def test_the_table_of_the_layouts(row):
    ratio, ranks, one, split, with_zero, two, half, three = row
    tokens = ratio * H
    assert cost_1d(tokens, H, ranks=ranks).forward / H**2 == pytest.approx(one, abs=0.006)
    _, _, best = best_with_zero(tokens, H, ranks=ranks)
    assert best.forward / H**2 == pytest.approx(with_zero, abs=0.006)
    named = cost_with_zero(tokens, H, tp=split[0], zero=split[1])
    assert named.forward == pytest.approx(best.forward)
    for mode, expected in (("2d", two), ("2.5d", half), ("3d", three)):
        if expected is None:
            continue
        shape = (ranks // 4, 2, 2) if mode == "2.5d" else None
        cost = cost_grid(tokens, H, ranks=ranks, mode=mode, shape=shape)
        assert cost.forward / H**2 == pytest.approx(expected, abs=0.006)
        if ranks <= 8:  # counted here; the larger ones are the same functions
            sizes = shape or {"2d": (2, 2), "3d": (2, 2, 2)}[mode]
            assert counted(mode, sizes, tokens)[0] == cost.forward


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in TABLE if row[1] > 8])
def test_the_table_from_counted_bytes_of_many_ranks(row):
    ratio, ranks, _, _, _, two, half, three = row
    side = math.isqrt(ranks)
    for mode, expected, sizes in (
        ("2d", two, (side, side)),
        ("2.5d", half, (ranks // 4, 2, 2)),
        ("3d", three, (round(ranks ** (1 / 3)),) * 3),
    ):
        if expected is not None:
            forward = counted(mode, sizes, ratio * H)[0]
            assert forward / H**2 == pytest.approx(expected, abs=0.006)


def test_two_dimensions_never_send_less_than_tensor_parallelism_with_zero():
    """Not on any square, at any number of tokens; with output and down as A B^T as much."""
    for side in (2, 3, 4, 8, 16):
        for tokens in (64, 512, 4096, 32768):
            zero = cost_with_zero(tokens, 512, tp=side, zero=side)
            published = cost_grid(tokens, 512, ranks=side**2, mode="2d")
            fewest = cost_grid(tokens, 512, ranks=side**2, mode="2d", forms=FEWEST)
            assert published.forward > zero.forward
            assert published.step > zero.step
            assert fewest.forward == pytest.approx(zero.forward)
            assert fewest.step == pytest.approx(zero.step)


def test_all_layouts_of_a_number_of_ranks():
    names = [name for name, _ in layer_costs(64, H, ranks=64)]
    assert names == [
        "1d",
        "1d, sequence parallel",
        "1d x ZeRO 3 (8 x 8)",
        "2d (8 x 8)",
        "2d (8 x 8), A B^T",
        "2.5d (4 x 4 x 4)",
        "2.5d (4 x 4 x 4), A B^T",
        "3d (4 x 4 x 4)",
    ]
    assert [name for name, _ in layer_costs(64, H, ranks=6)][2:] == ["1d x ZeRO 3 (2 x 3)"]
    cost = dict(layer_costs(64, H, ranks=64))["3d (4 x 4 x 4)"]
    assert cost.step == cost.forward + cost.backward
    assert cost.seconds(bandwidth=1e9, latency=1e-5) == pytest.approx(1.824e-6 + 12e-5)

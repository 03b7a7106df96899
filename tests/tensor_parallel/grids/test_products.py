"""The three products of blocks are those of whole matrices, with their gradients, on every grid,
and receive the bytes that the formulas give."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from pyops.tensor_parallel.grids.grid import Cuts, Grid
from pyops.tensor_parallel.grids.products import FORMS, product
from tests.grids import cut
from tests.tensor_parallel.grids.virtual_grids import (
    LARGE,
    SMALL,
    STEPPED,
    Shape,
    assert_equal,
    block,
    numbers,
    on_grid,
)

pytestmark = pytest.mark.cpu_only

SIZES = (13, 10, 7)  # M, K, N: no grid divides them
EVEN = (16, 32, 48)


def whole_product(
    form: str, sizes: tuple[int, int, int], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """A, B, the product's gradient, and the product, with the gradients of A and B."""
    M, K, N = sizes
    shape = {"ab": (K, N), "abt": (N, K), "atb": (M, N)}[form]
    a, b = (numbers(*each, seed=n).to(dtype) for n, each in ((1, (M, K)), (2, shape)))
    a, b = a.requires_grad_(), b.requires_grad_()
    y = {"ab": lambda: a @ b, "abt": lambda: a @ b.t(), "atb": lambda: a.t() @ b}[form]()
    dy = numbers(*y.shape, seed=3).to(dtype)
    da, db = torch.autograd.grad(y, (a, b), dy)
    return a.detach(), b.detach(), dy, y.detach(), da, db


def weight_block(grid: Grid, whole: Tensor, cuts: Cuts) -> Tensor:
    """This rank's block of a weight [in, out] of a layer whose input is cut so."""
    place = grid.weight_place(whole.shape[1], whole.shape[0], cuts)
    return place.take(whole.t()).t().contiguous()


def check(
    mode: str,
    shape: Shape,
    form: str,
    sizes: tuple[int, int, int],
    dtype: torch.dtype = torch.float64,
    **options: bool,
) -> None:
    """Relative to the largest element of the whole 1e-12 in fp64, 1e-6 in fp32."""
    a, b, dy, y, da, db = whole_product(form, sizes, dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6

    def body(grid: Grid) -> None:
        for cuts in {grid.cuts, grid.behind(grid.cuts)}:
            behind = grid.behind(cuts)
            left = block(grid, a, cuts)
            if form == "atb":
                right = block(grid, b, behind)
            else:
                right = weight_block(grid, b, cuts if form == "ab" else behind).requires_grad_()
            found = product(left, right, form=form, grid=grid, cuts=cuts, **options)
            if form == "atb":
                expected, gradient = (weight_block(grid, each, cuts) for each in (y, dy))
                for_b = grid.take(db, behind)
            else:
                expected, gradient = (grid.take(each, behind) for each in (y, dy))
                for_b = weight_block(grid, db, cuts if form == "ab" else behind)
            found.backward(gradient)
            what = f"{mode} {shape} {form}, rank {grid.rank}, {cuts}"
            assert_equal(found.detach(), expected, what, tolerance, whole=y)
            assert_equal(
                left.grad, grid.take(da, cuts), f"{what}: gradient of A", tolerance, whole=da
            )
            assert_equal(right.grad, for_b, f"{what}: gradient of B", tolerance, whole=db)

    on_grid(mode, shape, body)


# All forms on small grids; on each large one, whose ranks are up to 64 threads, one form.
PRODUCTS = [(*grid, form) for grid in SMALL + LARGE for form in FORMS]
ONE_EACH = [(*grid, form) for grid, form in zip(LARGE, itertools.cycle(FORMS), strict=False)]


@pytest.mark.parametrize(
    ("mode", "shape", "form"),
    cut(PRODUCTS, keep=ONE_EACH + [case for case in PRODUCTS if case[:2] in SMALL]),
)
def test_products_are_those_of_whole_matrices(mode, shape, form):
    check(mode, shape, form, SIZES)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("mode", "shape"),
    cut(SMALL + LARGE, keep=[("2d", (2, 2)), ("2.5d", (2, 2, 2)), ("3d", (3, 3, 3))]),
)
def test_products_in_single_precision(mode, shape, form):
    check(mode, shape, form, SIZES, torch.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("mode", "shape"), [("2d", (2, 2)), ("2.5d", (2, 2, 2)), ("3d", (2, 2, 2))]
)
def test_what_was_gathered_may_be_kept(mode, shape, form):
    check(mode, shape, form, SIZES, keep_gathered=True)


STEPS = [(*grid, form) for grid in STEPPED for form in FORMS]
KEPT_STEPS = [
    *((*grid, form) for grid in (("2d", (2, 2)), ("2.5d", (2, 2, 2))) for form in FORMS),
    *((*grid, form) for grid, form in zip(STEPPED, itertools.cycle(FORMS), strict=False)),
]


@pytest.mark.parametrize(("mode", "shape", "form"), cut(STEPS, keep=KEPT_STEPS))
def test_products_in_steps_are_the_same(mode, shape, form):
    check(mode, shape, form, SIZES, stepwise=True)


def traffic(
    mode: str, shape: Shape, form: str, *, stepwise: bool = False, keep: bool = False
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """(elements, messages, collectives) of each rank: forward, and backward."""
    a, b, dy, *_ = whole_product(form, EVEN)

    def body(grid: Grid) -> list[tuple[int, int, int]]:
        left, cuts = block(grid, a), grid.cuts
        right = weight_block(grid, b, cuts).requires_grad_()
        found, y = [], None
        for back in (False, True):
            grid.traffic.clear()
            if back:
                y.backward(grid.take(dy, grid.behind(cuts)))
            else:
                y = product(
                    left, right, form=form, grid=grid, stepwise=stepwise, keep_gathered=keep
                )
            t = grid.traffic
            found.append((t.bytes_received // 8, t.messages, t.collectives))
        return found

    both = on_grid(mode, shape, body)
    return [each[0] for each in both], [each[1] for each in both]


@pytest.mark.parametrize(("shape", "d"), [((2, 2), 1), ((4, 4), 1), ((2, 2, 2), 2), ((4, 2, 2), 4)])
def test_bytes_of_a_product_in_two_dimensions(shape, d):
    """(q - 1) / q^2 (M K / d + K N) forward, twice that backward, and the sum over the layers."""
    (M, K, N), q = EVEN, shape[-1]
    mode = "2d" if len(shape) == 2 else "2.5d"
    once = (q - 1) * (M * K // d + K * N) // q**2
    layers = 2 * (d - 1) * K * N // (d * q**2)
    forward, backward = traffic(mode, shape, "ab")
    assert {elements for elements, *_ in forward} == {once}
    assert {elements for elements, *_ in backward} == {2 * once + layers}
    kept, kept_backward = traffic(mode, shape, "ab", keep=True)
    assert {elements for elements, *_ in kept} == {once}
    assert {elements for elements, *_ in kept_backward} == {once + layers}
    # Two gathers; in steps 2 q broadcasts, of as many bytes.
    assert {collectives for *_, collectives in forward} == {2}
    stepped, _ = traffic(mode, shape, "ab", stepwise=True)
    assert {elements for elements, *_ in stepped} == {once}
    assert {collectives for *_, collectives in stepped} == {2 * q}


@pytest.mark.parametrize("side", [2, 4])
def test_bytes_of_a_product_in_three_dimensions(side):
    """(l - 1) / l^3 (M K + K N + M N) forward; backward that, and the two operands again."""
    M, K, N = EVEN
    forward, backward = traffic("3d", (side,) * 3, "ab")
    each = (side - 1) * (M * K + K * N + M * N) // side**3
    again = (side - 1) * (M * K + K * N) // side**3
    assert {elements for elements, *_ in forward} == {each}
    assert {elements for elements, *_ in backward} == {each + again}
    assert {collectives for *_, collectives in forward} == {3}
    assert {messages for _, messages, _ in forward} == {3 * (side - 1)}


@pytest.mark.parametrize(
    ("mode", "shape"), [("2d", (2, 2)), ("2.5d", (2, 2, 2)), ("3d", (2, 2, 2))]
)
def test_a_rank_keeps_its_part_of_both_operands_for_backward(mode, shape):
    a, b, *_ = whole_product("ab", EVEN)

    def body(grid: Grid) -> tuple[int, int]:
        left, right = block(grid, a), weight_block(grid, b, grid.cuts).requires_grad_()
        found = []
        for keep in (False, True):
            kept: list[Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, kept=kept: kept.append(t) or t, lambda t: t
            ):
                product(left, right, form="ab", grid=grid, keep_gathered=keep)
            found.append(sum(t.numel() for t in kept))
        return found[0], found[1]

    copies = shape[0] if mode == "2.5d" else 1
    ranks = math.prod(shape)
    for parts, gathered in on_grid(mode, shape, body):
        assert parts == a.numel() // ranks + copies * b.numel() // ranks
        assert gathered > 2 * parts


def test_sums_of_sixteen_bits_are_rounded_once():
    """One rank has 1 + 3 x 2^-9, which bf16 rounds to 1 + 2^-7, and its neighbor -1."""
    a = torch.zeros(8, 16, dtype=torch.bfloat16)
    a[:, 0], a[:, 1:4], a[:, 8] = 1.0, 2.0**-9, -1.0
    b = torch.ones(8, 16, dtype=torch.bfloat16)  # [out, in]
    for stepwise in (False, True):
        for found in on_grid("2d", (2, 2), lambda grid, s=stepwise: narrow_sum(grid, a, b, s)):
            assert found.float().unique().tolist() == [3 * 2.0**-9]


def narrow_sum(grid: Grid, a: Tensor, b: Tensor, stepwise: bool) -> Tensor:
    right = weight_block(grid, b, grid.behind(grid.cuts))
    return product(grid.take(a), right, form="abt", grid=grid, stepwise=stepwise)


def test_products_refuse_what_does_not_fit():
    grid = Grid(None, mode="2d")
    a = torch.ones(2, 3)
    with pytest.raises(ValueError, match="form is 'ba'; choose one of ab, abt, atb"):
        product(a, a.t(), form="ba", grid=grid)
    with pytest.raises(ValueError, match=r"two matrices of one dtype; got torch.float32 \[2, 3\]"):
        product(a, a.t().double(), form="ab", grid=grid)
    with pytest.raises(ValueError, match="2d grid has no tensors with rows over weight and input"):
        product(a, a.t(), form="ab", grid=grid, cuts=Cuts(("weight", "input"), "output"))
    with pytest.raises(ValueError, match=r"stepwise products are of 2d and 2\.5d grids of q x q"):
        product(a, a.t(), form="ab", grid=Grid(None, mode="3d"), stepwise=True)

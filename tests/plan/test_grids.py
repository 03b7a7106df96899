"""The planner says what a grid of ranks would receive, by the cost functions of the grids."""

from __future__ import annotations

import math

import pytest

from pyops.plan import PYOPS, Case, Layout, Options, best, load_cluster
from pyops.plan.layouts.grids import grid_price, grid_reasons, layer_products
from pyops.tensor_parallel.grids.costs import best_with_zero, cost_grid
from tests.plan.shapes import LLAMA_8B, gpt

pytestmark = pytest.mark.cpu_only

H100 = load_cluster("h100")
H = 4096


def case(ranks: int, tokens: int, **options) -> tuple[Case, Layout]:
    """A GPT and copies of it that see so many tokens together."""
    shape = gpt(4, H, 64, vocab=8192, sequence=tokens // ranks)
    return Case(shape, H100.with_devices(ranks), PYOPS, **options), Layout(dp=ranks, zero=3)


@pytest.mark.parametrize("ranks", [4, 16, 64])
@pytest.mark.parametrize("ratio", [1, 2, 4, 16])
def test_two_dimensions_are_never_said_to_receive_less(ranks, ratio):
    price = grid_price(*case(ranks, ratio * H), "2d")
    assert price.published_ratio > price.ratio >= 1 - 1e-12
    assert math.prod(price.split) == ranks


def test_what_is_said_is_what_the_cost_functions_say():
    for mode, ranks in (("2d", 4), ("2.5d", 8), ("3d", 8), ("3d", 64)):
        for ratio in (1, 2, 4):
            price = grid_price(*case(ranks, ratio * H), mode)
            assert price.published == cost_grid(ratio * H, H, ranks=ranks, mode=mode)
            _, _, zero = best_with_zero(ratio * H, H, ranks=ranks)
            assert price.beside.step <= zero.step


def test_a_pipeline_is_compared_with_as_many_rows_as_it_keeps():
    found, _ = case(64, 64 * 128)
    one = grid_price(found, Layout(dp=64, zero=3, num_microbatches=4), "3d")
    cut = Layout(pp=4, dp=16, schedule="1f1b", num_microbatches=16)
    assert grid_price(found, cut, "3d") == one
    assert one.rounds == 4


def test_products_of_a_block_are_its_matrices():
    for shape in (LLAMA_8B, gpt(4, 512, 8, vocab=8192)):
        matrices = sum(inner * outer for inner, outer in layer_products(shape))
        assert matrices == shape.block_matrices


def test_a_plan_says_why_not_a_grid():
    found = best(LLAMA_8B, H100.with_devices(16), Options(batch=32))
    why = dict(found.reasons)
    assert "4 x 4 receives " in why["2d grid"]
    assert "x of tp " in why["2d grid"]
    assert "; as published " in why["2d grid"]
    assert "16 ranks are no cube" in why["3d grid"]
    assert "try it" not in why["2d grid"]


def test_three_dimensions_that_receive_less_are_named():
    why = dict(grid_reasons(*case(64, H)))
    assert "4 x 4 x 4 receives 0." in why["3d grid"]
    assert 'try it by parallel.tp=64, grid="3d"' in why["3d grid"]
    assert not list(grid_reasons(*case(1, H)))


def test_heads_that_the_columns_do_not_divide_are_named():
    found = Case(LLAMA_8B, H100.with_devices(256), PYOPS)
    why = dict(grid_reasons(found, Layout(dp=256, zero=3)))["2d grid"]
    assert why.startswith("num_kv_heads is 8, which the 16 columns of a 2d grid of 256 ranks do")

"""Why not a grid of ranks in two, two and a half or three dimensions: what a rank of it receives,
beside tensor parallelism with ZeRO 3 on the same ranks, by `pyops.tensor_parallel.grids.costs`.

A grid holds 1 / p of weights and activations, as these do. It has no pipeline: of a layout with one
the ranks of all stages are taken together, and as many rows as it keeps at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pyops.plan.clusters import GIB
from pyops.plan.costs.computing import Case
from pyops.plan.costs.rank_memory import ELEMENT_BYTES
from pyops.plan.layout import Layout
from pyops.plan.shapes import ModelShape
from pyops.tensor_parallel.grids import MODES, grid_shape
from pyops.tensor_parallel.grids.costs import (
    AS_PUBLISHED,
    FEWEST,
    LayerCost,
    Products,
    cost_grid,
    cost_with_zero,
)

__all__ = ["GridPrice", "grid_price", "grid_reasons", "layer_products"]

ALIKE = 0.005  # of what is received


@dataclass(frozen=True)
class GridPrice:
    """What a rank of a grid receives for a layer, forward and backward, of a micro-batch."""

    mode: str
    """ "2d", "2.5d" or "3d"."""
    sizes: tuple[int, ...]
    """Of the grid's axes."""
    published: LayerCost
    """With the products of the papers."""
    used: LayerCost
    """With those that a GPT of pyops has: A B^T second, in 2d and 2.5d."""
    split: tuple[int, int]
    """Ranks of tp, and replicas that share weights (ZeRO 3), which receive the fewest elements."""
    beside: LayerCost
    """What these cost."""
    rounds: int
    """Micro-batches of a step."""

    @property
    def ratio(self) -> float:
        """What the grid receives over what tensor parallelism with ZeRO 3 does."""
        return self.used.step / self.beside.step if self.beside.step else 1.0

    @property
    def published_ratio(self) -> float:
        """The same with the products of the papers."""
        return self.published.step / self.beside.step if self.beside.step else 1.0


def layer_products(shape: ModelShape) -> Products:
    """(in, out) of the four products of a block.

    Args:
        shape: Of the model.
    """
    inside = (2 if shape.gated else 1) * shape.inner
    return [
        (shape.dim, shape.query_width + 2 * shape.kv_width),
        (shape.query_width, shape.dim),
        (shape.dim, inside),
        (shape.inner, shape.dim),
    ]


def _tokens(case: Case, layout: Layout) -> tuple[int, int]:
    """(tokens of all ranks at a time, how often in a step)."""
    rows = min(layout.batch, layout.dp * layout.micro_batch * layout.pp)
    return rows * case.shape.sequence_length, max(1, layout.batch // rows)


def grid_price(case: Case, layout: Layout, mode: str) -> GridPrice:
    """A grid of all ranks of a layout.

    Args:
        case: The model, the cluster, the program.
        layout: That it is compared with.
        mode: "2d", "2.5d" or "3d".

    Raises:
        ValueError: These ranks make no such grid, or do not share the heads.
    """
    shape, ranks = case.shape, layout.num_ranks
    sizes = grid_shape(ranks, mode)
    for name, heads in (("num_heads", shape.num_heads), ("num_kv_heads", shape.kv_heads)):
        if heads % sizes[-1]:
            raise ValueError(
                f"{name} is {heads}, which the {sizes[-1]} columns of a {mode} grid of {ranks} "
                "ranks do not divide"
            )
    tokens, rounds = _tokens(case, layout)
    products = layer_products(shape)
    published, used = (
        cost_grid(tokens, shape.dim, ranks=ranks, mode=mode, forms=forms, products=products)
        for forms in (AS_PUBLISHED, FEWEST)
    )
    splits = [
        (t, ranks // t)
        for t in range(1, ranks + 1)
        if ranks % t == 0 and shape.num_heads % t == shape.inner % t == 0
    ]
    priced = {
        (t, z): cost_with_zero(tokens, shape.dim, tp=t, zero=z, products=products)
        for t, z in splits
    }
    split = min(priced, key=lambda each: priced[each].step)
    return GridPrice(mode, sizes, published, used, split, priced[split], rounds)


def grid_reasons(case: Case, layout: Layout) -> Iterator[tuple[str, str]]:
    """(name of a grid, why it is not proposed), of each.

    Args:
        case: The model, the cluster, the program.
        layout: What was found.
    """
    if layout.num_ranks == 1:
        return
    for mode in MODES:
        try:
            price = grid_price(case, layout, mode)
        except ValueError as error:
            yield f"{mode} grid", str(error)
            continue
        yield f"{mode} grid", _reason(case, price)


def _reason(case: Case, price: GridPrice) -> str:
    (t, z), sizes = price.split, " x ".join(map(str, price.sizes))
    each = ELEMENT_BYTES[case.precision] * case.shape.num_layers * price.rounds / GIB
    text = (
        f"{sizes} receives {price.ratio:.2f}x of tp {t} x ZeRO 3 over {z} "
        f"({each * price.used.step:.2f} and {each * price.beside.step:.2f} GiB a rank and step)"
    )
    if abs(price.published_ratio - price.ratio) > ALIKE:
        text += f"; as published {price.published_ratio:.2f}x"
    if price.ratio < 1.0 - ALIKE:
        tp = math.prod(price.sizes)
        return f'{text}: its time is not predicted; try it by parallel.tp={tp}, grid="{price.mode}"'
    return text

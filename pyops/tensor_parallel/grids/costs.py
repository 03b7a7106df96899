"""What a layer of a transformer costs a rank in each layout: elements received, and memory.

    tokens M, width h; four products: qkv [h, 3 h], output [h, h], up [h, 4 h], down [4 h, h]

                        forward, elements received by a rank
    1d                  4 M h (p - 1) / p
    1d x ZeRO 3         4 M h (t - 1) / (t z) + 12 h^2 (z - 1) / (t z)              t z = p
    2d, 2.5d            (q - 1) / q^2 (7 M h / d + 12 h^2)
  output, down: A B^T   (q - 1) / q^2 (4 M h / d + 12 h^2)
    3d                  (l - 1) / l^3 (16 M h + 12 h^2)

Backward is as long where what was gathered is kept, and gathers the operands again where it is not;
in 2.5d the gradients of the d copies of a weight are summed, 2 (d - 1) / d of them. Norms, the
embedding and the loss are not counted: a few numbers for a token, and once a model. `products` has
other widths than these, for grouped keys or a gate. The tests count these bytes on grids of up to
64 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pyops.tensor_parallel.grids.grid import grid_shape

__all__ = [
    "AS_PUBLISHED",
    "FEWEST",
    "LayerCost",
    "Products",
    "best_with_zero",
    "cost_1d",
    "cost_grid",
    "cost_with_zero",
    "layer_costs",
]

AS_PUBLISHED = ("ab", "ab", "ab", "ab")
"""The forms of the four products in the papers."""
FEWEST = ("ab", "abt", "ab", "abt")
"""The forms that send the fewest elements in two dimensions: a sum of narrow results instead of a
gather of wide operands. It is tensor parallelism over the columns and ZeRO 3 over the rows."""
Products = Sequence[tuple[int, int]]
"""(in, out) of the four products of a layer: qkv, output, up, down."""


def _gpt(width: int) -> Products:
    """Of a GPT's layer."""
    return [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]


@dataclass(frozen=True)
class LayerCost:
    """What a rank receives, and holds, for one layer of a transformer; in elements."""

    forward: float
    """Received in forward."""
    backward: float
    """Received in backward, the sum of the gradients of copies included."""
    collectives: int
    """Gathers, scatters and sums of the forward, one after the other in the worst case."""
    weights: float
    """Of the four matrices, as they are held."""
    activations: float
    """Kept for backward: the inputs of the four products."""
    gathered: float
    """The largest product's operands while it is computed, beside what is held."""

    @property
    def step(self) -> float:
        """Received in forward and backward."""
        return self.forward + self.backward

    def seconds(self, *, bandwidth: float, latency: float, element_bytes: int = 2) -> float:
        """Of the forward's messages, where no computation hides them.

        Args:
            bandwidth: Bytes a second that a rank receives.
            latency: Seconds of a collective of no bytes.
            element_bytes: Of an element.
        """
        return self.forward * element_bytes / bandwidth + self.collectives * latency


def cost_1d(
    tokens: int,
    width: int,
    *,
    ranks: int,
    sequence_parallel: bool = True,
    products: Products | None = None,
) -> LayerCost:
    """Of tensor parallelism in one dimension (Shoeybi et al., 2019; Korthikanti et al., 2022).

    Args:
        tokens: M.
        width: h.
        ranks: p.
        sequence_parallel: Whether tokens are cut between the layers; then what is gathered of them
            is gathered again in backward.
        products: Of the layer; None: a GPT's.
    """
    (x, _), (heads, y), (z, _), (inside, out) = products or _gpt(width)
    part = (ranks - 1) / ranks
    once, again = (x + y + z + out) * part, (x + z) * part
    cut = ranks if sequence_parallel else 1
    return LayerCost(
        forward=tokens * once,
        backward=tokens * (once + (again if sequence_parallel else 0.0)),
        collectives=(4 if sequence_parallel else 2) if ranks > 1 else 0,
        weights=_weights(products or _gpt(width)) / ranks,
        activations=tokens * ((x + z) / cut + (heads + inside) / ranks),
        gathered=float(tokens * max(x, z)) if sequence_parallel and ranks > 1 else 0.0,
    )


def _weights(products: Products) -> int:
    return sum(inner * outer for inner, outer in products)


def cost_with_zero(
    tokens: int, width: int, *, tp: int, zero: int, products: Products | None = None
) -> LayerCost:
    """Of `tp` ranks with sequence parallelism in each of `zero` replicas, which share out the
    weights (ZeRO stage 3, Rajbhandari et al., 2020) and the tokens.

    Args:
        tokens: M, of all replicas.
        width: h.
        tp: t.
        zero: z.
        products: Of the layer; None: a GPT's.
    """
    products = products or _gpt(width)
    one = cost_1d(tokens, width, ranks=tp, products=products)
    weights = one.weights * (zero - 1) / zero
    largest = max(inner * outer for inner, outer in products)
    return LayerCost(
        forward=one.forward / zero + weights,
        backward=one.backward / zero + 2 * weights,
        collectives=one.collectives + (4 if zero > 1 else 0),
        weights=one.weights / zero,
        activations=one.activations / zero,
        gathered=one.gathered / zero + (largest / tp if zero > 1 else 0.0),
    )


def best_with_zero(tokens: int, width: int, *, ranks: int) -> tuple[int, int, LayerCost]:
    """(t, z, cost) of the t x z = ranks that receive the fewest elements in forward.

    Args:
        tokens: M.
        width: h.
        ranks: p.
    """
    splits = [(t, ranks // t) for t in range(ranks, 0, -1) if ranks % t == 0]
    priced = [(t, z, cost_with_zero(tokens, width, tp=t, zero=z)) for t, z in splits]
    return min(priced, key=lambda each: each[2].forward)


def cost_grid(
    tokens: int,
    width: int,
    *,
    ranks: int,
    mode: str,
    shape: Sequence[int] | None = None,
    forms: Sequence[str] = AS_PUBLISHED,
    keep_gathered: bool = False,
    products: Products | None = None,
) -> LayerCost:
    """Of a grid in two, two and a half or three dimensions.

    Args:
        tokens: M.
        width: h.
        ranks: p.
        mode: "2d", "2.5d" or "3d".
        shape: See `grid_shape`.
        forms: Of the four products; see `pyops.tensor_parallel.grids.product`.
        keep_gathered: Whether what is gathered is kept for backward.
        products: Of the layer; None: a GPT's.

    Raises:
        ValueError: There is no such grid.
    """
    sizes = grid_shape(ranks, mode, shape)
    products = products or _gpt(width)
    priced = [
        _product(tokens, inner, outer, sizes if mode != "2d" else (1, *sizes), mode, form)
        for (inner, outer), form in zip(products, forms, strict=True)
    ]
    copies = sizes[0] if mode == "2.5d" else 1
    weights = _weights(products) * copies / ranks
    forward = sum(p.forward for p in priced)
    again = 0.0 if keep_gathered else sum(p.again for p in priced)
    inputs = tokens * sum(inner for inner, _ in products) / ranks
    return LayerCost(
        forward=forward,
        backward=forward + again + 2 * (copies - 1) / copies * weights,
        collectives=sum(p.collectives for p in priced),
        weights=weights,
        activations=inputs + (sum(p.gathered for p in priced) if keep_gathered else 0.0),
        gathered=max(p.gathered for p in priced),
    )


@dataclass(frozen=True)
class _Product:
    forward: float  # elements received
    again: float  # those of them that backward gathers again
    collectives: int
    gathered: float  # elements that the gathered operands take


def _product(
    tokens: int, inner: int, outer: int, sizes: Sequence[int], mode: str, form: str
) -> _Product:
    """Of tokens x inner by inner x outer."""
    if mode == "3d":
        side = sizes[0]
        ranks = side**3
        x, w, y = tokens * inner / ranks, inner * outer / ranks, tokens * outer / ranks
        more = side - 1
        return _Product(more * (x + w + y), more * (x + w), 3 * (side > 1), side * (x + w))
    depth, rows, columns = sizes
    weight = inner * outer / (rows * columns)
    moved = tokens * (inner if form == "ab" else outer) / (depth * rows * columns)
    forward = (columns - 1) * moved + (rows - 1) * weight
    again = forward if form == "ab" else (rows - 1) * weight
    held = rows * weight + (columns * moved if form == "ab" else 0.0)
    return _Product(forward, again, (rows > 1) + (columns > 1), held)


def layer_costs(
    tokens: int, width: int, *, ranks: int, depth: int = 0
) -> Iterator[tuple[str, LayerCost]]:
    """(name, cost) of every layout that so many ranks have, the grids as published and with the
    fewest elements.

    Args:
        tokens: M.
        width: h.
        ranks: p.
        depth: Of the 2.5d grid; 0: its usual one.
    """
    yield "1d", cost_1d(tokens, width, ranks=ranks, sequence_parallel=False)
    yield "1d, sequence parallel", cost_1d(tokens, width, ranks=ranks)
    t, z, cost = best_with_zero(tokens, width, ranks=ranks)
    yield f"1d x ZeRO 3 ({t} x {z})", cost
    for mode in ("2d", "2.5d", "3d"):
        q = round((ranks / depth) ** 0.5) if depth else 0
        shape = (depth, q, q) if mode == "2.5d" and depth else None
        try:
            sizes = grid_shape(ranks, mode, shape)
        except ValueError:
            continue
        name = f"{mode} ({' x '.join(map(str, sizes))})"
        yield name, cost_grid(tokens, width, ranks=ranks, mode=mode, shape=sizes)
        if mode != "3d":
            yield (
                f"{name}, A B^T",
                cost_grid(tokens, width, ranks=ranks, mode=mode, shape=sizes, forms=FEWEST),
            )

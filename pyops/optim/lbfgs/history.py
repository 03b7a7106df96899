"""The history of L-BFGS as one basis, and its direction as a combination of it.

    basis    s_1 ... s_m   y_1 ... y_m   g          steps, differences of gradients, the gradient
    M        all their inner products, float64      an iteration changes three vectors: 6 m of them
    delta    the two loops on M alone               d = sum_j delta_j b_j, one pass over the basis

The ordinary recursion waits for 2 m inner products one after the other; here they come in one
message where the vectors lie on several processes (Chen, Wang, Zhou, NIPS 2014, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["History", "PairTable", "combination", "inner_products", "products_of"]

BLOCK = 1 << 14  # numbers of a vector whose products are added in their own dtype
BLOCK_ON_DEVICE = 1 << 20
CURVATURE = 1e-10  # a pair is kept where s.y is more than so much of |s| |y|


def inner_products(rows: Tensor, new: Sequence[int]) -> Tensor:
    """The inner products of some rows with all, float64 [len(new), n]: summed block by block, each
    in the rows' own dtype.

    Args:
        rows: [n, numel].
        new: Numbers of rows.
    """
    total = torch.zeros(len(new), rows.shape[0], dtype=torch.float64, device=rows.device)
    block = BLOCK if rows.device.type == "cpu" else BLOCK_ON_DEVICE
    for start in range(0, rows.shape[1], block):
        part = rows[:, start : start + block]  # from memory once, from the cache for each of `new`
        total += torch.stack([torch.mv(part, part[number]) for number in new])
    return total


def products_of(rows: Tensor, wanted: Sequence[tuple[int, int]]) -> Tensor:
    """Inner products, float64 [len(wanted)].

    Args:
        rows: [n, numel].
        wanted: Pairs of numbers of rows; few differ in the first.
    """
    new = sorted({a for a, _ in wanted})
    found = inner_products(rows, new)
    return torch.stack([found[new.index(a), b] for a, b in wanted])


def combination(products: Tensor, pairs: Sequence[tuple[int, int]], gradient: int) -> Tensor:
    """The coefficients of -H g in the basis, where H is the inverse Hessian of L-BFGS.

    Args:
        products: float64 [n, n], inner products of the basis; on the host.
        pairs: (place of s, place of y) in the basis, the oldest first.
        gradient: The place of g.

    Returns:
        float64 [n], 0 for vectors that are in no pair.
    """
    delta = torch.zeros(products.shape[0], dtype=torch.float64, device="cpu")
    delta[gradient] = -1.0
    weights: list[float] = []
    for s, y in reversed(pairs):
        weights.append(float(delta @ products[:, s]) / float(products[s, y]))
        delta[y] -= weights[-1]
    if pairs:
        s, y = pairs[-1]
        delta *= float(products[s, y]) / float(products[y, y])
    for s, y in pairs:
        delta[s] += weights.pop() - float(delta @ products[:, y]) / float(products[s, y])
    return delta


class PairTable:
    """Which pairs of a basis are in use, and the inner products of its vectors, which lie
    elsewhere.

    Args:
        size: Pairs that are kept at most.

    Attributes:
        products: float64 [2 (size + 1) + 1] squared, on the host: where both vectors are in use.
        pairs: Places of the pairs in use, the oldest first.
        counted: Inner products that were taken so far.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        count = 2 * (size + 1) + 1
        self.products = torch.zeros(count, count, dtype=torch.float64, device="cpu")
        self.pairs: list[int] = []
        self.counted = 0

    @property
    def last(self) -> int:
        """The gradient's place in the basis."""
        return self.products.shape[0] - 1

    def spare(self) -> int:
        """The place of a pair that is not in use."""
        return next(place for place in range(self.size + 1) if place not in self.pairs)

    def places(self, pair: int) -> list[int]:
        """Of a pair's step and difference, and of the gradient, in the basis."""
        return [pair, self.size + 1 + pair, self.last]

    def wanted(self, new: Sequence[int]) -> list[tuple[int, int]]:
        """The places whose inner products have to be taken when some vectors are new."""
        old = [place for pair in self.pairs for place in (pair, self.size + 1 + pair)]
        used = [*old, *(place for place in new if place not in old)]
        return [(a, b) for n, a in enumerate(new) for b in used if b not in new[:n]]

    def put(self, wanted: Sequence[tuple[int, int]], numbers: Sequence[float]) -> None:
        """Take up the inner products that were wanted."""
        self.counted += len(wanted)
        for (a, b), value in zip(wanted, numbers, strict=True):
            self.products[a, b] = self.products[b, a] = value

    def keep(self, pair: int) -> bool:
        """Use a pair, in place of the oldest where there are too many; says whether it is kept,
        which it is where the loss curves upwards along the step."""
        s, y, _ = self.places(pair)
        curvature = float(self.products[s, y])
        lengths = float((self.products[s, s] * self.products[y, y]).sqrt())
        if not curvature > CURVATURE * lengths:
            return False
        self.pairs = [*self.pairs[-self.size + 1 :], pair] if self.size > 1 else [pair]
        return True

    def coefficients(self) -> Tensor:
        """Of the direction in the basis, float64, on the host."""
        places = [(place, self.size + 1 + place) for place in self.pairs]
        return combination(self.products, places, self.last)


class History(PairTable):
    """The last steps and differences of gradients, and the gradient.

    Args:
        numel: Length of the vectors, or of this process's part of them.
        size: Pairs that are kept at most.
        dtype, device: Of the vectors.

    Attributes:
        rows: [2 (size + 1) + 1, numel]: steps, differences, the gradient; the pair of one place is
            to be tried.
        reduce: Given float64 inner products of this process's parts, gives those of the whole
            vectors; None: the vectors are whole.
    """

    def __init__(
        self, numel: int, *, size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(size)
        self.rows = torch.zeros(self.last + 1, numel, dtype=dtype, device=device)
        self.reduce: Callable[[Tensor], Tensor] | None = None

    @property
    def gradient(self) -> Tensor:
        return self.rows[-1]

    def begin(self, gradient: Tensor) -> None:
        """Forget all pairs, with this gradient."""
        self.pairs = []
        self.gradient.copy_(gradient)
        self._take([self.last])

    def add(self, step: Tensor, gradient: Tensor) -> bool:
        """Take up a step and the gradient behind it; says whether the pair is kept.

        Args:
            step: What was added to the parameters since the last gradient.
            gradient: The new one.
        """
        pair = self.spare()
        s, y, _ = self.places(pair)
        self.rows[s].copy_(step)
        torch.sub(gradient, self.gradient, out=self.rows[y])
        self.gradient.copy_(gradient)
        self.refresh(pair)
        return self.keep(pair)

    def refresh(self, pair: int) -> None:
        """Bring the inner products of a pair, and of the gradient, up to date."""
        self._take(self.places(pair))

    def direction(self) -> Tensor:
        """-H g, in new memory."""
        delta = self.coefficients()
        return delta.to(self.rows.device, self.rows.dtype) @ self.rows

    def _take(self, new: list[int]) -> None:
        """Bring the inner products of new vectors with all that are in use up to date."""
        wanted = self.wanted(new)
        numbers = products_of(self.rows, wanted)
        if self.reduce is not None:
            numbers = self.reduce(numbers)
        self.put(wanted, numbers.tolist())

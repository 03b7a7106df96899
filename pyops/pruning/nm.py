"""N of M: of each M consecutive inputs of a matrix, the N weights of largest magnitude are alive.

    NM(2, 4)     [out, in]: 2 of every 4 of a row; a convolution's inputs for each position alike
    NM(2, 4, transposable=True)
                 of every tile of 4 x 4, 2 in each row and 2 in each column: one of 90 patterns, the
                 one that keeps most, so that one compressed matrix serves forward and backward

Groups lie along inputs, which tensor parallelism may cut: whole groups stay on a rank, or the
pattern is refused with the sizes that fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import torch
from torch import Tensor, nn

from pyops.flat import Placement
from pyops.given_numbers import is_whole
from pyops.ops.sparse.nm_mask import MOST, nm_mask
from pyops.pruning.masks import Masks, unpack_bits
from pyops.pruning.ranking.choice import prunable

__all__ = ["NM", "check_kind", "check_pattern", "input_dim", "nm_masks"]

TILE = 4
PAIRS = tuple(combinations(range(TILE), 2))
PATTERNS = tuple(
    rows
    for rows in product(range(len(PAIRS)), repeat=TILE)
    if all(sum(column in PAIRS[p] for p in rows) == 2 for column in range(TILE))
)
"""Of a tile with two in each row and column: which pair of columns each row keeps."""


@dataclass(frozen=True)
class NM:
    """A pattern: `n` of each `m` consecutive inputs are alive.

    Raises:
        ValueError: For numbers that are no pattern.
    """

    n: int = 2
    """How many are alive, 1 to m."""
    m: int = 4
    """Of how many, 2 to 32."""
    transposable: bool = False
    """Two in each row and column of tiles of 4 x 4; of n = 2 and m = 4 alone."""

    def __post_init__(self) -> None:
        whole = is_whole(self.n) and is_whole(self.m)
        if not whole or not 1 <= self.n <= self.m or not 2 <= self.m <= MOST:
            raise ValueError(
                f"NM({self.n!r}, {self.m!r}): n of m must be 1 <= n <= m, with m from 2 to {MOST}"
            )
        if self.transposable and (self.n, self.m) != (2, TILE):
            raise ValueError(f"transposable masks are of 2:4; got {self.n}:{self.m}")

    def __str__(self) -> str:
        return f"{self.n}:{self.m}" + (" transposable" if self.transposable else "")

    def masked(self, weight: Tensor) -> Tensor:
        """A new tensor, weight with 0 in place of what is not alive; without a derivative.

        Args:
            weight: [..., out, in], or of a convolution [out, in, ...].
        """
        if self.transposable:
            alive = self.alive(weight)
            return torch.where(alive, weight.detach(), torch.zeros_like(weight))
        return nm_mask(weight.detach(), self.n, self.m, dim=input_dim(weight))[0]

    def alive(self, weight: Tensor) -> Tensor:
        """bool, of weight's shape.

        Args:
            weight: As of `masked`.
        """
        if self.transposable:
            return _transposable(weight.detach())
        bits = nm_mask(weight.detach(), self.n, self.m, dim=input_dim(weight))[1]
        return unpack_bits(bits, weight.numel()).view(weight.shape)

    def misfit(self, weight: Tensor) -> str:
        """Why a tensor can't have the pattern; "": it can.

        Args:
            weight: As of `masked`.
        """
        if weight.dim() < 2:
            return "it is no matrix"
        dim = input_dim(weight)
        if weight.shape[dim] % self.m:
            return f"its {weight.shape[dim]} inputs are no multiple of {self.m}"
        if self.transposable and (weight.dim() > 3 or weight.shape[dim - 1] % TILE):
            return f"its {weight.shape[dim - 1]} outputs are no multiple of {TILE}"
        return ""


def input_dim(weight: Tensor) -> int:
    """The dimension of a weight that its inputs lie along: 1 of a convolution's kernel, which has
    four dimensions or five; the last one of a matrix, or of several stacked ones.

    Args:
        weight: [..., out, in] or [out, in, ...].
    """
    return 1 if weight.dim() > 3 else weight.dim() - 1


def _transposable(weight: Tensor) -> Tensor:
    """Of each tile the pattern that keeps most; sums in float64, ties to the first pattern."""
    *lead, rows, columns = weight.shape
    tiles = weight.abs().double().reshape(-1, rows // TILE, TILE, columns // TILE, TILE)
    tiles = tiles.transpose(2, 3).reshape(-1, TILE, TILE)
    pairs = [[tiles[:, r, a] + tiles[:, r, b] for a, b in PAIRS] for r in range(TILE)]
    best = tiles.new_full((len(tiles),), -1.0)
    which = torch.zeros(len(tiles), dtype=torch.int64, device=weight.device)
    for number, pattern in enumerate(PATTERNS):
        a, b, c, d = (pairs[r][p] for r, p in enumerate(pattern))
        kept = (a + b) + (c + d)
        better = kept > best
        best = torch.where(better, kept, best)
        which.masked_fill_(better, number)
    table = torch.zeros(len(PATTERNS), TILE, TILE, dtype=torch.bool, device=weight.device)
    for number, pattern in enumerate(PATTERNS):
        for r, p in enumerate(pattern):
            table[number, r, list(PAIRS[p])] = True
    found = table[which].view(-1, rows // TILE, columns // TILE, TILE, TILE)
    return found.transpose(2, 3).reshape(*lead, rows, columns)


def check_kind(pattern: object) -> None:
    """Raise TypeError for what is no pattern.

    Args:
        pattern: Any.
    """
    if not isinstance(pattern, NM):
        raise TypeError(f"pattern is {pattern!r}; give an NM, such as NM(2, 4)")


def check_pattern(model: nn.Module, pattern: NM, names: Sequence[str]) -> None:
    """Raise ValueError unless every parameter can have the pattern, on this rank and whole.

    Args:
        model: What has the parameters.
        pattern: For them.
        names: Of the parameters.
    """
    named, places = dict(model.named_parameters()), Placement.of(model)
    for name in names:
        why = pattern.misfit(named[name])
        if not why:
            continue
        whole = places[name].global_shape if name in places else tuple(named[name].shape)
        raise ValueError(
            f"{name} can't be {pattern}: {why} (it is {tuple(named[name].shape)} here, and "
            f"{tuple(whole)} whole); leave it out by `only`, or choose a size, or a number of "
            f"tensor-parallel ranks, of which each has a multiple of {pattern.m} inputs"
        )


@torch.no_grad()
def nm_masks(
    model: nn.Module, pattern: NM | None = None, only: Sequence[str] | None = None
) -> Masks:
    """Prune once: of each group the largest weights stay, the others become 0, and masks say which.

    Args:
        model: Any; whole, or cut by tensor parallelism, on all ranks alike.
        pattern: None: NM(2, 4).
        only: Patterns of names of parameters or layers, ["blocks.*"]; None: matrices and
            convolution kernels but embeddings, depthwise kernels and the last layer.

    Returns:
        The masks, of weights that are 0 from now on.

    Raises:
        ValueError: Before anything is changed, for sizes that are no whole groups, a weight that is
            nan, and as of `Masks`.
    """
    pattern = NM() if pattern is None else pattern
    check_kind(pattern)
    chosen = prunable(model, only)
    check_pattern(model, pattern, list(chosen))
    for name, parameter in chosen.items():
        if bool(parameter.isnan().any()):
            raise ValueError(
                f"{name} has a weight that is nan, which has no magnitude; load it anew"
            )
    return Masks(model, {name: pattern.alive(parameter) for name, parameter in chosen.items()})

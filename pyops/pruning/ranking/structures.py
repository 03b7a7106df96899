"""Whole rows, columns or blocks of these, by their norms: what is left can be a smaller dense
matrix.

    rows      Structure(dim=0)              outputs of a linear layer, channels of a convolution
    columns   Structure(dim=1)              inputs
    heads     Structure(dim=1, width=64)    of the matrix that follows attention: 64 columns a head

A norm of a structure that ranks share would depend on the order in which their parts are added; so
each whole matrix is brought together, one at a time, and every rank finds the same norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pyops.pruning.ranking.holdings import Holdings

__all__ = ["COLUMNS", "ROWS", "Structure", "select_structures"]


@dataclass(frozen=True)
class Structure:
    """What of a matrix goes together.

    Attributes:
        dim: 0 for rows, 1 for columns (the inputs of a linear layer).
        width: So many neighbors are one structure: the channels of a head.
    """

    dim: int
    width: int = 1

    def __post_init__(self) -> None:
        if self.dim not in (0, 1) or self.width < 1:
            raise ValueError(
                f"Structure(dim={self.dim}, width={self.width}): dim is 0 (rows) or 1 (columns), "
                "width at least 1"
            )


ROWS, COLUMNS = Structure(0), Structure(1)


def select_structures(
    holdings: Holdings, scores: Mapping[str, Tensor], sparsity: float, *, structure: Structure
) -> dict[str, Tensor]:
    """bool, flat, of each holding's values: of each parameter the n - round(sparsity n) structures
    of the largest norm; of equal ones the first. A collective.

    Args:
        holdings: What the ranks have.
        scores: Of each holding's values.
        sparsity: The share of structures that goes.
        structure: Which.

    Raises:
        ValueError: On every rank: a parameter is not made of whole structures.
    """
    for name, shape in holdings.shapes.items():
        if len(shape) < 2 or shape[structure.dim] % structure.width:
            raise ValueError(
                f"{name} of {shape} is not made of structures of {structure.width} along dim "
                f"{structure.dim}; choose others by only=, or another width"
            )
    alive: dict[str, Tensor] = {}
    mine = {each.name: each for each in holdings}
    for name, shape in holdings.shapes.items():
        kept = _kept(_norms(holdings, scores, name, structure), sparsity)
        lasting = kept.repeat_interleave(structure.width)
        if name in mine:
            each = mine[name]
            places = each.index(torch.arange(each.values.numel(), device=each.values.device))
            below = 1
            for size in shape[structure.dim + 1 :]:
                below *= size
            along = (places // below) % shape[structure.dim]
            found = lasting[along]
            if each.inside is not None:
                padding = torch.ones_like(found)
                padding[each.inside] = False
                found &= ~padding
            alive[name] = found
    return alive


def _norms(
    holdings: Holdings, scores: Mapping[str, Tensor], name: str, structure: Structure
) -> Tensor:
    """float64: the sum of squares of each structure of the whole parameter."""
    whole = torch.zeros(holdings.numel(name), dtype=torch.float32, device=holdings.device)
    for each in holdings.of([name]):
        if each.counted:
            at = torch.arange(each.values.numel(), device=each.values.device)
            at = at if each.inside is None else at[each.inside]
            whole[each.index(at)] = scores[name][at].float()
    if holdings.reduce is not None:
        holdings.reduce(whole)
    matrix = whole.view(holdings.shapes[name]).double().square()
    lines = matrix.transpose(0, structure.dim).flatten(1).sum(1)
    return lines.view(-1, structure.width).sum(1)


def _kept(norms: Tensor, sparsity: float) -> Tensor:
    keep = len(norms) - round(sparsity * len(norms))
    order = torch.sort(norms, descending=True, stable=True).indices
    found = torch.zeros(len(norms), dtype=torch.bool, device=norms.device)
    found[order[:keep]] = True
    return found

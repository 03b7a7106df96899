"""Pruning by magnitude: the smallest weights are set to 0 and masked, at once.

    masks = magnitude(model, 0.9, scope="global", only=["blocks.*"], least=0.02)

The same bits on any layout of the model: one process, data parallelism, ZeRO 0 to 3, tensor
parallelism, pipelines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pyops.comm.agreement import check_same, ranks_agree
from pyops.given_numbers import check_number
from pyops.mesh import ProcessGroupLike
from pyops.ops.layers.activation import FLOATS
from pyops.ops.memory import require_memory
from pyops.pruning.masks import Mask, Masks
from pyops.pruning.ranking.holdings import Holdings
from pyops.pruning.ranking.selection import Scores, select_by_layer, select_together
from pyops.pruning.ranking.structures import COLUMNS, ROWS, Structure, select_structures

__all__ = ["Rule", "magnitude", "masks_of_holdings", "scores_of", "zero_pruned"]

SCOPES = {"rows": ROWS, "columns": COLUMNS}


def magnitude(
    model: nn.Module,
    sparsity: float,
    *,
    scope: str | Structure = "layer",
    only: Sequence[str] | None = None,
    least: float = 0.0,
    importance: Mapping[str, Tensor] | None = None,
    optimizer: object = None,
    group: ProcessGroupLike = None,
) -> Masks:
    """Set the smallest weights to 0, and mask them. Collective: every rank must call it.

    Of n weights n - round(sparsity n) stay, exactly. Of weights of one magnitude those that come
    first stay, by the parameter's name and then in row-major order; -0.0 is as small as 0.0.

    Args:
        model: This rank's part of it.
        sparsity: The share that goes, from 0 to 1.
        scope: "layer": of each parameter. "global": of all together. "rows", "columns" or a
            `Structure`: of each parameter's rows, columns or blocks of these, by their norms.
        only: Patterns of names, as of a shell. Matrices and convolution kernels that one matches
            are pruned; vectors where they are named in full. None: all matrices and kernels but
            embeddings and the last layer.
        least: With "global", the share of each parameter that stays in any case.
        importance: {name: scores of the shape of this rank's parameter}, ranked by their magnitude
            in place of the weights: |w g|, say, or |w| |x|. None: the weights.
        optimizer: A ZeroOptimizer over the model; needed at stage 3, where it has the weights.
            Training goes on by `hold`.
        group: The ranks that have the model together; see `pyops.mesh.resolve`.

    Returns:
        The masks, which have been applied.

    Raises:
        ValueError, TypeError: On every rank alike, before anything is changed: sparsity or least
            out of range, names that match nothing, frozen or quantized parameters, a nan,
            parameters that have masks already.

    Weights of float64 are ranked as they round to float32.
    """
    rule = Rule(scope, only, least)
    rule.agree(sparsity, group=group)
    holdings = Holdings(model, only=only, optimizer=optimizer, group=group)
    with ranks_agree(group):
        scores = scores_of(holdings, importance)
    alive = rule.select(holdings, scores, sparsity)
    local = masks_of_holdings(holdings, alive)
    with ranks_agree(group):
        Masks.checked(model, local)
    masks = Masks(model, local)
    zero_pruned(holdings, alive)
    return masks


@dataclass(frozen=True)
class Rule:
    """Which weights go; the arguments of `magnitude` of the same names."""

    scope: str | Structure = "layer"
    only: Sequence[str] | None = None
    least: float = 0.0

    def agree(self, sparsity: float, *, group: ProcessGroupLike) -> None:
        """`check`, on all ranks, which must have been given the same. Collective."""
        with ranks_agree(group):
            self.check(sparsity)
        options = {"sparsity": sparsity, "scope": self.scope, "least": self.least}
        only = None if self.only is None else list(self.only)
        texts = {name: str(value) for name, value in {**options, "only": only}.items()}
        check_same(texts, group=group, who="pruning")

    def check(self, sparsity: float) -> None:
        """Raise ValueError for shares out of range and for scopes that there are not."""
        for name, value in (("sparsity", sparsity), ("least", self.least)):
            check_number(name, value, lambda v: 0 <= v <= 1, "give a share from 0 to 1")
        if not isinstance(self.scope, Structure) and self.scope not in (
            "layer",
            "global",
            *SCOPES,
        ):
            raise ValueError(
                f"scope is {self.scope!r}; choose 'layer', 'global', 'rows', 'columns' or a "
                "pyops.pruning.Structure"
            )
        if self.least and self.scope != "global":
            raise ValueError(f"least={self.least} is for scope='global'; scope is {self.scope!r}")

    def select(
        self,
        holdings: Holdings,
        scores: Scores,
        sparsity: float,
        *,
        within: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """bool, flat, of each holding's values: those that stay. A collective.

        Args:
            holdings: What the ranks have.
            scores: Of each holding's values.
            sparsity: The share that goes.
            within: Those that may stay, as what is returned; None: all. Structures go by their
                norms alone.

        Raises:
            ValueError: On every rank: a score is nan, or the floors leave no room.
        """
        check_finite(holdings, scores)
        if isinstance(self.scope, Structure) or self.scope in SCOPES:
            structure = self.scope if isinstance(self.scope, Structure) else SCOPES[self.scope]
            return select_structures(holdings, scores, sparsity, structure=structure)
        if self.scope == "global":
            return select_together(holdings, scores, sparsity, least=self.least, within=within)
        return select_by_layer(holdings, scores, sparsity, within=within)


def masks_of_holdings(holdings: Holdings, alive: Mapping[str, Tensor]) -> dict[str, Mask]:
    """The masks of this rank's parameters. At ZeRO's stage 3 a collective."""
    return {name: Mask.of(mask) for name, mask in holdings.local_masks(alive).items()}


def zero_pruned(holdings: Holdings, alive: Mapping[str, Tensor]) -> None:
    """Set what is not alive to 0 where the weights are: at stage 3 of ZeRO the model's parameters
    have no memory."""
    for each in holdings:
        each.values.masked_fill_(~alive[each.name], 0.0)
    if holdings.zero is not None:
        holdings.zero.gathering.release_all()  # what is gathered holds the old values


def scores_of(holdings: Holdings, importance: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Flat scores of each holding's values: the values, or what was given in their place.

    Raises:
        ValueError: Scores are missing, of another shape or no floats, or weights have no memory.
    """
    found = {}
    for each in holdings:
        require_memory(each.values, each.name)
        score = each.values
        if importance is not None:
            if each.name not in importance:
                raise ValueError(
                    f"importance has no scores of {each.name}; give them for each of "
                    f"{', '.join(holdings.shapes)}"
                )
            given = importance[each.name]
            if not isinstance(given, Tensor) or tuple(given.shape) != each.local_shape:
                kind = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
                raise ValueError(
                    f"the importance of {each.name} is of {kind}; give scores of "
                    f"{each.local_shape}, as this rank's parameter"
                )
            score = given.detach().reshape(-1)[each.start : each.start + each.values.numel()]
        if score.dtype not in FLOATS:
            raise ValueError(
                f"what ranks {each.name} is {score.dtype}; give one of "
                f"{', '.join(map(str, FLOATS))}"
            )
        found[each.name] = score.float() if score.dtype == torch.float64 else score
    return found


def check_finite(holdings: Holdings, scores: Mapping[str, Tensor]) -> None:
    """Raise ValueError, on every rank, where a score is nan. A collective."""
    nans = holdings.total({e.name: int(scores[e.name].isnan().sum()) for e in holdings})
    for name, count in nans.items():
        if count:
            raise ValueError(
                f"{count} of the numbers that rank {name} are nan, which have no order; find out "
                "where they come from before pruning"
            )

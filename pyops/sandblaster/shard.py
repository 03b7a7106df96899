"""VectorShard: a part of the parameters and of all vectors of L-BFGS, and what is done with them.

    point, direction        trial = point + t * direction        what workers fetch
    gradient of each trial that the line search may still choose
    history                 steps, differences of gradients, the gradient

A coordinator orders operations and gets numbers for answers; vectors stay where they are (Dean et
al. 2012, section 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyops.optim.lbfgs.history import products_of
from pyops.sandblaster.tree_sum import TreeSum

__all__ = ["Measures", "VectorShard"]


class Measures(NamedTuple):
    """Of a gradient's part.

    Attributes:
        slope: Its inner product with the direction, added in float64.
        largest: The largest absolute component.
        total: The sum of absolute components.
    """

    slope: float
    largest: float
    total: float


class VectorShard:
    """One shard's part of the vectors.

    Args:
        values: Its part of the first parameters, float32 or float64 [n].
        history_size: Pairs of steps and differences of gradients that are kept.
        leaves: Portions of the batch, of which gradients are the sum.

    Attributes:
        point: The parameters from which the line search starts.
        trial: Those at which losses are computed.
    """

    def __init__(self, values: Tensor, *, history_size: int, leaves: int) -> None:
        self.point = values.detach().clone()
        self.trial = self.point.clone()
        self.direction = torch.zeros_like(self.point)
        self.rows = self.point.new_zeros(2 * (history_size + 1) + 1, self.point.numel())
        self._leaves = leaves
        self._sum = TreeSum(leaves)
        self._known: dict[float, Tensor] = {}

    # an evaluation

    def begin_evaluation(self, step: float) -> None:
        """Move the trial point, and begin a sum of gradients."""
        torch.add(self.point, self.direction, alpha=step, out=self.trial)
        self._sum = TreeSum(self._leaves)

    def add_gradient(self, gradient: Tensor, index: int, level: int = 0) -> None:
        """Add a worker's part of the gradient; see TreeSum.add.

        Args:
            gradient: This shard's part of it.
            index: Of the node of the tree.
            level: Of the node.
        """
        self._sum.add(gradient, index=index, level=level)

    def end_evaluation(self, step: float, held: Sequence[float]) -> Measures:
        """Keep the gradient of the trial point.

        Args:
            step: Its step length.
            held: Step lengths whose gradients are kept besides.
        """
        gradient = self._sum.total
        self._sum = TreeSum(self._leaves)
        self._known = {t: at for t, at in self._known.items() if t in held or t == 0.0}
        self._known[step] = gradient
        size = gradient.abs()
        largest = float(size.max()) if gradient.numel() else 0.0
        return Measures(self._dot(gradient), largest, float(size.sum()))

    def _dot(self, gradient: Tensor) -> float:
        return float(gradient.double() @ self.direction.double())

    # an iteration

    def begin_history(self, wanted: Sequence[tuple[int, int]]) -> list[float]:
        """Forget all pairs, and begin with the gradient of the point.

        Args:
            wanted: Places whose inner products are asked for.

        Returns:
            This part of each.
        """
        self.rows[-1].copy_(self._known[0.0])
        return self._products(wanted)

    def accept(self, step: float) -> None:
        """Make the trial of a step length the point of the next line search."""
        self.point = torch.add(self.point, self.direction, alpha=step)
        self._known = {0.0: self._known[step]}

    def add_pair(
        self, s: int, y: int, step: float, wanted: Sequence[tuple[int, int]]
    ) -> list[float]:
        """Write the last step and the difference of gradients along it into the history.

        Args:
            s, y: Their places.
            step: The length of the step that was accepted.
            wanted: Places whose inner products are asked for.

        Returns:
            This part of each.
        """
        gradient = self._known[0.0]
        torch.mul(self.direction, step, out=self.rows[s])
        torch.sub(gradient, self.rows[-1], out=self.rows[y])
        self.rows[-1].copy_(gradient)
        return self._products(wanted)

    def _products(self, wanted: Sequence[tuple[int, int]]) -> list[float]:
        found: list[float] = products_of(self.rows, wanted).tolist()
        return found

    def turn(self, coefficients: Sequence[float]) -> tuple[float, float]:
        """Set the direction to a combination of the history.

        Args:
            coefficients: One for each place.

        Returns:
            (its largest absolute component, this part of its inner product with the gradient)
        """
        weights = torch.tensor(coefficients, dtype=torch.float64, device="cpu")
        self.direction = weights.to(self.rows.device, self.rows.dtype) @ self.rows
        largest = float(self.direction.abs().max()) if self.direction.numel() else 0.0
        return largest, self._dot(self._known[0.0])

    def state_dict(self) -> dict[str, Tensor]:
        """All vectors between two iterations: [n] each, and the history; new memory."""
        kept = {"point": self.point, "direction": self.direction, "rows": self.rows}
        return {name: each.clone() for name, each in {**kept, "gradient": self._known[0.0]}.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go back to where `state_dict` was taken.

        Raises:
            ValueError: Before anything is changed, for vectors of another length or dtype.
        """
        for name, own in (("point", self.point), ("rows", self.rows)):
            found = state[name]
            if found.shape != own.shape or found.dtype != own.dtype:
                raise ValueError(
                    f"the snapshot's {name} is {tuple(found.shape)} of {found.dtype}, and this "
                    f"shard's {tuple(own.shape)} of {own.dtype}; give the snapshots of a run with "
                    "the same model, shards and config"
                )
        self.point, self.direction = state["point"].clone(), state["direction"].clone()
        self.rows.copy_(state["rows"])
        self._known = {0.0: state["gradient"].clone()}
        self._sum = TreeSum(self._leaves)

    def begin_anew(self, values: Tensor) -> None:
        """Go back to the first parameters, without a history."""
        self.point = values.clone()
        self.direction.zero_()
        self.rows.zero_()
        self._known, self._sum = {}, TreeSum(self._leaves)

    def values(self) -> Tensor:
        """The parameters of the last point."""
        return self.point

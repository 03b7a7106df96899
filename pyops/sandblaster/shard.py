"""VectorShard: one part of every vector of L-BFGS, and the few operations on them.

    origin, direction           trial: point = origin + step * direction
    history rows s, y, g        take:  their inner products with the newest, of this part
    sums of gradients           direct: direction = delta @ rows

A coordinator orders operations by small commands and gets numbers back; vectors stay where they are
(Dean et al., Large scale distributed deep networks, NeurIPS 2012, section 4.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.optim.lbfgs.history import History
from pyops.sandblaster.sums import PortionSums

__all__ = ["VectorShard"]


class VectorShard:
    """One part of the vectors.

    Args:
        numel: Numbers in the part.
        dtype: fp32 or fp64.

    Attributes:
        origin: [numel], the parameters at the end of the last iteration.
        point: [numel], the parameters at which gradients are computed now.
        evaluation: The number of that point; 0: there is none.
        term: The coordinator's, by number; an older one's commands are refused.
        initialized: Whether the first values are there.
    """

    def __init__(self, numel: int, *, dtype: torch.dtype = torch.float32) -> None:
        self.origin = torch.zeros(numel, dtype=dtype, device="cpu")
        self.direction = torch.zeros_like(self.origin)
        self.point = self.origin
        self.evaluation = self.term = 0
        self.initialized = False
        self._sums: PortionSums[Tensor] = PortionSums(1)
        self._gradients: dict[int, Tensor] = {}
        self._history: History | None = None

    def initialize(self, values: Tensor) -> bool:
        """The first values. Says whether they were taken: the first worker's are."""
        if not self.initialized:
            self.origin.copy_(values)
            self.point = self.origin.clone()
            self.initialized = True
            return True
        return False

    def push(self, evaluation: int, level: int, index: int, gradient: Tensor) -> bool:
        """Take the gradient of a run of portions in, once; says whether it was new.

        Args:
            evaluation: The point at which it was computed; of another one than the shard's, it
                changes nothing.
            level: Of the run in the tree of portions.
            index: Which one of its level.
            gradient: [numel], a sum over the run; the shard's from now on.
        """
        return evaluation == self.evaluation and self._sums.add(level, index, gradient)

    def run(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out a command; its numbers.

        Raises:
            ValueError: For the command of a coordinator that another one has replaced.
        """
        if command["term"] < self.term:
            raise ValueError(
                f"this is a command of coordinator {command['term']}, and coordinator {self.term} "
                "leads the run since; let the older one end"
            )
        self.term = command["term"]
        with torch.no_grad():
            found: dict[str, Any] = getattr(self, f"_{command['kind']}")(**command["numbers"])
        return found

    def _begin(self, history_size: int) -> dict[str, Any]:
        """A run begins, or goes on from the last iteration without its history."""
        self._history = History(
            len(self.origin), size=history_size, dtype=self.origin.dtype, device="cpu"
        )
        self._gradients = {}
        self.direction.zero_()
        return {}

    def _trial(self, evaluation: int, step: float, portions: int) -> dict[str, Any]:
        self.point = torch.add(self.origin, self.direction, alpha=step)
        self.evaluation, self._sums = evaluation, PortionSums(portions)
        return {}

    def _finish(self, held: list[int]) -> dict[str, Any]:
        """All portions are there: keep the gradient, and those of the evaluations in `held`."""
        gradient = self._sums.result()
        assert gradient is not None, "a gradient is finished before all of its portions are there"
        self._gradients = {n: g for n, g in self._gradients.items() if n in held}
        self._gradients[self.evaluation] = gradient
        return {
            "slope": _dot(gradient, self.direction),
            "largest": float(gradient.abs().max()),
            "length": float(gradient.abs().sum()),
        }

    def _take(
        self, evaluation: int, step: float, new: list[int], used: list[int]
    ) -> dict[str, Any]:
        """Go to a point that was evaluated: rows s, y, g, and their inner products."""
        assert self._history is not None
        rows, gradient = self._history.rows, self._gradients[evaluation]
        if len(new) > 1:
            torch.mul(self.direction, step, out=rows[new[0]])
            torch.sub(gradient, rows[-1], out=rows[new[1]])
            self.origin.add_(self.direction, alpha=step)
        rows[-1] = gradient
        return {"products": self._history.products_of(new, used).tolist()}

    def _direct(self, delta: list[float]) -> dict[str, Any]:
        assert self._history is not None
        rows = self._history.rows
        self.direction = torch.tensor(delta, dtype=rows.dtype, device="cpu") @ rows
        return {
            "slope": _dot(rows[-1], self.direction),
            "largest": float(self.direction.abs().max()),
        }


def _dot(a: Tensor, b: Tensor) -> float:
    return float(a.double() @ b.double())

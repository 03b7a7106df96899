"""TreeSum: a sum whose bits do not depend on the order in which its terms arrive.

    level 2           [0 1 2 3]
    level 1       [0 1]      [2 3]      [4]       two neighbors are added when both are there;
    level 0      0    1     2    3     4          what has no neighbor goes up alone

Terms are the leaves of a fixed binary tree, so that any number of workers, in any order, gives one
sum. At most log2(leaves) sums and what waits for a neighbor are kept.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["TreeSum"]


class TreeSum:
    """The sum of `leaves` tensors of one shape.

    Args:
        leaves: How many there are.

    Attributes:
        most: Tensors that were kept at a time, at most.
    """

    def __init__(self, leaves: int) -> None:
        self.leaves = leaves
        self.most = 0
        self._kept: dict[tuple[int, int], Tensor] = {}

    def add(self, term: Tensor, *, index: int, level: int = 0) -> None:
        """Take up a term, or the sum of all leaves of a node. Each leaf once.

        Args:
            term: Which is this object's from now on.
            index: Of the node among those of its level: it has the leaves from index * 2**level on.
            level: 0 for a leaf.
        """
        self._kept[level, index] = term
        self.most = max(self.most, len(self._kept))
        while (1 << level) < self.leaves:
            if index ^ 1 == index + 1 and (index + 1) << level >= self.leaves:
                self._kept[level + 1, index // 2] = self._kept.pop((level, index))
            else:
                left, right = (level, index & ~1), (level, index | 1)
                if left not in self._kept or right not in self._kept:
                    return
                self._kept[level + 1, index // 2] = self._kept.pop(left) + self._kept.pop(right)
            level, index = level + 1, index // 2

    @property
    def complete(self) -> bool:
        """Whether every leaf is in the sum."""
        return len(self._kept) == 1 and all(
            index == 0 and 1 << level >= self.leaves for level, index in self._kept
        )

    @property
    def total(self) -> Tensor:
        """The sum. ValueError where a leaf is missing."""
        if not self.complete:
            raise ValueError(
                f"the sum of {self.leaves} portions is asked for before all are there: nodes "
                f"{sorted(self._kept)}"
            )
        (found,) = self._kept.values()
        return found

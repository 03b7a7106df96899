"""Sums over portions whose bits do not depend on who computed what, or when it came.

    level 2            0
    level 1       0         1          two siblings are added when both are there; what waits is
    level 0     0   1     2   3        kept: at most (outstanding + levels) vectors

A leaf without a sibling, at the end of a number of portions that is no power of 2, goes up alone.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor

__all__ = ["PortionSums"]

T = TypeVar("T", float, Tensor)


class PortionSums(Generic[T]):
    """The sum over portions, added along a fixed binary tree over their numbers.

    Args:
        portions: How many there are.
        height: The level at which a sum stays; None: of the whole.

    Attributes:
        height: The level of the result.
        most: The most values that waited at a time.
    """

    def __init__(self, portions: int, *, height: int | None = None) -> None:
        self.portions = portions
        self.height = (portions - 1).bit_length() if height is None else height
        self._waiting: dict[tuple[int, int], T] = {}
        self._seen: set[tuple[int, int]] = set()
        self.most = 0

    def add(self, level: int, index: int, value: T) -> bool:
        """Take a sum in; says whether it was new.

        Args:
            level: Of the sum: 0 of one portion, j of a run of 2^j of them.
            index: Which one of its level.
            value: Is kept or changed.
        """
        if (level, index) in self._seen:
            return False
        self._seen.add((level, index))
        while level < self.height:
            sibling = index ^ 1
            if sibling << level < self.portions:
                other = self._waiting.pop((level, sibling), None)
                if other is None:
                    break
                value = other + value
            level, index = level + 1, index >> 1
        self._waiting[level, index] = value
        self.most = max(self.most, len(self._waiting))
        return True

    def result(self, index: int = 0) -> T | None:
        """The sum at `height`; None while portions of it are missing."""
        return self._waiting.get((self.height, index))

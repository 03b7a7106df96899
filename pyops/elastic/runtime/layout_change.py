"""LayoutChange: what a decision changed."""

from __future__ import annotations

from dataclasses import dataclass

from pyops.elastic.layout.rank_layout import Layout

__all__ = ["LayoutChange"]


@dataclass(frozen=True)
class LayoutChange:
    """What a decision changed.

    Attributes:
        seconds: From the decision until training can go on, the slowest rank's.
        reason: Why not fewer stages.
    """

    frozen: int  # blocks
    before: Layout
    after: Layout
    seconds: float
    reason: str

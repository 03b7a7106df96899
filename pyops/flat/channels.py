"""Channels that may change places among each other without a change of what a model computes.

    hidden channels of an MLP    rows of up and of its bias  --.
                                                               |-- the same order for all
                                 columns of down             --'

A layer says so of what lies within it by `channels()`, and a model of all its channels by
`permutations()`, beside the `placements` that say how parameters are cut. `pyops.pruning.permute`
goes by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["ChannelPart", "ChannelSet", "written"]


@dataclass(frozen=True)
class ChannelPart:
    """Where the channels lie in a parameter or buffer."""

    name: str
    """Of the parameter or buffer, of the whole model or within the layer that says so."""
    dim: int = 0
    """The dimension along which they lie."""
    starts: tuple[int, ...] = (0,)
    """Where they begin in it: once, or several times, such as for each head that shares values."""
    reads: bool = False
    """Whether they are what a matrix, or a convolution, is applied to: along these N:M groups
    lie."""

    def under(self, prefix: str) -> ChannelPart:
        """The same, of a module that has the layer as its `prefix`."""
        return replace(self, name=f"{prefix}.{self.name}" if prefix else self.name)


@dataclass(frozen=True)
class ChannelSet:
    """Channels whose order is free."""

    name: str
    """What is permuted, such as "blocks.0.mlp.hidden"."""
    size: int
    """Number of channels."""
    parts: tuple[ChannelPart, ...]
    """All that has to be permuted together."""
    fixed: str = ""
    """Why the order is not free after all; "": it is."""

    def under(self, prefix: str) -> ChannelSet:
        """The same, of a module that has the layer as its `prefix`."""
        parts = tuple(part.under(prefix) for part in self.parts)
        return replace(self, name=f"{prefix}.{self.name}" if prefix else self.name, parts=parts)


def written(
    layer: str, *, dim: int = 0, starts: Sequence[int] = (0,), bias: bool
) -> tuple[ChannelPart, ...]:
    """The rows of a linear layer's weight and of its bias.

    Args:
        layer: Its name.
        dim: Of the rows, in weight and bias alike.
        starts: As of `ChannelPart`.
        bias: Whether there is one.
    """
    names = ("weight", "bias") if bias else ("weight",)
    return tuple(ChannelPart(f"{layer}.{name}", dim, tuple(starts)) for name in names)

"""MeasuredCosts: what a block, the ends of a model and the optimizer were measured to take, which
`step_time` takes in place of formulas.

    seconds of a block = fixed + each x rows of a micro-batch      for each degree of tp

`pyops.plan.measuring.blocks` measures them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Line", "MeasuredCosts", "MeasuredLayers"]

# Fitted to every third layout of `python -m benchmarks plan`, of a GPT on two cores.
OF_A_MESSAGE, STRAGGLING = 175.0, 0.135


@dataclass(frozen=True)
class Line:
    """seconds = fixed + each x number."""

    fixed: float
    """Seconds for none."""
    each: float
    """Seconds for one more."""

    def at(self, number: float) -> float:
        """Seconds for so many.

        Args:
            number: Of rows, or of elements.
        """
        return self.fixed + self.each * number

    @classmethod
    def through(cls, first: tuple[float, float], second: tuple[float, float]) -> Line:
        """The line through two points; neither part of it is below 0.

        Args:
            first: (number, seconds).
            second: Another, of a larger number.
        """
        (few, short), (many, long) = first, second
        each = max(0.0, (long - short) / (many - few))
        fixed = max(0.0, short - few * each)
        return cls(fixed, each if fixed else long / many)


@dataclass(frozen=True)
class MeasuredCosts:
    """Seconds that the ranks of a machine took, all of them at the same time."""

    forward: Mapping[int, Line]
    """{tp: of a block, by rows}, messages apart."""
    backward: Mapping[int, Line]
    """Likewise."""
    ends_forward: Mapping[int, Line]
    """{tp: of embedding, head and loss together, by rows}."""
    ends_backward: Mapping[int, Line]
    """Likewise."""
    optimizer: Line
    """Of a step, by the elements that a rank owns, their norm included."""
    launch: float
    """Seconds of an operation that has next to nothing to do."""
    again: float = 1.0
    """Which part of a forward the recomputation of a block takes longer."""
    of_a_message: float = OF_A_MESSAGE
    """Such operations that a message between ranks takes beside its time on the link: fitted."""
    straggling: float = STRAGGLING
    """Deviation of a rank's step, of which the slowest of all counts, as `Software` has it for
    devices of their own: ranks of one machine disturb each other, and wait for each other at every
    message; what is timed is each by itself. Nothing for one rank. Fitted."""
    facts: Mapping[str, str] = field(default_factory=dict, compare=False)
    """On what, and with how many ranks."""

    def has(self, tp: int) -> bool:
        """Whether blocks were measured as tp ranks cut them.

        Args:
            tp: How many ranks.
        """
        return tp in self.forward


@dataclass(frozen=True)
class MeasuredLayers:
    """Seconds that the ranks of a machine took for each layer of a model of images, all of them at
    the same time."""

    forward: Mapping[int, tuple[Line, ...]]
    """{tp: of each layer, by images}, with the messages of tp."""
    backward: Mapping[int, tuple[Line, ...]]
    """Likewise."""
    optimizer: Line
    """Of a step, by the elements that a rank owns, their norm included."""
    launch: float
    """Seconds of an operation that has next to nothing to do."""
    of_a_message: float = OF_A_MESSAGE
    """As in `MeasuredCosts`."""
    straggling: float = STRAGGLING
    """As in `MeasuredCosts`."""

    def has(self, tp: int) -> bool:
        """Whether layers were measured as tp ranks cut them.

        Args:
            tp: How many ranks.
        """
        return tp in self.forward

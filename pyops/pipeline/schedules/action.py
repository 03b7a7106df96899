"""Action: what a rank does at one place of a schedule, written as people write it: 2F0 is stage 2's
forward of micro-batch 0.

F  forward                              R  forward again, before a backward whose activations were
                                           dropped
B  backward: I and W in one             U  optimizer step of the stage; its number is that of the
                                           step
I  gradient of the input, which the stage before waits for
W  gradient of the weights, which nobody waits for
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["KINDS", "Action"]

KINDS = "FBIWRU"
_TEXT = re.compile(rf"(\d+)([{KINDS}])(\d+)")


class Action(NamedTuple):
    """`kind`, a letter of KINDS, at `stage` for micro-batch, or as step, `number`.

    Attributes:
        stage: The number of the stage, from 0.
        kind: A letter of KINDS: "F" is a forward, "B" a backward, "U" an optimizer step.
        number: The micro-batch, or for "U" the step.
    """

    stage: int
    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.number}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that `str` wrote.

        Raises:
            ValueError: For other texts.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is no action; write stage, kind ({', '.join(KINDS)}) and "
                "micro-batch, such as 2F0"
            )
        return cls(int(match[1]), match[2], int(match[3]))

    @property
    def ends_activations(self) -> bool:
        """Whether nothing of the micro-batch's activations is needed at the stage after it."""
        return self.kind in "BW"

"""What sizes of a model may be, and how their numbers are written."""

from __future__ import annotations

from typing import Any

__all__ = ["PlanError", "check_whole", "count"]


class PlanError(ValueError):
    """What was asked for can't be planned; the message names the value and the fix."""


def count(number: float) -> str:
    """A number of parameters in words.

    Args:
        number: Of parameters.
    """
    for limit, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= limit:
            return f"{number / limit:.3g} {word}"
    return f"{number:,.0f}"


def check_whole(name: str, value: Any, least: int) -> None:
    """Check a whole number.

    Args:
        name: What the message calls it.
        value: To be checked.
        least: The smallest that is allowed.

    Raises:
        PlanError: It is none, or smaller.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(f"{name} is {value!r}; give a whole number, {least} or more")

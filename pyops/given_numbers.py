"""Numbers that a caller gives, refused with their name, their value and the fix.

check_whole("rounds", rounds, least=1)                          1, 2, ...; neither 1.5 nor True
check_number("top_p", top_p, lambda v: 0 < v <= 1, "give ...")  whole or not; neither text nor None
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real

__all__ = ["check_number", "check_whole", "is_whole"]


def is_whole(value: object) -> bool:
    """Whether a value is a whole number of Python or of numpy; True and False are none.

    Args:
        value: Any.
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_whole(name: str, value: object, *, least: int = 0, most: int | None = None) -> None:
    """Refuse what is no whole number, or out of range.

    Args:
        name: What the value is, for the message.
        value: Any.
        least: The least that is allowed.
        most: The most; None: any.

    Raises:
        ValueError: With the name, the value and the range.
    """
    if is_whole(value) and least <= value and (most is None or value <= most):  # type: ignore[operator]
        return
    said = f"{least} or more" if most is None else f"from {least} to {most}"
    raise ValueError(f"{name} is {value!r}; give a whole number, {said}")


def check_number(name: str, value: object, holds: Callable[[float], bool], fix: str) -> None:
    """Refuse what is no number, or one of which a condition does not hold.

    Args:
        name: What the value is, for the message.
        value: Any.
        holds: Whether a number is allowed; nan comes here, too.
        fix: What to do, "give a share from 0 to 1".

    Raises:
        ValueError: With the name, the value and the fix.
    """
    if not isinstance(value, Real) or isinstance(value, bool) or not holds(float(value)):
        raise ValueError(f"{name} is {value!r}; {fix}")

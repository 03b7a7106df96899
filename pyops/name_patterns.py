"""Names that patterns choose, as of a shell: of parameters, of modules."""

from __future__ import annotations

from collections.abc import Sequence, Set
from fnmatch import fnmatchcase

__all__ = ["check_patterns", "matching"]


def check_patterns(patterns: object, *, what: str) -> None:
    """Refuse what is no list of texts.

    Args:
        patterns: Any.
        what: The argument, for the message.

    Raises:
        TypeError: For one text in place of a list of them, and for what holds something else.
    """
    if isinstance(patterns, str):
        raise TypeError(f"{what} is {patterns!r}; give a list of patterns: [{patterns!r}]")
    listed = isinstance(patterns, Sequence | Set)
    if not listed or not all(isinstance(pattern, str) for pattern in patterns):  # type: ignore[attr-defined]
        raise TypeError(
            f'{what} is {patterns!r}; give a list of patterns of names, ["blocks.*"] say'
        )


def matching(names: Sequence[str], patterns: Sequence[str], *, what: str) -> list[str]:
    """The names that one of the patterns matches.

    Args:
        names: Of all.
        patterns: As of a shell: "blocks.*.attention.*"; * goes over points, too.
        what: The argument, for the message.

    Raises:
        TypeError: As of `check_patterns`.
        ValueError: For a pattern that matches none.
    """
    check_patterns(patterns, what=what)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"{what}: {pattern!r} matches none of {len(names)} names, such as "
                f"{', '.join(names[:4])}; write * for any part of a name"
            )
    return [name for name in names if any(fnmatchcase(name, p) for p in patterns)]

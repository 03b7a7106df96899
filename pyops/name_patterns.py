"""Names that patterns choose, as of a shell: of parameters, of modules."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

__all__ = ["matching"]


def matching(names: Sequence[str], patterns: Sequence[str], *, what: str) -> list[str]:
    """The names that one of the patterns matches.

    Args:
        names: Of all.
        patterns: As of a shell: "blocks.*.attention.*"; * goes over points, too.
        what: The argument, for the message.

    Raises:
        TypeError: For one text in place of a list of them.
        ValueError: For a pattern that matches none.
    """
    if isinstance(patterns, str):
        raise TypeError(f"{what} is {patterns!r}; give a list of patterns: [{patterns!r}]")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"{what}: {pattern!r} matches none of {len(names)} names, such as "
                f"{', '.join(names[:4])}; write * for any part of a name"
            )
    return [name for name in names if any(fnmatchcase(name, p) for p in patterns)]

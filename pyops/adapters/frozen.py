"""freeze: parameters that are not trained."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

__all__ = ["freeze", "matching"]


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


def freeze(model: nn.Module, *, except_: Sequence[str] = ()) -> list[str]:
    """Let no parameter require a gradient but those that a pattern matches. Backward then ends at
    the first layer that has one of these, and optimizers hold states of these alone.

    Args:
        model: Any.
        except_: Patterns of the names of parameters that are trained, which then require a
            gradient: ["blocks.11.*", "head.*"].

    Returns:
        The names of those.

    Raises:
        ValueError: For a pattern that matches no parameter; nothing is changed then.
    """
    named = dict(model.named_parameters())
    trained = set(matching(list(named), except_, what="except_"))
    for name, parameter in named.items():
        parameter.requires_grad_(name in trained)
    return sorted(trained)

"""ConfigError, and the check that each section makes of its own fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["ConfigError", "require"]


class ConfigError(ValueError):
    """A configuration can't be used; the message names the key, its value and the fix."""


def require(config: Any, condition: str, fields: Sequence[str], holds: Any) -> None:
    """ValueError naming the first of the fields whose value `holds` is not true of, and the
    condition."""
    for name in fields:
        if not holds(getattr(config, name)):
            raise ValueError(f"{name} is {getattr(config, name)!r}; it must be {condition}")

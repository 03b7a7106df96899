"""What sizes of a model may be, how their numbers are written, and the file that has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["PlanError", "check_whole", "config_values", "count"]


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


def config_values(path: Path | str) -> tuple[dict[str, Any], str]:
    """The contents of a config.json of transformers, and what tables call the model.

    Args:
        path: Of the file, or of its folder.

    Raises:
        PlanError: There is no such file, or it is not JSON.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text())
    except OSError as error:
        raise PlanError(
            f"{file} can't be read: {error.strerror}; name a Hugging Face folder, a "
            "config.json, or a TOML file with [model]"
        ) from None
    except ValueError as error:
        raise PlanError(f"{file} is no JSON: {error}; fetch it again") from None
    if not isinstance(values, dict):
        raise PlanError(f"{file} holds no table of fields; fetch it again")
    return values, file.parent.name if path.is_dir() else path.stem

"""Arguments that are refused: keywords of earlier versions, and probabilities that are none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn

__all__ = ["check_probability", "refuse_keywords"]


def refuse_keywords(what: str, given: Mapping[str, Any], config: type) -> NoReturn:
    """Refuses keyword arguments that a layer or function does not have.

    Args:
        what: the layer or function, for the message.
        given: the keyword arguments that it was called with and does not have.
        config: the dataclass of its options.

    Raises:
        TypeError: always; where `config` has fields of these names, it says so.
    """
    known = {field.name for field in fields(config)}
    if moved := [name for name in given if name in known]:
        options = ", ".join(f"{name}={given[name]!r}" for name in moved)
        are = "is a field" if len(moved) == 1 else "are fields"
        raise TypeError(
            f"{what}: {', '.join(moved)} {are} of {config.__name__}; write "
            f"config={config.__name__}({options}), from pyops.tensor_parallel"
        )
    raise TypeError(
        f"{what} has no argument {', '.join(given)}; its options are those of "
        f"{config.__name__}: {', '.join(sorted(known))}"
    )


def check_probability(name: str, value: float) -> None:
    """ValueError unless the option is a probability less than 1."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} is {value}; it is a probability, 0 or more and less than 1")

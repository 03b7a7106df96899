"""freeze: parameters that are not trained."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from pyops.name_patterns import matching

__all__ = ["freeze"]


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

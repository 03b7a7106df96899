"""A teacher that stays as it is: no gradients, no dropout, no statistics that move."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

__all__ = ["check_teacher", "freeze"]

Model = TypeVar("Model", bound=nn.Module)


def freeze(teacher: Model) -> Model:
    """The teacher itself, in evaluation mode, of which no parameter requires gradients."""
    return teacher.eval().requires_grad_(False)


def check_teacher(teacher: nn.Module) -> None:
    """Raises ValueError for a teacher that learns, or whose dropout or batch norm is at work."""
    learns = [name for name, p in teacher.named_parameters() if p.requires_grad]
    if learns:
        raise ValueError(
            f"the teacher's parameter {learns[0]} requires gradients ({len(learns)} do); call "
            "freeze(teacher)"
        )
    training = [name for name, m in teacher.named_modules() if m.training]
    if training:
        raise ValueError(
            f"the teacher's module {training[0] or 'itself'} is in training mode; call "
            "freeze(teacher), and keep it out of the module whose train() you call"
        )

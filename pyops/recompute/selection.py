"""apply and remove: recomputation for every call of chosen modules, by their names, classes, or
themselves.

    apply(model, ["blocks.*"])             blocks.0, blocks.1, ...: each keeps its input alone
    apply(model, ["blocks.*.mlp"])         only the MLPs: most of the memory for some of the time
    apply(model, [Attention])              every module of a class

A module's `forward` is replaced on the instance: names, parameters, state_dict and hooks stay as
they are, and hooks run once.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import nn

from pyops.recompute.arena import Arena
from pyops.recompute.checkpointing import checkpoint
from pyops.recompute.inputs import keeping_of
from pyops.recompute.prefetch import Prefetch

__all__ = ["apply", "remove"]

Choice = str | type[nn.Module] | nn.Module


class Recomputed:
    """Stands in for a module's forward. replaced: `forward` was set on the instance before.

    Args:
        options: Of `checkpoint`.
    """

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        self.forward, self.replaced, self.options = (
            module.forward,
            "forward" in module.__dict__,
            options,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.forward, *args, **self.options, **kwargs)


def apply(
    model: nn.Module,
    modules: Choice | Iterable[Choice],
    *,
    partition_group: dist.ProcessGroup | None = None,
    offload: str | None = None,
    arena: Arena | None = None,
    prefetch: bool = True,
) -> list[str]:
    """Recompute every call of the chosen modules of `model`; returns their names.

    Args:
        modules: Names as in `model.named_modules()`, with shell wildcards ("blocks.*.mlp"; a
            wildcard stops at a dot); classes; modules of the model.
        partition_group, offload, arena: See `checkpoint`.
        prefetch: While backward is in one of them, the inputs of the one before it are fetched;
            False: each waits for its own.

    Raises:
        ValueError: Before anything is changed: a choice that no module answers to, a module that is
            chosen a second time.
    """
    keeping_of(partition_group, offload, arena, [])
    choices = [modules] if isinstance(modules, str | type | nn.Module) else list(modules)
    named = dict(model.named_modules())
    chosen: dict[str, nn.Module] = {}
    for choice in choices:
        found = {name: module for name, module in named.items() if _answers(choice, name, module)}
        if not found:
            some = [name for name in named if name][:20]
            raise ValueError(
                f"no module of the model is {choice!r}; there are {some} ...; name one, "
                "or a class, or a module"
            )
        chosen |= found
    again = [
        name
        for name, module in chosen.items()
        if isinstance(module.__dict__.get("forward"), Recomputed)
    ]
    if again:
        raise ValueError(
            f"these modules are recomputed already: {again}; call recompute.remove(model) first"
        )
    options: dict[str, Any] = {
        "partition_group": partition_group,
        "offload": offload,
        "arena": arena,
    }
    if prefetch:
        options["prefetch"] = Prefetch()
    for module in chosen.values():
        module.forward = Recomputed(module, options)
    return list(chosen)


def remove(model: nn.Module) -> list[str]:
    """Undo `apply` for every module of `model`; returns their names."""
    names = []
    for name, module in model.named_modules():
        stand_in = module.__dict__.get("forward")
        if isinstance(stand_in, Recomputed):
            if stand_in.replaced:
                module.forward = stand_in.forward
            else:
                del module.forward
            names.append(name)
    return names


def _answers(choice: Choice, name: str, module: nn.Module) -> bool:
    if isinstance(choice, nn.Module):
        return choice is module
    if isinstance(choice, type):
        return isinstance(module, choice)
    wanted, has = choice.split("."), name.split(".")
    return len(wanted) == len(has) and all(
        fnmatchcase(part, pattern) for part, pattern in zip(has, wanted, strict=True)
    )

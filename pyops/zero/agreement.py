"""What the ranks must have in common before their collectives can match: the model and the
options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.agreement import agree, gather

__all__ = ["agreed", "check_same_model", "check_same_options"]

T = TypeVar("T")


def agreed(make: Callable[[], T], *, group: dist.ProcessGroup | None) -> T:
    """What `make` gives on this rank. A collective: what it raises on any rank, reading a
    checkpoint, say, is raised on all."""
    error: Exception | None = None
    found: list[T] = []
    try:
        found.append(make())
    except Exception as caught:
        error = caught
    agree(error, group=group)
    return found[0]


def check_same_model(model: nn.Module, *, group: dist.ProcessGroup | None) -> None:
    """ValueError, on every rank, unless names, shapes, dtypes and requires_grad are those of rank
    0's model."""
    mine = [
        (
            name,
            tuple(t.shape),
            str(t.dtype).removeprefix("torch."),
            "trained" if t.requires_grad else "fixed",
        )
        for name, t in [*model.named_parameters(), *model.named_buffers()]
    ]
    everyone = gather(mine, group=group)
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        pairs = zip(everyone[0], theirs, strict=False)
        found = next(
            (f"rank 0 has {a} where rank {rank} has {b}" for a, b in pairs if a != b), None
        )
        found = (
            found
            or f"rank 0 has {len(everyone[0])} parameters and buffers, rank {rank} has "
            f"{len(theirs)}"
        )
        raise ValueError(
            f"ZeroOptimizer: the ranks' models differ: {found}; build the same model on every rank"
        )


def _plain(value: Any) -> Any:
    """An option as ranks compare it: a tensor is what it holds, wherever it lies."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def check_same_options(options: Mapping[str, Any], *, group: dist.ProcessGroup | None) -> None:
    """ValueError, on every rank, naming the first option in which a rank differs from rank 0."""
    mine = {key: repr(_plain(value)) for key, value in options.items()}
    everyone = gather(mine, group=group)
    for rank, theirs in enumerate(everyone):
        for key in sorted(set(everyone[0]) | set(theirs)):
            if everyone[0].get(key) != theirs.get(key):
                raise ValueError(
                    f"ZeroOptimizer: {key} is {everyone[0].get(key)} on rank 0, "
                    f"{theirs.get(key)} on rank {rank}; pass the "
                    "same on every rank"
                )

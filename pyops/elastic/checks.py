"""What must hold of an elastic run before it begins."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

__all__ = ["check_run"]

SCHEDULES = ("1f1b", "gpipe")


def check_run(
    layers: Mapping[str, nn.Module], *, ranks: int, stages: int, batch: int, every: int, schedule: str
) -> None:  # fmt: skip
    """ValueError for numbers that don't fit each other, and for a parameter of two layers."""
    if len(layers) < 3:
        raise ValueError(f"there are {len(layers)} layers; give an embedding, blocks, and a head: 3 or more")
    if stages < 1 or ranks % stages:
        raise ValueError(f"stages is {stages}, of which {ranks} ranks are no multiple; start a multiple, or take a divisor")
    if stages > len(layers):
        raise ValueError(f"stages is {stages}, but there are {len(layers)} layers; take {len(layers)} or fewer")
    if every < 0:
        raise ValueError(f"every is {every}; it must be 0, for a decision at the end of each epoch, or a number of steps")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; it must be 1f1b or gpipe, which go with any number of stages")
    if batch < ranks // stages:
        raise ValueError(f"batch is {batch}, fewer than the {ranks // stages} replicas; take {ranks // stages} or more")
    owner: dict[int, str] = {}
    for name, layer in layers.items():
        for own, parameter in layer.named_parameters():
            if (first := owner.setdefault(id(parameter), name)) != name:
                raise ValueError(
                    f"{name}.{own} is a parameter of {first} too, which may be frozen before it; give each its own"
                )

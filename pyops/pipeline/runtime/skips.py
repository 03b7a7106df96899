"""Skip connections: values that a layer puts away under a name, and a later layer takes; on
whatever stages they are.

layers    down --- down --- middle --- up --- up    skip(down, stash="a")     returns (y, a)
           | a      | b                | b    | a   skip(up, pop="a")         is called with (x, a)
stages   0 |    1   '--------------> 2 '    3 '
           '--------------------------------'       from rank to rank directly, not through those
                                                    between; the gradient comes back the same way
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import nn

__all__ = [
    "SkipEdges",
    "SkipTensors",
    "StageSkips",
    "skip",
    "skip_edges",
    "skip_pairs",
    "stage_skips",
]

SkipEdges = Mapping[
    tuple[int, int], tuple[str, ...]
]  # (stage, later stage): the names of what goes from one to the other
M = TypeVar("M", bound=nn.Module)


class SkipTensors(NamedTuple):
    """What a stage is given or gives where some of it skips stages: the value of the neighbour, and
    a dict for each edge."""

    value: Any
    skipped: tuple[dict[str, Any], ...]


class StageSkips(NamedTuple):
    """Of one stage.

    Attributes:
        stashes, pops: Of each layer.
        leaving: For each edge to a later stage, what goes along it.
    """

    stashes: Sequence[tuple[str, ...]]
    pops: Sequence[tuple[str, ...]]
    leaving: Sequence[tuple[str, ...]]


def skip(module: M, *, stash: str | Sequence[str] = (), pop: str | Sequence[str] = ()) -> M:
    """`module`, marked as a layer of a Pipeline that puts values away, or takes what earlier layers
    put away.

    Args:
        stash: Names; the module returns its result, and the values after it: (y, a, b).
        pop: Names; the module is called with the values after its other arguments: module(x, a, b).
            Values may be what stages send each other, None too. Each name is stashed by one layer
            and popped by one after it, which is checked when the Pipeline is made. The module is
            changed in nothing else.
    """
    stashes, pops = ((names,) if isinstance(names, str) else tuple(names) for names in (stash, pop))
    module.stashes, module.pops = stashes, pops  # type: ignore[assignment]
    return module


def skip_pairs(layers: Sequence[nn.Module]) -> dict[str, tuple[int, int]]:
    """{name: (the layer that stashes it, the layer that pops it)}, such as for `balance(costs,
    together=pairs.values())`.

    Raises:
        ValueError: For a name that is stashed or popped twice, or never, or popped before it is
            stashed.
    """
    stashed, popped = _places(layers, "stashes"), _places(layers, "pops")
    for name, layer in popped.items():
        if name not in stashed:
            raise ValueError(
                f"layer {layer} pops {name!r}, which no layer stashes; mark one with "
                f"skip(layer, stash={name!r})"
            )
    for name, layer in stashed.items():
        if name not in popped:
            raise ValueError(
                f"layer {layer} stashes {name!r}, which no layer pops; mark one with "
                f"skip(layer, pop={name!r})"
            )
        if popped[name] <= layer:
            raise ValueError(
                f"layer {popped[name]} pops {name!r} before layer {layer} stashes it; "
                "pop it in a later layer"
            )
    return {name: (layer, popped[name]) for name, layer in stashed.items()}


def skip_edges(
    pairs: Mapping[str, tuple[int, int]], boundaries: Sequence[int]
) -> dict[tuple[int, int], tuple[str, ...]]:
    """{(stage, later stage): the names that go from one to the other}, in rising order, for what
    does not stay in a stage."""
    stage_of = [
        stage for stage, (a, b) in enumerate(itertools.pairwise(boundaries)) for _ in range(a, b)
    ]
    found: dict[tuple[int, int], tuple[str, ...]] = {}
    for name, (source, target) in pairs.items():
        edge = stage_of[source], stage_of[target]
        if edge[0] != edge[1]:
            found[edge] = (*found.get(edge, ()), name)
    return dict(sorted(found.items()))


def stage_skips(layers: Sequence[nn.Module], stage: int, edges: SkipEdges) -> StageSkips | None:
    """Of the stage with these layers; None where nothing is stashed or popped."""
    stashes, pops = (
        [tuple(getattr(layer, what, ())) for layer in layers] for what in ("stashes", "pops")
    )
    if not any(stashes) and not any(pops):
        return None
    return StageSkips(
        stashes, pops, [names for (source, _), names in edges.items() if source == stage]
    )


def _places(layers: Sequence[nn.Module], what: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for i, layer in enumerate(layers):
        for name in getattr(layer, what, ()):
            if name in found:
                raise ValueError(
                    f"layers {found[name]} and {i} both have {name!r} among their "
                    f"{what}; a name is stashed once and popped "
                    "once, so give each its own"
                )
            found[name] = i
    return found

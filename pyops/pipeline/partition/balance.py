"""Which layers go to which stage: the exact partition whose costliest stage is as cheap as can be.

    costs    4  1  1  6 | 5  5  2 | 9  3        3 stages: 12, 12, 12

Heuristics that even out variances can be off by a factor of two; the optimum by dynamic programming
takes O(L^2 K) additions for L layers. Among partitions with the cheapest costliest stage, that with
the least sum of squares is taken: the evenest.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from pyops.pipeline.partition.layer_costs import Profile, layer_costs

__all__ = ["balance", "stage_starts"]


def balance(
    costs: Sequence[float] | Profile | Sequence[nn.Module],
    *,
    num_stages: int,
    by: str | Callable[..., float] | None = None,
    together: Iterable[tuple[int, int]] = (),
    same_stage: Iterable[Sequence[int]] = (),
    in_flight: Sequence[float] | None = None,
    most_bytes: float | None = None,
) -> list[int]:
    """The stages' first layers and, last, the number of layers: stage s holds layers [b[s], b[s +
    1]), never none.

    Args:
        costs: Of each layer, in any unit: 0 or more; or a Profile of the layers, or these
            themselves.
        by: What of a Profile or of layers counts: "time" (forward and backward; a Profile's
            default), "parameters" (the layers' default), "memory", or a function of a layer's
            LayerCosts, or of the layer.
        together: Pairs (first, last) of layers that must be on one stage, with all between them,
            such as the two ends of a skip connection that shall not travel.
        same_stage: Groups of layers that must be on one stage, such as those that share a weight.
        in_flight: Of a Profile, for each stage how many micro-batches' activations it keeps, as
            schedule.peak(rank) says (default: 1 each); counts with by="memory" and for most_bytes.
        most_bytes: No stage may keep more, weights, gradients and Adam's moments included.

    Raises:
        ValueError: For fewer layers, or fewer places where a stage may begin, than stages; or if
            nothing fits in most_bytes.
    """
    weights = layer_costs(costs, by)
    for i, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"the cost of layer {i} is {weight}; it must be a number, 0 or more")
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
        raise ValueError(f"num_stages is {num_stages!r}; it must be a whole number, 1 or more")
    begins = stage_starts(len(weights), together=together, same_stage=same_stage)
    if len(begins) < num_stages:
        layers = len(weights)
        tied = (
            f", {layers - len(begins)} of which must stay with the one before"
            if len(begins) < layers
            else ""
        )
        raise ValueError(
            f"{layers} layers{tied} can't fill {num_stages} stages; take {len(begins)} "
            "stages or fewer"
        )
    edges = [*begins, len(weights)]
    upto = [0.0]
    for first, end in itertools.pairwise(edges):
        upto.append(upto[-1] + math.fsum(weights[first:end]))
    if by != "memory" and most_bytes is None:
        if in_flight is not None:
            raise ValueError(
                'in_flight says what stages keep; it goes with by="memory" or most_bytes'
            )
        return _cheapest(edges, num_stages, lambda stage, begin, end: upto[end] - upto[begin])
    bytes_of = _memory(costs, edges, num_stages, in_flight)

    def cost(stage: int, begin: int, end: int) -> float:
        kept = bytes_of(stage, begin, end)
        if most_bytes is not None and kept > most_bytes:
            return math.inf
        return kept if by == "memory" else upto[end] - upto[begin]

    return _cheapest(edges, num_stages, cost)


def stage_starts(
    layers: int,
    *,
    together: Iterable[tuple[int, int]] = (),
    same_stage: Iterable[Sequence[int]] = (),
) -> list[int]:
    """The layers with which a stage may begin.

    Raises:
        ValueError: For layers that there are not.
    """
    spans = [(min(group), max(group)) for group in [*together, *same_stage] if len(group)]
    for low, high in spans:
        if not 0 <= low <= high < layers:
            raise ValueError(
                f"layers {low} and {high} shall be on one stage, but there are layers 0 "
                f"to {layers - 1}"
            )
    return [i for i in range(layers) if not any(low < i <= high for low, high in spans)]


def _memory(
    costs: object, edges: Sequence[int], num_stages: int, in_flight: Sequence[float] | None
) -> Callable[[int, int, int], float]:
    """bytes(stage, begin, end) of blocks, each looked up once."""
    if not isinstance(costs, Profile):
        raise ValueError(
            "what a stage keeps is known of a Profile alone; give "
            "balance(profile(layers, inputs), ...)"
        )
    if in_flight is not None and len(in_flight) != num_stages:
        raise ValueError(
            f"in_flight has {len(in_flight)} numbers, but there are {num_stages} stages; "
            "give one for each"
        )
    blocks = range(len(edges))
    kept = {(a, b): costs.kept(edges[a], edges[b]) for b in blocks for a in range(b)}
    weights = {(a, b): costs.weights(edges[a], edges[b]) for b in blocks for a in range(b)}
    return lambda stage, a, b: (
        weights[a, b] + (1.0 if in_flight is None else in_flight[stage]) * kept[a, b]
    )


def _cheapest(
    edges: Sequence[int], num_stages: int, cost_of: Callable[[int, int, int], float]
) -> list[int]:
    """Over the blocks [edges[i], edges[i + 1]), which nothing cuts. cost_of(stage, first block,
    last block + 1)."""
    least, _ = _least(edges, num_stages, cost_of, max)
    if math.isinf(least):
        raise ValueError(
            "no partition keeps every stage within most_bytes; take more stages, fewer "
            "in flight, or recompute"
        )

    def square(stage: int, begin: int, end: int) -> float:
        cost = cost_of(stage, begin, end)
        return cost * cost if cost <= least else math.inf

    return _least(edges, num_stages, square, operator.add)[1]


def _least(
    edges: Sequence[int],
    num_stages: int,
    cost_of: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The least cost of all stages joined, and the partition that has it."""
    blocks = len(edges) - 1
    # best[n]: (cost, where the last stage begins) of the first n blocks on the stages so far
    best: list[tuple[float, int]] = [(0.0, 0)] + [(math.inf, 0)] * blocks
    table = []
    for stage in range(num_stages):
        following = [(math.inf, stage)] * (blocks + 1)
        for n in range(stage + 1, blocks - (num_stages - stage - 1) + 1):
            following[n] = min(
                (join(best[begin][0], cost_of(stage, begin, n)), begin) for begin in range(stage, n)
            )
        table.append(following)
        best = following
    found, n = [edges[-1]], blocks
    for following in reversed(table):
        n = following[n][1]
        found.append(edges[n])
    return best[blocks][0], found[::-1]

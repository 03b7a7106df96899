"""Which layers go to which stage: the exact partition whose costliest stage is as cheap as can be.

    costs    4  1  1  6 | 5  5  2 | 9  3        3 stages: 12, 12, 12

Heuristics that even out variances can be off by a factor of two; the optimum by dynamic programming takes O(L^2 K) additions
for L layers. Among partitions with the cheapest costliest stage, that with the least sum of squares is taken: the evenest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

__all__ = ["balance"]


def balance(
    costs: Sequence[float],
    *,
    num_stages: int,
    together: Iterable[tuple[int, int]] = (),
    same_stage: Iterable[Sequence[int]] = (),
) -> list[int]:
    """The stages' first layers and, last, the number of layers: stage s holds layers [b[s], b[s + 1]), never none.

    costs: of each layer, in any unit (measured seconds, parameters, bytes): 0 or more. together: pairs (first, last) of layers
    that must be on one stage, with all between them, such as the two ends of a skip connection that shall not travel.
    same_stage: groups of layers that must be on one stage, such as those that share a weight.

    ValueError for fewer layers, or fewer places where a stage may begin, than stages.
    """
    layers = len(costs)
    for i, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"the cost of layer {i} is {cost}; it must be a number, 0 or more")
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
        raise ValueError(f"num_stages is {num_stages!r}; it must be a whole number, 1 or more")
    spans = [(min(group), max(group)) for group in [*together, *same_stage] if len(group)]
    for low, high in spans:
        if not 0 <= low <= high < layers:
            raise ValueError(f"layers {low} and {high} shall be on one stage, but there are layers 0 to {layers - 1}")
    begins = [i for i in range(layers) if not any(low < i <= high for low, high in spans)]
    if len(begins) < num_stages:
        tied = f", {layers - len(begins)} of which must stay with the one before" if len(begins) < layers else ""
        raise ValueError(f"{layers} layers{tied} can't fill {num_stages} stages; take {len(begins)} stages or fewer")
    return _cheapest(costs, begins, num_stages)


def _cheapest(costs: Sequence[float], begins: Sequence[int], num_stages: int) -> list[int]:
    """Over the blocks [begins[i], begins[i + 1]), which nothing cuts."""
    edges = [*begins, len(costs)]
    upto = [0.0]
    for i in range(len(begins)):
        upto.append(upto[-1] + math.fsum(costs[edges[i] : edges[i + 1]]))
    blocks = len(begins)
    # best[n]: (costliest stage, sum of squares, where the last stage begins) of the first n blocks on the stages so far
    best: list[tuple[float, float, int]] = [(0.0, 0.0, 0)] + [(math.inf, math.inf, 0)] * blocks
    table = []
    for stage in range(num_stages):
        following = [(math.inf, math.inf, 0)] * (blocks + 1)
        for n in range(stage + 1, blocks - (num_stages - stage - 1) + 1):
            for begin in range(stage, n):
                cost = upto[n] - upto[begin]
                before = best[begin]
                candidate = (max(before[0], cost), before[1] + cost * cost, begin)
                if candidate[:2] < following[n][:2]:
                    following[n] = candidate
        table.append(following)
        best = following
    found, n = [len(costs)], blocks
    for following in reversed(table):
        n = following[n][2]
        found.append(edges[n])
    return found[::-1]

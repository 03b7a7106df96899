"""plan_pipedream: stages and their replicas for a pipeline that never flushes: the slowest stage or
link sets the pace.

    level 1: devices of a machine   A_1(i, j, m): seconds a mini-batch of layers i .. j - 1 on m
                                    devices
    level 2: machines               A_2(i, j, m): on m machines, each working as A_1(i, j, all its
                                    devices) says

    A_k(i, j, m) = the least of
        T_k(i, j, m)                                      one stage, m replicas
        max(A_k(i, s, m - n), 2 a_s / B_k, T_k(s, j, n))  for i < s < j, 0 < n < m: a last stage of
                                                          n replicas
    T_k(i, j, m) = max(A_{k-1}(i, j, all), 2 (m - 1) / m w / B_k) / m
    A_0(i, j) = forward and backward of one device

w: bytes of the layers' weights; a_s: bytes that layer s - 1 sends to s, which come back as a
gradient; B_k: bytes a second. m replicas take m mini-batches in turn and reduce their gradients
once meanwhile, during compute. Start and end of the run, and what weights' versions take, are left
out of the time.

Source: PipeDream, Narayanan et al., SOSP 2019, section 3.1: the hierarchical search. The authors'
program adds the time of the reduction where this takes the larger, and leaves transfers between
stages out unless told otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache

from pyops.pipeline.partition.balance import stage_starts
from pyops.pipeline.partition.layer_costs import Profile
from pyops.pipeline.partition.pipeline_plan import (
    Levels,
    PipelinePlan,
    PlannedStage,
    check_levels,
    ring,
)

__all__ = ["plan_pipedream"]

Found = tuple[
    float, tuple[tuple[int, int, int], ...]
]  # seconds, (first, end, replicas at this level) of each stage


def plan_pipedream(
    profile: Profile,
    *,
    levels: Levels,
    together: Iterable[tuple[int, int]] = (),
    same_stage: Iterable[Sequence[int]] = (),
) -> PipelinePlan:
    """The plan of least time a mini-batch over all devices of `levels`, by the model above.

    ValueError: no layers, levels that are none.

    Args:
        levels: (parts, bytes a second between them) from the innermost, such as [(8, 3e11), (2,
            1e10)].
        together, same_stage: As in `balance`. Every device is used. Takes O(L^3 m^2) for a level of
            m parts, with L places where a stage may begin.
    """
    check_levels(levels)
    begins = stage_starts(len(profile), together=together, same_stage=same_stage)
    if not begins:
        raise ValueError("the profile has no layers")
    edges = [*begins, len(profile)]
    search = _Search(profile, edges, levels)
    top = len(levels)
    seconds, _ = search.best(top, 0, len(begins), levels[-1][0])
    stages = [
        PlannedStage(edges[a], edges[b], n)
        for a, b, n in search.flat(top, 0, len(begins), levels[-1][0])
    ]
    return PipelinePlan(tuple(stages), seconds)


class _Search:
    """The tables, filled as they are asked for. A stage [a, b) holds layers edges[a] .. edges[b] -
    1."""

    def __init__(self, profile: Profile, edges: Sequence[int], levels: Levels) -> None:
        self.levels = levels
        layers = profile.layers
        blocks = range(len(edges))
        self.compute = {
            (a, b): math.fsum(layer.time for layer in layers[edges[a] : edges[b]])
            for b in blocks
            for a in range(b)
        }
        self.weights = {
            (a, b): _weight_bytes(profile, edges[a], edges[b]) for b in blocks for a in range(b)
        }
        self.sent = [0 if edge == 0 else layers[edge - 1].activation for edge in edges]
        self.best = cache(self._best)

    def one_stage(self, level: int, a: int, b: int, m: int) -> float:
        """T_k."""
        inner = (
            self.compute[a, b]
            if level == 1
            else self.best(level - 1, a, b, self.levels[level - 2][0])[0]
        )
        return max(inner, ring(self.weights[a, b], m, self.levels[level - 1][1])) / m

    def _best(self, level: int, a: int, b: int, m: int) -> Found:
        """A_k, and the stages that give it."""
        found: Found = (self.one_stage(level, a, b, m), ((a, b, m),))
        for cut in range(a + 1, b):
            link = 2.0 * self.sent[cut] / self.levels[level - 1][1]
            for n in range(1, m):
                last = max(link, self.one_stage(level, cut, b, n))
                if last >= found[0]:
                    continue
                before, stages = self.best(level, a, cut, m - n)
                if max(before, last) < found[0]:
                    found = (max(before, last), (*stages, (cut, b, n)))
        return found

    def flat(self, level: int, a: int, b: int, m: int) -> list[tuple[int, int, int]]:
        """The stages of all levels; those within one that is replicated at a higher level have as
        many times more replicas."""
        stages = self.best(level, a, b, m)[1]
        if level == 1:
            return list(stages)
        inner = self.levels[level - 2][0]
        return [
            (c, d, k * n)
            for first, end, n in stages
            for c, d, k in self.flat(level - 1, first, end, inner)
        ]


def _weight_bytes(profile: Profile, first: int, end: int) -> int:
    return sum(dict(pair for layer in profile.layers[first:end] for pair in layer.weights).values())

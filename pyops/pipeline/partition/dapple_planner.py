"""plan_dapple: stages, their replicas and their devices for a pipeline that flushes: the least time
of a whole step.

    F0 F0 F0 F0 . . B0 . B0 . B0 . B0 | reduce 0   the longest of all ways through a pivot Q: its
                                                   stage works without a
       F1 F1 F1 F1 B1 . B1 .  B1 . B1 | reduce 1   pause from its first forward to its last backward

    step = max over Q of   warm-up F_0 + ... + F_Q, steady (M - 1) (F_Q + B_Q), end: max over s of
                           E(s, Q)
    E(s, Q) = B_Q + B_{Q-1} + ... + B_s + R_s for s <= Q;   R_s - (B_{Q+1} + ... + B_{s-1}) for s >
                                                            Q

F_s, B_s: of a micro-batch, shared out over the stage's replicas; R_s: the all-reduce of its
gradients. Between two stages is a link, whose F and B are a transfer each; it works in both
directions at a time, so as a pivot it takes one of them, not the sum.

Stages are placed from the last to the first, each on free devices by one of three policies: "fresh"
machines with nothing on them first, "append" to those that have something, "scatter" over all.

Source: DAPPLE, Fan et al., PPoPP 2021, section 4: warm-up, steady and ending phases, pivot,
placement policies. The program its authors published takes the stages whose slowest is fastest and
then rates them; here the step's time itself is minimised: for stages s .. S - 1 it depends on those
before through three numbers that never get better, so those that no other beats are kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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

__all__ = ["PLACEMENTS", "plan_dapple", "take"]

PLACEMENTS = ("fresh", "append", "scatter")
Devices = tuple[int, ...]  # how many of each machine


@dataclass(frozen=True)
class _Tail:
    """Stages from some layer to the last: step, the longest way that ends there; back, the longest
    that comes back to the first of them, ready for its gradient to travel on; early, the reduction
    that ends last after the first one's last backward."""

    step: float
    back: float
    early: float
    first: int
    group: Devices
    next: _Tail | None

    def beats(self, other: _Tail) -> bool:
        return self.step <= other.step and self.back <= other.back and self.early <= other.early


def plan_dapple(
    profile: Profile,
    *,
    levels: Levels,
    num_microbatches: int,
    placements: Sequence[str] = PLACEMENTS,
    together: Iterable[tuple[int, int]] = (),
    same_stage: Iterable[Sequence[int]] = (),
    most_bytes: float | None = None,
) -> PipelinePlan:
    """The plan of least time for a step of num_microbatches micro-batches, by the model above; it
    may leave devices idle.

    Meant for up to about 16 devices and 30 places where a stage may begin: the search grows with
    both.
    ValueError: levels or placements that are none, or if nothing fits in most_bytes.

    Args:
        levels: [(devices of a machine, bytes a second between them), (machines, bytes a second
            between them)], or only the first.
        placements: Of PLACEMENTS.
        together, same_stage: As in `balance`.
        most_bytes: No device may keep more, weights, gradients, Adam's moments, and its share of
            the micro-batches' activations that 1f1b has in flight there.
    """
    check_levels(levels, most=2)
    strange = [each for each in placements if each not in PLACEMENTS]
    if strange or not placements:
        raise ValueError(f"placements is {placements!r}; choose some of {', '.join(PLACEMENTS)}")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches is {num_microbatches}; it must be 1 or more")
    begins = stage_starts(len(profile), together=together, same_stage=same_stage)
    if not begins:
        raise ValueError("the profile has no layers")
    search = _Search(
        profile, [*begins, len(profile)], levels, num_microbatches, placements, most_bytes
    )
    best = search.run()
    if best is None:
        raise ValueError(
            "no plan keeps every device within most_bytes; take more devices or smaller "
            "micro-batches"
        )
    stages = []
    tail: _Tail | None = best
    while tail is not None:
        end = tail.next.first if tail.next else len(profile)
        on = tuple((machine, count) for machine, count in enumerate(tail.group) if count)
        stages.append(PlannedStage(tail.first, end, sum(tail.group), on))
        tail = tail.next
    return PipelinePlan(tuple(stages), best.step)


def take(free: Devices, count: int, policy: str) -> Devices:
    """`count` of the `free` devices by a policy of PLACEMENTS, both as how many of each machine,
    which are alike."""
    taken = [0] * len(free)
    if policy == "scatter":
        for _ in range(count):
            machine = max(range(len(free)), key=lambda i: (free[i] - taken[i], -i))
            taken[machine] += 1
        return tuple(taken)
    sign = -1 if policy == "fresh" else 1
    for machine in sorted(
        range(len(free)), key=lambda i: (sign * free[i], i) if free[i] else (math.inf, i)
    ):
        taken[machine] = min(free[machine], count - sum(taken))
    return tuple(taken)


class _Search:
    def __init__(
        self,
        profile: Profile,
        edges: Sequence[int],
        levels: Levels,
        microbatches: int,
        placements: Sequence[str],
        most_bytes: float | None,
    ) -> None:
        self.profile, self.edges, self.microbatches, self.most_bytes = (
            profile,
            edges,
            microbatches,
            most_bytes,
        )
        self.placements = placements
        self.size, self.inside = levels[0]
        self.machines, self.between = levels[1] if len(levels) > 1 else (1, levels[0][1])
        self.forward, self.backward = [0.0], [0.0]  # of all layers before an edge
        for a, b in itertools.pairwise(edges):
            self.forward.append(
                self.forward[-1] + math.fsum(layer.forward for layer in profile.layers[a:b])
            )
            self.backward.append(
                self.backward[-1] + math.fsum(layer.backward for layer in profile.layers[a:b])
            )
        self.reduced = cache(self._reduced)
        self.bytes_of = cache(self._bytes_of)
        self.best: _Tail | None = None

    def run(self) -> _Tail | None:
        """The best first stage."""
        free = (self.size,) * self.machines
        blocks = len(self.edges) - 1
        # tails[b][(free devices, group of the first stage, stages)]: those that begin at edge b and
        # that no other beats
        tails: list[dict[tuple[Devices, Devices, int], list[_Tail]]] = [
            {} for _ in range(blocks + 1)
        ]
        for a, group in self.choices(blocks, free):
            self.extend(tails, None, a=a, b=blocks, group=group, left=free, depth=0)
        for b in range(blocks - 1, 0, -1):
            for (left, _, depth), several in tails[b].items():
                for following in several:
                    if not self.hopeless(following, b, sum(left)):
                        for a, group in self.choices(b, left):
                            self.extend(
                                tails, following, a=a, b=b, group=group, left=left, depth=depth
                            )
        return self.best

    def choices(self, b: int, left: Devices) -> Iterator[tuple[int, Devices]]:
        """(first edge, devices) of a stage that ends at edge b."""
        for count in range(1, sum(left) + 1):
            for group in dict.fromkeys(take(left, count, policy) for policy in self.placements):
                for a in range(b):
                    if a == 0 or count < sum(left):
                        yield a, group

    def hopeless(self, tail: _Tail, b: int, left: int) -> bool:
        """Whether no stages before could make it better than the best: all of the layers before on
        all free devices."""
        if self.best is None:
            return False
        if not left:
            return True
        ahead = (self.forward[b] + self.backward[b]) / left  # of the slowest stage before, at least
        least = max(tail.step, self.microbatches * ahead, tail.back + ahead)
        return least >= self.best.step

    def extend(
        self,
        tails: list[dict[tuple[Devices, Devices, int], list[_Tail]]],
        following: _Tail | None,
        *,
        a: int,
        b: int,
        group: Devices,
        left: Devices,
        depth: int,
    ) -> None:
        """Put layers [a, b) on `group` before `following`, if that may be best."""
        if self.most_bytes is not None and self.bytes_of(a, b, sum(group), depth) > self.most_bytes:
            return
        behind = None if following is None else self.link(b, group, following)
        count = sum(group)
        forward, backward = (
            (self.forward[b] - self.forward[a]) / count,
            (self.backward[b] - self.backward[a]) / count,
        )
        made = self.before(
            behind,
            forward,
            backward,
            forward + backward,
            self.reduced(a, b, group),
            self.edges[a],
            group,
            following,
        )
        if self.best is not None and made.step >= self.best.step:
            return
        if a == 0:
            self.best = made
            return
        rest = tuple(x - y for x, y in zip(left, group, strict=True))
        several = tails[a].setdefault(
            (rest, group, depth + 1 if self.most_bytes is not None else 0), []
        )
        if not any(other.beats(made) for other in several):
            several[:] = [other for other in several if not made.beats(other)]
            several.append(made)

    def link(self, b: int, group: Devices, following: _Tail) -> _Tail:
        """The tail with the way to it in front."""
        size = self.profile.layers[self.edges[b] - 1].activation
        together = sum(1 for x, y in zip(group, following.group, strict=True) if x or y) == 1
        seconds = (
            size / (self.inside * min(sum(group), sum(following.group)))
            if together
            else size / self.between
        )
        return self.before(
            following, seconds, seconds, seconds, 0.0, following.first, following.group, following
        )

    def before(
        self,
        tail: _Tail | None,
        forward: float,
        backward: float,
        both: float,
        reduction: float,
        first: int,
        group: Devices,
        following: _Tail | None,
    ) -> _Tail:
        """A stage, or a link, in front of a tail.

        Args:
            both: How long its steady state takes for a micro-batch.
        """
        steady = forward + (self.microbatches - 1) * both
        back = steady + backward  # it is the pivot itself
        step = max(back + reduction, steady + (tail.early if tail else 0.0))
        if tail is not None:
            back = max(back, forward + tail.back + backward)
            step = max(step, forward + tail.step, forward + tail.back + backward + reduction)
        early = max(reduction, tail.early - backward) if tail else reduction
        return _Tail(step, back, early, first, group, following)

    def _reduced(self, a: int, b: int, group: Devices) -> float:
        """Seconds of the all-reduce of a stage's gradients: a ring over its devices, as fast as its
        slowest link."""
        several = self.profile.layers[self.edges[a] : self.edges[b]]
        size = sum(dict(pair for layer in several for pair in layer.weights).values())
        return ring(size, sum(group), self.inside if sum(map(bool, group)) == 1 else self.between)

    def _bytes_of(self, a: int, b: int, count: int, depth: int) -> float:
        """What a device keeps of layers [a, b), `depth` stages behind them."""
        first, end = self.edges[a], self.edges[b]
        in_flight = min(self.microbatches, depth + 1)
        return self.profile.weights(first, end) + in_flight * self.profile.kept(first, end) / count

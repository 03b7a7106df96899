"""Both planners find what trying every plan finds, under time models written down a second time."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator

import pytest

from pyops.pipeline import (
    Costs,
    LayerCosts,
    PipelinePlan,
    Profile,
    plan_dapple,
    plan_pipedream,
    schedule,
    simulate,
)
from pyops.pipeline.partition.dapple_planner import PLACEMENTS, take

pytestmark = pytest.mark.cpu_only


def a_profile(
    draw: random.Random, layers: int, *, weights: float = 40.0, activations: float = 10.0
) -> Profile:
    """Layers of any times, some of them with many weights, some that send much."""
    made = []
    for i in range(layers):
        forward = draw.choice([1.0, draw.random(), draw.lognormvariate(0, 1)])
        size = int(draw.choice([0, 1, draw.random()]) * weights)
        made.append(
            LayerCosts(
                forward=forward,
                backward=forward * draw.choice([1, 2, 2.5]),
                weights=((i, size),),
                activation=int(draw.random() * activations),
            )
        )
    return Profile(tuple(made))


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    for bars in itertools.product([False, True], repeat=total - 1):
        cuts = [0, *(i + 1 for i, bar in enumerate(bars) if bar), total]
        yield tuple(b - a for a, b in itertools.pairwise(cuts))


# --------------------------------------------------------------------------------------------------
# PipeDream


def pace(profile: Profile, levels: list[tuple[int, float]], first: int, end: int) -> float:
    """The least time a mini-batch of layers [first, end) on all devices of the levels, every plan
    tried."""
    if not levels:
        return sum(layer.forward + layer.backward for layer in profile.layers[first:end])
    *inner, (parts, bandwidth) = levels
    best = float("inf")
    for counts in compositions(parts):
        for sizes in compositions(end - first):
            if len(sizes) != len(counts):
                continue
            slowest, at = 0.0, first
            for size, count in zip(sizes, counts, strict=True):
                weights = sum(
                    pair[1] for layer in profile.layers[at : at + size] for pair in layer.weights
                )
                reduction = 2 * (count - 1) * weights / count / bandwidth
                slowest = max(slowest, max(pace(profile, inner, at, at + size), reduction) / count)
                if at > first:
                    slowest = max(slowest, 2 * profile.layers[at - 1].activation / bandwidth)
                at += size
            best = min(best, slowest)
    return best


@pytest.mark.parametrize(
    "levels",
    [[(1, 1.0)], [(4, 20.0)], [(2, 30.0), (2, 3.0)], [(3, 30.0), (2, 5.0)], [(2, 9.0)] * 3],
)
def test_pipedream_equals_brute_force(levels: list[tuple[int, float]]):
    draw = random.Random(len(levels))
    replicated = split = 0
    for _ in range(12):
        found = a_profile(draw, draw.randint(1, 5))
        plan = plan_pipedream(found, levels=levels)
        assert plan.time == pytest.approx(pace(found, levels, 0, len(found)), rel=1e-12)
        assert plan.boundaries[0] == 0
        assert plan.boundaries[-1] == len(found)
        assert sum(plan.replicas) == functools.reduce(lambda n, level: n * level[0], levels, 1)
        replicated += max(plan.replicas) > 1
        split += len(plan.stages) > 1
    assert levels[0][0] == 1 or (replicated and split)  # plans of both sorts were compared


def test_pipedream_replicates_what_computes_and_not_what_weighs():
    """As in convolutional networks: much compute with few weights first, most weights in layers
    that take little time."""
    layers = [LayerCosts(forward=1, backward=2, weights=((i, 10),), activation=1) for i in range(7)]
    layers += [LayerCosts(forward=0.2, backward=0.4, weights=((7, 20_000),), activation=1)]
    plan = plan_pipedream(Profile(tuple(layers)), levels=[(8, 1000.0)])
    assert plan.replicas == (7, 1)
    assert plan.boundaries == [0, 7, 8]
    assert plan.in_flight == 2
    assert str(plan) == "layers 0-6 on 7 | 7 on 1: 3 s"


# --------------------------------------------------------------------------------------------------
# DAPPLE


def placed(
    levels: list[tuple[int, float]], counts: tuple[int, ...], policies: tuple[str, ...]
) -> list[tuple[int, ...]]:
    """The devices of each stage, placed from the last to the first."""
    size, machines = levels[0][0], levels[1][0] if len(levels) > 1 else 1
    free = (size,) * machines
    found = []
    for count, policy in reversed(list(zip(counts, policies, strict=True))):
        found.append(take(free, count, policy))
        free = tuple(a - b for a, b in zip(free, found[-1], strict=True))
    return found[::-1]


def step_time(
    profile: Profile,
    bounds: list[int],
    groups: list[tuple[int, ...]],
    levels: list[tuple[int, float]],
    m: int,
) -> float:
    """The model, as its docstring writes it: over a list of stages and links."""
    inside, between = levels[0][1], levels[-1][1]
    nodes: list[tuple[float, float, float, float]] = []  # F, B, steady, reduction
    for s, group in enumerate(groups):
        layers, count = profile.layers[bounds[s] : bounds[s + 1]], sum(group)
        if s:
            one_machine = (
                len({i for g in (group, groups[s - 1]) for i, n in enumerate(g) if n}) == 1
            )
            size = profile.layers[bounds[s] - 1].activation
            seconds = (
                size / inside / min(count, sum(groups[s - 1])) if one_machine else size / between
            )
            nodes.append((seconds, seconds, seconds, 0.0))
        f, b = (
            sum(getattr(layer, what) for layer in layers) / count
            for what in ("forward", "backward")
        )
        weights = sum(size for layer in layers for _, size in layer.weights)
        slowest = inside if sum(map(bool, group)) == 1 else between
        nodes.append((f, b, f + b, 2 * (count - 1) / count * weights / slowest))
    best = 0.0
    for q, (_, _, steady, _) in enumerate(nodes):
        for s, (_, _, _, reduction) in enumerate(nodes):
            ending = reduction + (
                sum(n[1] for n in nodes[s : q + 1])
                if s <= q
                else -sum(n[1] for n in nodes[q + 1 : s])
            )
            best = max(best, sum(n[0] for n in nodes[: q + 1]) + (m - 1) * steady + ending)
    return best


def every_plan(
    profile: Profile, levels: list[tuple[int, float]]
) -> Iterator[tuple[list[int], list[tuple[int, ...]]]]:
    devices = levels[0][0] * (levels[1][0] if len(levels) > 1 else 1)
    for sizes in compositions(len(profile)):
        bounds = [0, *itertools.accumulate(sizes)]
        for counts in itertools.product(range(1, devices + 1), repeat=len(sizes)):
            if sum(counts) <= devices:
                for policies in itertools.product(
                    PLACEMENTS if len(levels) > 1 else PLACEMENTS[:1], repeat=len(sizes)
                ):
                    yield bounds, placed(levels, counts, policies)


def check_plan(
    plan: PipelinePlan, profile: Profile, levels: list[tuple[int, float]], m: int
) -> None:
    """Its time is that of its stages, and no device is used twice."""
    machines = levels[1][0] if len(levels) > 1 else 1
    groups = [
        tuple(dict(stage.machines).get(i, 0) for i in range(machines)) for stage in plan.stages
    ]
    assert [sum(group) for group in groups] == list(plan.replicas)
    assert all(sum(group[i] for group in groups) <= levels[0][0] for i in range(machines))
    assert plan.time == pytest.approx(
        step_time(profile, plan.boundaries, groups, levels, m), rel=1e-12
    )


@pytest.mark.parametrize(
    "levels", [[(1, 1.0)], [(3, 20.0)], [(2, 40.0), (2, 4.0)], [(1, 9.0), (3, 3.0)]]
)
@pytest.mark.parametrize("m", [1, 4])
def test_dapple_equals_brute_force(levels: list[tuple[int, float]], m: int):
    draw = random.Random(10 * m + len(levels))
    for _ in range(8):
        found = a_profile(draw, draw.randint(1, 4))
        plan = plan_dapple(found, levels=levels, num_microbatches=m)
        check_plan(plan, found, levels, m)
        best = min(
            step_time(found, bounds, groups, levels, m)
            for bounds, groups in every_plan(found, levels)
        )
        assert plan.time == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", [11, 17, 211, 595])
def test_dapple_keeps_every_tail_that_may_be_best(seed: int):
    """Draws in which a search that keeps one tail too few, or drops a late reduction, ends with a
    worse plan."""
    draw = random.Random(seed)
    count = draw.randint(4, 6)
    levels = draw.choice([[(4, 20.0)], [(5, 5.0)], [(2, 9.0), (2, 3.0)]])
    m = draw.choice([1, 2, 4])
    layers = []
    for i in range(count):
        forward, size = draw.choice([0.1, 1.0, 4.0]), draw.choice([0, 5, 60])
        layers.append(
            LayerCosts(
                forward=forward,
                backward=forward * draw.choice([0.1, 1, 2]),
                weights=((i, size),),
                activation=draw.choice([0, 1, 4]),
            )
        )
    found = Profile(tuple(layers))
    plan = plan_dapple(found, levels=levels, num_microbatches=m)
    check_plan(plan, found, levels, m)
    best = min(
        step_time(found, bounds, groups, levels, m) for bounds, groups in every_plan(found, levels)
    )
    assert plan.time == pytest.approx(best, rel=1e-12)


def test_dapple_prefers_what_the_bandwidth_allows():
    layers = tuple(
        LayerCosts(forward=1, backward=2, weights=((i, 100),), activation=1) for i in range(8)
    )
    fast = plan_dapple(Profile(layers), levels=[(4, 1e6)], num_microbatches=8)
    assert fast.replicas == (4,)  # data parallel has no bubble
    slow = plan_dapple(Profile(layers), levels=[(4, 4.0)], num_microbatches=8)
    assert slow.replicas == (1, 1, 1, 1)
    two = plan_dapple(Profile(layers), levels=[(2, 1e6), (2, 4.0)], num_microbatches=8)
    assert [(s.first, s.end, s.machines) for s in two.stages] == [
        (0, 4, ((1, 2),)),
        (4, 8, ((0, 2),)),
    ]


def test_memory_moves_layers_to_later_stages():
    layers = tuple(
        LayerCosts(forward=1, backward=2, kept=((i, 10),), weights=((i, 1),)) for i in range(6)
    )
    plan = functools.partial(plan_dapple, Profile(layers), levels=[(2, 1e-3)], num_microbatches=8)
    assert plan().boundaries == [0, 3, 6]
    assert plan(most_bytes=3 * 2 + 2 * 3 * 10).boundaries == [
        0,
        3,
        6,
    ]  # two micro-batches are in flight on the first of two
    assert plan(most_bytes=4 * 2 + 4 * 10).boundaries == [0, 2, 6]
    with pytest.raises(ValueError, match="no plan keeps every device within most_bytes"):
        plan(most_bytes=40)


@pytest.mark.parametrize("m", [1, 3, 16])
def test_the_model_of_a_step_is_never_longer_than_what_the_simulator_finds(m: int):
    """No replicas, no weights: the longest way through a pivot is at most 1f1b, and as long where
    stages are even."""
    draw = random.Random(m)
    for _ in range(20):
        k = draw.randint(1, 5)
        uneven = a_profile(draw, k, weights=0)
        costs = uneven.costs(list(range(k + 1)), bandwidth=10.0)
        model = step_time(uneven, list(range(k + 1)), [(1,)] * k, [(k, 10.0)], m)
        assert model <= simulate(
            schedule("1f1b", num_stages=k, num_microbatches=m), costs
        ).makespan * (1 + 1e-12)
        even = step_time(by_ones(k), list(range(k + 1)), [(1,)] * k, [(k, 1.0)], m)
        assert (
            even
            == simulate(schedule("1f1b", num_stages=k, num_microbatches=m), Costs(1, 1, 1)).makespan
        )


def by_ones(k: int) -> Profile:
    return Profile((LayerCosts(forward=1, backward=2),) * k)


# --------------------------------------------------------------------------------------------------
# both


def test_layers_that_belong_together_stay_together():
    draw = random.Random(5)
    for _ in range(10):
        found = a_profile(draw, 6)
        for planner in (plan_pipedream, functools.partial(plan_dapple, num_microbatches=4)):
            plan = planner(found, levels=[(4, 9.0)], together=[(1, 3)], same_stage=[(4, 5)])
            assert set(plan.boundaries) <= {0, 1, 4, 6}


def test_places_of_devices():
    assert take((2, 4, 4), 3, "fresh") == (0, 3, 0)
    assert take((2, 4, 4), 3, "append") == (2, 1, 0)
    assert take((2, 4, 4), 3, "scatter") == (0, 2, 1)
    assert take((0, 1, 2), 3, "append") == (0, 1, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": []}, "give 1 to 2 pairs"),
        ({"levels": [(2, 1.0)] * 3}, "give 1 to 2 pairs"),
        ({"levels": [(0, 1.0)]}, "a whole number of parts and bytes a second above 0"),
        ({"levels": [(2, 0.0)]}, "bytes a second above 0"),
        ({"placements": ["anywhere"]}, "choose some of fresh, append, scatter"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"together": [(0, 9)]}, "layers 0 and 9 shall be on one stage"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        plan_dapple(by_ones(3), **{"levels": [(2, 1.0)], "num_microbatches": 2, **options})  # type: ignore[arg-type]


def test_no_layers_no_plan():
    for planner in (functools.partial(plan_dapple, num_microbatches=1), plan_pipedream):
        with pytest.raises(ValueError, match="the profile has no layers"):
            planner(Profile(()), levels=[(1, 1.0)])

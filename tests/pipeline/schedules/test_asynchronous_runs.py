"""Asynchronous schedules beside synchronous calls and warm-up, replayed, with split backwards,
skips and ranks."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

from pyops.mesh import ALONE
from pyops.pipeline import (
    Pipeline,
    PipeMareOptions,
    custom,
)
from tests.pipeline import emulation
from tests.pipeline.asynchronous import (
    OPTIMIZERS,
    RULES,
    made,
    microbatch_rows,
    mse,
    same,
    weights_of,
)
from tests.pipeline.reference import batch, mlp
from tests.pipeline.runtime.test_skips import Plain, unet, without_dropout

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize("name", ["pipemare", "pipedream_2bw", "pipedream"])
def test_without_end_synchronous_calls_are_gpipe(name: str):
    k, accumulate = 3, 1 if name == "pipedream" else 4
    options = {} if name == "pipedream" else {"accumulate": accumulate}
    x, target = batch(24)
    ours, theirs = mlp(), mlp()
    pipeline = Pipeline(
        ours,
        schedule=made(name, k, 12, **options),
        group=ALONE,
        loss=mse,
        optimizer=OPTIMIZERS["adam"],
        pipemare=PipeMareOptions(synchronous=math.inf, anneal=5),
    )
    plain = Pipeline(theirs, schedule=made("gpipe", k, accumulate), group=ALONE, loss=mse)
    optimizers = [
        OPTIMIZERS["adam"](list(stage.parameters())) for stage in map(nn.ModuleList, staged(plain))
    ]
    for _ in range(2):
        with pipeline.recording() as timelines:
            pipeline.step(x, target)
        assert max(timelines[0].schedule.versions_kept(s) for s in range(k)) == 1
        for rows, wanted in zip(x.split(2 * accumulate), target.split(2 * accumulate), strict=True):
            plain.step(rows, wanted)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert same(weights_of(ours), weights_of(theirs))


def staged(pipeline: Pipeline) -> list[list[nn.Module]]:
    return [stage.layers for stage in pipeline.stages.values()]


def test_a_warm_up_ends():
    x, target, xs, targets = microbatch_rows(8, 16)
    ours, theirs = mlp(), mlp()
    pipeline = Pipeline(
        ours,
        schedule=made("pipedream", 3, 8),
        group=ALONE,
        loss=mse,
        optimizer=OPTIMIZERS["sgd"],
        pipemare=PipeMareOptions(synchronous=2),
    )
    rules = [lambda t, s: t, lambda t, s: t, emulation.pipedream(3)]
    for rule in rules:
        pipeline.step(x, target)
        emulation.emulate(
            theirs, pipeline.boundaries, rule, OPTIMIZERS["sgd"], xs, targets, loss=mse
        )
        assert same(weights_of(ours), weights_of(theirs))


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw", "pipemare"])
def test_a_recorded_order_can_be_replayed(name: str):
    x, target = batch(12)
    plan = made(name, 3, 12)
    found = []
    for replayed in (False, True):
        layers = mlp()
        pipeline = Pipeline(
            layers, schedule=plan, group=ALONE, loss=mse, optimizer=OPTIMIZERS["momentum"]
        )
        with pipeline.recording() as timelines:
            losses = [pipeline.step(x, target) for _ in range(2)]
        found.append((weights_of(layers), losses))
        if not replayed:
            times = timelines[1].actions
            text = [
                " ".join(map(str, sorted(order, key=lambda action: times[action][0])))
                for order in plan.ranks
            ]
            plan = custom(text, weights=plan.weights, accumulate=plan.options["accumulate"])
    (first, losses), (second, again) = found
    assert same(first, second)
    assert losses == again


@pytest.mark.parametrize(
    ("weights", "decay"), [("stash", None), ("vertical", None), ("newest", None), ("newest", 0.1)]
)
def test_a_split_backward_meets_the_same_versions(weights: str, decay: float | None):
    x, target = batch(12)
    whole = str(made("pipedream", 3, 12))
    found = []
    for orders in (whole, re.sub(r"(\d+)B(\d+)", r"\1I\2 \1W\2", whole)):
        layers = mlp()
        plan = custom(orders.splitlines(), weights=weights)
        assert plan.splits_backward == ("I" in orders)
        Pipeline(
            layers,
            schedule=plan,
            group=ALONE,
            loss=mse,
            optimizer=OPTIMIZERS["sgd"],
            pipemare=PipeMareOptions(decay=decay),
        ).step(x, target)
        found.append(weights_of(layers))
    assert same(*found)


@pytest.mark.parametrize("rule", RULES)
def test_what_skips_stages_meets_the_same_versions(rule: str):
    name, options, make_rule = RULES[rule]
    x, target, xs, targets = microbatch_rows(10, 20)
    plan = made(name, 3, 10, **options)
    ours, theirs = without_dropout(unet()), without_dropout(unet())
    pipeline = Pipeline(
        ours,
        schedule=plan,
        group=ALONE,
        loss=mse,
        optimizer=OPTIMIZERS["sgd"],
        pipemare=PipeMareOptions(synchronous=1),
    )
    for each in (lambda t, s: t, make_rule(3)):
        pipeline.step(x, target)
        emulation.emulate(
            theirs,
            pipeline.boundaries,
            each,
            OPTIMIZERS["sgd"],
            xs,
            targets,
            accumulate=plan.options["accumulate"],
            loss=mse,
            forward=lambda stages, rows: Plain([layer for stage in stages for layer in stage])(
                rows
            ),
        )
        for a, b, began in zip(
            weights_of(ours), weights_of(theirs), weights_of(unet()), strict=True
        ):
            assert torch.equal(a, b)
            assert not torch.equal(a, began)


def over_ranks(rank: int, group: Any, rule: str, k: int) -> dict[str, Any]:
    name, options, _ = (RULES | {"pipemare": ("pipemare", {"warmup": "b"}, None)})[rule]
    remedies = (
        PipeMareOptions(decay=0.1, anneal=9, synchronous=1)
        if name == "pipemare"
        else PipeMareOptions(synchronous=1)
    )
    x, target = batch(20)
    both = []
    for piped in (True, False):
        layers = mlp()
        pipeline = Pipeline(
            layers,
            schedule=made(name, k, 9, **options),
            group=group if piped else None,
            loss=mse,
            optimizer=OPTIMIZERS["adam"],
            pipemare=remedies,
        )
        losses = [pipeline.step(x, target) for _ in range(3)]
        both.append((pipeline, losses))
    (ours, losses), (theirs, expected) = both
    assert losses == expected
    began = dict(nn.Sequential(*mlp()).named_parameters())
    named = dict(theirs.named_parameters())
    own = dict(ours.named_parameters())
    assert own
    assert all(torch.equal(p, named[n]) and not torch.equal(p, began[n]) for n, p in own.items())
    return ours.async_steps.state_dict()


@pytest.mark.parametrize(
    ("rule", "k"), [("stash", 2), ("vertical", 3), ("two", 3), ("pipemare", 2), ("pipemare", 3)]
)
def test_ranks_train_as_one_process(world, rule: str, k: int):
    states = world(k).run(over_ranks, rule, k)
    assert [list(state["stages"]) for state in states] == [[str(rank)] for rank in range(k)]

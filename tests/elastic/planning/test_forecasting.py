"""The forecast: epochs by hand, what each part of the plan brings, and the published machines."""

from __future__ import annotations

import pytest

from benchmarks.elastic import elastic_forecast as published
from pyops.elastic import Bound, GradientNorm, Machine
from tests.elastic.flat import forecast

pytestmark = pytest.mark.cpu_only

COSTS = [3.0, 3.0, 3.0, 3.0]


def epochs_of(policy, **options):
    arguments = {
        "epochs": 4,
        "samples": 64,
        "blocks": 3,
        "stages": 4,
        "machine": Machine(devices=8),
        "batch": 16,
    }
    return forecast(COSTS, policy=policy, layers_of=lambda n: n, **{**arguments, **options})


def test_without_a_policy_every_epoch_is_the_first():
    found = epochs_of(None)
    assert [(each.frozen, each.packing.stages, each.packing.replicas) for each in found] == [
        (0, 4, 2)
    ] * 4
    # 16 samples in 16 micro-batches: 19 of 3 seconds; 64 samples are 2 steps of 32
    assert [each.seconds for each in found] == [pytest.approx(2 * 19 * 3.0)] * 4


def test_frozen_layers_and_free_ranks_make_epochs_shorter():
    found = epochs_of(Bound(2 / 3), batch_policy="replica", lambda_frozen=0.0)
    assert [each.frozen for each in found] == [0, 2, 3, 3]
    assert [(each.packing.stages, each.packing.replicas) for each in found] == [
        (4, 2),
        (2, 4),
        (1, 8),
        (1, 8),
    ]
    # one stage: three forwards of 1 second, and 3 of the last layer, for 16 samples; 64 samples are
    # half a step
    assert found[3].seconds == pytest.approx(0.5 * 16 * (3 + 3))
    assert found[0].seconds > found[1].seconds > found[2].seconds
    cached = epochs_of(Bound(2 / 3), batch_policy="replica", lambda_frozen=0.0, cached_from=3)
    assert [each.cached for each in cached] == [False, False, True, True]
    assert cached[3].seconds == pytest.approx(0.5 * 16 * 3)
    assert cached[1] == found[1]


def test_the_global_batch_may_stay():
    found = epochs_of(Bound(2 / 3), lambda_frozen=0.0)
    # 32 samples a step, 4 of each of 8 replicas, twice
    assert found[3].seconds == pytest.approx(2 * 4 * (3 + 3))


def test_parts_of_the_plan():
    frozen = {"batch_policy": "replica", "lambda_frozen": 0.0}
    still = epochs_of(Bound(2 / 3), compress=False, **frozen)
    assert [(each.packing.stages, each.packing.replicas) for each in still] == [
        (4, 2),
        (2, 4),
        (2, 4),
        (2, 4),
    ], "3 and 2 parts"
    longer = forecast(
        [3.0] * 8,
        policy=Bound(2 / 3),
        blocks=4,
        epochs=4,
        samples=64,
        layers_of=lambda n: n,
        stages=4,
        machine=Machine(devices=8),
        batch=16,
        compress=False,
    )
    assert [(each.frozen, each.packing.stages, each.packing.replicas) for each in longer] == [
        (f, 4, 2) for f in (0, 3, 4, 4)
    ]
    idle = epochs_of(Bound(2 / 3), replicate=False, **frozen)
    assert [(each.packing.stages, each.packing.replicas) for each in idle] == [
        (4, 2),
        (2, 2),
        (1, 2),
        (1, 2),
    ]
    whole = epochs_of(Bound(2 / 3), **frozen)
    assert whole[3].seconds == pytest.approx(idle[3].seconds / 4)


def test_recorded_norms_decide():
    norms = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]
    assert [each.frozen for each in epochs_of(GradientNorm(2 / 3), epochs=3, norms=norms)] == [
        0,
        1,
        2,
    ]
    with pytest.raises(ValueError, match="norms are of 3 epochs, but epochs is 4"):
        epochs_of(GradientNorm(2 / 3), norms=norms)


def test_the_published_machines():
    vit = published.vit()
    assert sum(layer.parameters for layer in vit.layers) == 86_567_656
    assert published.throughput(vit, 8) == pytest.approx(368, rel=0.02)
    assert published.throughput(vit, 16) == pytest.approx(410, rel=0.02)
    found = published.run(vit, published.VIT, 1 / 3)
    assert [each.frozen for each in found] == [0, 4, 7, 9, 10, 11, 11, 12, 12, 12]
    assert [each.packing.stages for each in found] == [8, 8, 4, 4, 4, 2, 2, 1, 1, 1]
    speedup = 10 * found[0].seconds / published.seconds(found)
    assert 2.83 < speedup < 4, (
        "more than was measured: nothing is lost at a change, and reading the cache is free"
    )

"""Decisions at their ends: nothing frozen, everything, fewer layers than stages, fewer samples than
replicas."""

from __future__ import annotations

import random

import pytest

from pyops.elastic import (
    Bound,
    Callback,
    GradientNorm,
    Layout,
    Machine,
    PercentileOfChange,
    Sampler,
    moves,
)
from tests.elastic.flat import forecast, pack

pytestmark = pytest.mark.cpu_only


def layouts(
    policy, *, blocks: int = 4, stages: int = 4, devices: int = 4, decisions: int = 4, **options
) -> list[Layout]:
    """Of a run: embedding, blocks, head."""
    frozen, found = 0, []
    for t in range(decisions + 1):
        layers = frozen + 1 if frozen else 0
        each = pack(
            [1.0] * (blocks + 2),
            frozen=layers,
            stages=stages,
            machine=Machine(devices=devices),
            batch=8,
            **options,
        )
        found.append(
            Layout(
                devices,
                each.stages,
                each.replicas,
                each.boundaries,
                each.frozen,
                each.micro_batches,
            )
        )
        frozen = policy.decide([1.0 + t * i for i in range(blocks)], frozen)
    return found


@pytest.mark.parametrize(
    "policy",
    [
        PercentileOfChange(0.0),
        Callback(lambda norms, frozen: frozen),
        Callback(lambda norms, frozen: 0),
    ],
    ids=["percentile 0", "callback", "zero"],
)
def test_a_policy_that_freezes_nothing(policy):
    first, *others = layouts(policy)
    assert all(each == first for each in others)
    assert not [move for each in others for move in moves(first, each)], "nothing is sent"


@pytest.mark.parametrize(
    "policy", [Callback(lambda norms, frozen: len(norms)), Bound(0.999)], ids=["callback", "bound"]
)
def test_a_policy_that_freezes_everything(policy):
    first, *others = layouts(policy)
    assert (first.stages, first.replicas) == (4, 1)
    for each in others:
        assert (each.frozen, each.stages, each.replicas, each.boundaries) == (5, 1, 4, (0, 6)), (
            "all but the head, which learns"
        )
    # the head goes to those that have not got it, and so does all of the prefix
    assert {move.layer for move in moves(first, others[0])} == set(range(6))


def test_one_block_and_one_rank():
    for each in layouts(Bound(0.5), blocks=1, stages=1, devices=1):
        assert (each.stages, each.replicas, each.boundaries) == (1, 1, (0, 3))
    assert [each.frozen for each in layouts(GradientNorm(0.5), blocks=1, stages=1, devices=1)] == [
        0,
        2,
        2,
        2,
        2,
    ]


def test_fewer_layers_than_stages_after_freezing():
    """As many halvings as make the layers suffice, though none are asked for."""
    found = layouts(Bound(0.3), blocks=6, stages=8, devices=8, decisions=6, min_stages=8)
    assert [(each.frozen, each.stages, each.replicas) for each in found] == [
        (0, 8, 1),
        (3, 4, 2),
        (5, 4, 2),
        (5, 4, 2),
        (6, 2, 4),
        (6, 2, 4),
        (7, 2, 4),
    ]


@pytest.mark.parametrize("seed", range(6))
def test_every_number_of_frozen_layers_has_a_layout(seed: int):
    """Stages never grow in number, what is frozen is never cut, and no more ranks are asked for
    than there are."""
    draw = random.Random(seed)
    for _ in range(8):
        costs = [draw.choice([0.5, 1.0, 2.0, 3.0, 9.0]) for _ in range(draw.randint(2, 12))]
        stages = draw.choice([k for k in (1, 2, 3, 4, 5, 6, 7, 8) if k <= len(costs)])
        devices, most = stages * draw.randint(1, 3), stages
        options = {
            "batch": draw.choice([1, 3, 16]),
            "lambda_frozen": draw.choice([0.0, 1 / 6, 1.0]),
        }
        for frozen in range(len(costs)):
            found = pack(
                costs, frozen=frozen, stages=stages, machine=Machine(devices=devices), **options
            )
            layout = Layout(
                devices,
                found.stages,
                found.replicas,
                found.boundaries,
                found.frozen,
                found.micro_batches,
            )
            assert layout.active == devices
            assert found.stages <= most
            most = found.stages
        assert most == 1


@pytest.mark.parametrize("policy", ["global", "replica"])
@pytest.mark.parametrize("samples", [1, 2, 3])
def test_fewer_samples_than_replicas(samples: int, policy: str):
    replicas = [
        Sampler(samples, batch=4, seed=0, rank=rank, replicas=8, batch_policy=policy)
        for rank in range(8)
    ]
    for epoch in range(2):
        shares = [next(replica.rest()) for replica in replicas]
        assert sorted(int(i) for share in shares for i in share.samples) == list(range(samples))
        assert sum(share.weight for share in shares) == pytest.approx(1.0)
        assert {share.epoch for share in shares} == {epoch}


def test_a_batch_of_fewer_samples_than_stages():
    found = pack([1.0] * 6, frozen=0, stages=4, machine=Machine(devices=4), batch=2)
    assert found.micro_batches == 2
    # a batch of 8 is one of 4 for each of two pipelines, and of 2 for each of four, whose one stage
    # gains nothing by parts
    assert [(each.replicas, each.micro_batches) for each in layouts(Bound(0.5))] == [
        (1, 8),
        (2, 4),
        (2, 4),
        (4, 1),
        (4, 1),
    ]
    assert (
        pack([1.0] * 6, frozen=5, stages=4, machine=Machine(devices=4), batch=2).micro_batches == 1
    )


def test_forecasts_of_such_runs():
    still, whole = (
        forecast(
            [3.0] * 6,
            policy=Callback(function),
            epochs=3,
            samples=64,
            blocks=4,
            layers_of=lambda n: n + 1,
            stages=4,
            machine=Machine(devices=4),
            batch=8,
        )
        for function in (lambda norms, frozen: frozen, lambda norms, frozen: len(norms))
    )
    assert len({each.seconds for each in still}) == 1
    assert [each.packing.stages for each in whole] == [4, 1, 1]
    assert whole[1].seconds < whole[0].seconds

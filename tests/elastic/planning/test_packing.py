"""Packing: the sequence of stages of a ViT, found apart by trying every cut; times by hand; and
what has nothing to pack."""

from __future__ import annotations

import itertools
import math

import pytest

from pyops.elastic import Bound, Machine
from pyops.elastic.planning.packing import frozen_share
from pyops.pipeline import LayerCosts, Profile
from tests.elastic.flat import pack

pytestmark = pytest.mark.cpu_only

# Parameters of ViT-B/16 for 1000 labels: embedding, (attention, MLP) of 12 blocks, norm, head: 86.6
# M.
ATTENTION, MLP = 2_363_904, 4_723_968
VIT = [742_656, *[ATTENTION, MLP] * 12, 1_536, 769_000]


def layers_of(blocks: int) -> int:
    """Pipeline layers that are frozen with so many blocks: the embedding with the first."""
    return 1 + 2 * blocks if blocks else 0


def stages_of(share: float, *, ceiling: float | None = None) -> list[int]:
    found = [
        pack(
            VIT,
            frozen=layers_of(f),
            stages=8,
            lambda_frozen=share,
            ceiling=ceiling,
            batch=8,
            schedule="gpipe",
        )
        for f in range(13)
    ]
    assert [each.replicas * each.stages for each in found] == [8] * 13
    return [each.stages for each in found]


def test_stages_of_vit():
    assert sum(VIT) == 86_567_656
    assert pack(VIT, frozen=0, stages=8, batch=8).fullest == 12_582_376
    # What is frozen not counted, as the published program has it: first at 6 blocks, where its
    # greedy partition says 5
    assert stages_of(0.0) == [8, 8, 8, 8, 8, 8, 4, 4, 4, 2, 2, 1, 1]
    # with the fullest stage of that partition as the ceiling, its very sequence
    assert stages_of(0.0, ceiling=14.18e6) == [8, 8, 8, 8, 8, 4, 4, 4, 4, 2, 2, 1, 1]


def test_stages_of_vit_with_frozen_layers_counted():
    assert stages_of(1 / 6) == [8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 2, 2]


def test_stages_by_epoch():
    found, policy, frozen = [], Bound(1 / 3), 0
    for _ in range(10):
        found.append(
            pack(
                VIT, frozen=layers_of(frozen), stages=8, lambda_frozen=0.0, ceiling=14.18e6, batch=8
            ).stages
        )
        frozen = policy.decide([1.0] * 12, frozen)
    assert found == [8, 8, 4, 2, 2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("frozen", [0, 2, 5, 7, 8])
@pytest.mark.parametrize("share", [0.0, 1 / 6, 1.0])
def test_equals_trying_every_cut(frozen: int, share: float):
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0]

    def least(held: list[float], k: int, whole: int = 0) -> float:
        """The fullest of k stages; no cut goes between the first `whole` layers."""
        cuts = itertools.combinations(range(max(1, whole), len(held)), k - 1)
        return min(
            (
                max(sum(held[a:b]) for a, b in itertools.pairwise([0, *cut, len(held)]))
                for cut in cuts
            ),
            default=math.inf,
        )

    held = [c * share if i < frozen else c for i, c in enumerate(costs)]
    most = max(least(costs, 4), min(least(held, k, frozen) for k in (1, 2, 4)))
    stages = 1 if frozen == 8 else min(k for k in (1, 2, 4) if least(held, k, frozen) <= most)
    found = pack(costs, frozen=frozen, stages=4, lambda_frozen=share, batch=4)
    assert found.stages == stages
    assert found.fullest == pytest.approx(least(held, stages, frozen))
    assert max(sum(held[a:b]) for a, b in itertools.pairwise(found.boundaries)) == pytest.approx(
        found.fullest
    )
    assert not {*range(1, frozen)} & {*found.boundaries}, "what is frozen is not cut"


def test_time_by_hand():
    # 2 stages of 3 a sample: forward 1, backward 2. Batch of 4 in M micro-batches: (M + 1) 3 (4 /
    # M)
    found = pack([3.0, 3.0], frozen=0, stages=2, batch=4)
    assert (found.micro_batches, found.time) == (4, pytest.approx(15.0))
    # with 1 more for each forward and backward: 3 (12 / 2 + 2) = 24 in 2, 5 (12 / 4 + 2) = 25 in 4
    found = pack([3.0, 3.0], frozen=0, stages=2, batch=4, machine=Machine(devices=2, overhead=1.0))
    assert (found.micro_batches, found.time) == (2, pytest.approx(24.0))
    # costs that were profiled with 2 samples
    assert pack([3.0, 3.0], frozen=0, stages=2, batch=4, profiled=2).time == pytest.approx(7.5)


def test_frozen_layers_have_a_forward_or_none():
    # layer 0 forward only: 4 samples of 1 + 3 on one stage; read from a cache: 3
    found = pack([3.0, 3.0], frozen=1, stages=2, batch=4, batch_policy="replica", ceiling=9.0)
    assert (found.stages, found.time) == (1, pytest.approx(16.0))
    assert (
        pack(
            [3.0, 3.0],
            frozen=1,
            stages=2,
            batch=4,
            batch_policy="replica",
            ceiling=9.0,
            cached=True,
        ).time
        == 12.0
    )


def test_batch_policies():
    four = {"frozen": 2, "stages": 4, "batch": 16, "machine": Machine(devices=8)}
    one, other = (pack([3.0] * 4, **four, batch_policy=policy) for policy in ("global", "replica"))
    assert (one.stages, one.replicas) == (other.stages, other.replicas) == (2, 4)
    assert other.time == pytest.approx(2 * one.time, rel=0.2)
    assert other.time > 1.5 * one.time
    # devices that stay idle leave as many replicas, each with the batch it had
    idle = pack([3.0] * 4, **four, replicate=False)
    assert (idle.stages, idle.replicas, idle.boundaries) == (2, 2, one.boundaries)
    assert idle.time == other.time
    assert pack([3.0] * 4, **four, replicate=False, batch_policy="replica").time == idle.time


def profile_of(count: int, *, kept: int = 100, first: int = 40) -> Profile:
    """Layers of one second, 10 parameters of 4 bytes, that keep so much of a micro-batch; the first
    has weights of so many."""
    return Profile(
        tuple(
            LayerCosts(
                forward=1,
                backward=2,
                forward_apart=1,
                input_gradient=1,
                weight_gradient=1,
                activation=8,
                parameters=10,
                kept=((2 * i, kept),),
                weights=((2 * i + 1, 40 if i else first),),
            )
            for i in range(count)
        )
    )


def test_memory_counts_activations_as_the_schedule_keeps_them():
    four = {"stages": 4, "batch": 8, "by": "memory", "lambda_frozen": None}
    start = pack(profile_of(8), frozen=0, **four)
    # two layers on a stage: 2 (40 + 40 + 80), and the first keeps 4 micro-batches, 8 / M samples
    # each
    assert start.micro_batches == 8
    assert start.fullest == 2 * 160 + 4 * 200
    frozen = pack(profile_of(8), frozen=4, **four)
    # Batch 4 on two stages. By time the first would have the frozen layers and the next: 4 40 + 160
    # + 2 100
    assert (frozen.stages, frozen.replicas) == (2, 2)
    assert frozen.fullest <= start.fullest
    one = pack(profile_of(8), frozen=7, **four)
    # seven times weights alone; weights, gradients, moments and 2 samples of the last
    assert (one.stages, one.micro_batches, one.fullest) == (1, 1, 7 * 40 + 160 + 2 * 100)
    assert "more than" in pack(profile_of(8, kept=0), frozen=1, **four).reason


def test_memory_on_fewer_stages_is_cut_where_it_fits():
    costs = profile_of(8)
    wide = pack(costs, frozen=4, stages=4, batch=8, by="memory", lambda_frozen=None, ceiling=1e9)
    tight = pack(costs, frozen=4, stages=4, batch=8, by="memory", lambda_frozen=None, ceiling=700.0)
    assert wide.stages == 1
    assert tight.stages > 1
    assert tight.fullest <= 700
    with pytest.raises(
        ValueError, match="4 or 2 or 1 stages don't fit the ceiling of 300, with 0 frozen layers"
    ):
        pack(costs, frozen=0, stages=4, batch=8, by="memory", lambda_frozen=None, ceiling=300.0)


def test_gradients_are_reduced_behind_the_last_backward():
    # 40 bytes on each stage, two replicas: one times that on a ring of 4 bytes a second, beyond the
    # first stage's last backward
    slow = Machine(devices=4, reduce_bandwidth=4.0)
    alone = pack(profile_of(2), frozen=0, stages=2, batch=4).time
    assert pack(profile_of(2), frozen=0, stages=2, batch=4, machine=slow).time == pytest.approx(
        alone + 10
    )
    free = pack(
        profile_of(2, first=80), frozen=1, stages=2, batch=4, ceiling=19.0, lambda_frozen=1.0
    ).time
    hidden = pack(
        profile_of(2, first=80),
        frozen=1,
        stages=2,
        batch=4,
        ceiling=19.0,
        lambda_frozen=1.0,
        machine=slow,
    )
    assert hidden.stages == 2
    assert hidden.time == pytest.approx(free + 10), "of the layer that learns alone"


def test_all_but_the_head_frozen():
    for share in (0.0, 1 / 6, 1.0):
        found = pack([9.0] * 8 + [1.0], frozen=8, stages=4, batch=4, lambda_frozen=share)
        assert (found.stages, found.replicas, found.boundaries) == (1, 4, (0, 9))
        assert found.reason.startswith("the head alone learns, so one stage has all")
    assert pack(VIT, frozen=25, stages=8, head=2).micro_batches == 1, (
        "no faster with more, but for rounding"
    )
    assert pack(VIT, frozen=25, stages=8, head=2).stages == 1
    assert pack(VIT, frozen=25, stages=8, head=1).stages == 2
    # a ceiling that is given holds all the same: the frozen layers are 72
    found = pack([9.0] * 8 + [1.0], frozen=8, stages=4, batch=4, lambda_frozen=1.0, ceiling=72.5)
    assert (found.stages, found.boundaries) == (2, (0, 8, 9))
    assert (
        found.reason
        == "on 1 stage one would hold more than 72.5; the first stage has frozen layers alone"
    )
    with pytest.raises(
        ValueError, match="2 or 1 stages don't fit the ceiling of 71, with 8 frozen layers on"
    ):
        pack([9.0] * 8 + [1.0], frozen=8, stages=4, batch=4, lambda_frozen=1.0, ceiling=71.0)


def test_frozen_layers_that_hold_more_than_any_stage_did():
    # at the start 9 + 9; seven frozen layers hold 21, so that much is allowed, but no more
    found = pack([9.0] * 9, frozen=7, stages=4, batch=4, lambda_frozen=1 / 3)
    assert (found.stages, found.boundaries, found.fullest) == (2, (0, 7, 9), pytest.approx(21))
    assert (
        found.reason
        == "on 1 stage one would hold more than 27; the first stage has frozen layers alone"
    )


def test_the_number_of_stages_at_the_start_may_be_too_many():
    found = pack(profile_of(4), frozen=2, stages=4, batch=8, by="memory", lambda_frozen=None)
    # two frozen layers are one part of three; on two stages of 2 samples each the second has 160 +
    # 100, or twice that
    assert (found.stages, found.replicas) == (2, 2)
    assert found.fullest == 80 + 160 + 2 * 100


@pytest.mark.parametrize(
    ("frozen", "stages"), [(0, 8), (1, 8), (2, 4), (3, 4), (5, 4), (6, 2), (7, 2)]
)
def test_fewer_layers_than_stages(frozen, stages):
    """As many stages as are asked for, or as there are parts for."""
    found = pack([1.0] * 8, frozen=frozen, stages=8, batch=8, min_stages=8)
    assert (found.stages, found.replicas) == (stages, 8 // stages)
    if frozen in (2, 5):
        assert found.reason.startswith(
            f"8 stages or more are asked for, but there are {9 - frozen} parts"
        )


def test_no_fewer_stages_than_asked_for():
    found = pack([1.0] * 8, frozen=5, stages=8, batch=8, min_stages=3)
    assert (found.stages, found.reason) == (
        4,
        "3 stages or more are asked for; the first stage has frozen layers alone",
    )


def test_an_odd_number_of_stages_goes_to_one():
    six = {"stages": 6, "batch": 6, "machine": Machine(devices=12)}
    assert [pack([2.0] * 6, frozen=f, **six, lambda_frozen=0.0).stages for f in range(6)] == [
        6,
        6,
        3,
        3,
        3,
        1,
    ]
    assert (
        pack([2.0] * 6, frozen=3, **six, lambda_frozen=0.0).reason
        == "on 1 stage one would hold more than 2"
    )
    assert pack([2.0] * 6, frozen=5, **six).replicas == 12


def test_what_a_frozen_layer_holds_is_measured():
    # weights 40 of weights, gradients, moments, and what one micro-batch keeps: 40 + 40 + 80 + 100
    assert frozen_share(profile_of(4)) == pytest.approx(40 / 260)
    assert frozen_share(profile_of(4), in_flight=3) == pytest.approx(40 / 460)
    assert frozen_share(Profile((LayerCosts(), LayerCosts()))) == 0
    measured = pack(profile_of(8), frozen=4, stages=4, batch=8, lambda_frozen=None)
    assert measured == pack(profile_of(8), frozen=4, stages=4, batch=8, lambda_frozen=40 / 260)
    assert measured.fullest == pytest.approx(20 + 4 * 10 * 40 / 260) or measured.stages != 2


def test_the_numbers_of_micro_batches_that_were_tried():
    found = pack([3.0, 3.0], frozen=0, stages=2, batch=4, machine=Machine(devices=2, overhead=1.0))
    assert found.simulated == ((2, pytest.approx(24.0)), (4, pytest.approx(25.0)))
    assert found.simulated[0] == (found.micro_batches, found.time)


def test_numbers_that_need_other_cuts_were_not_tried():
    # larger micro-batches leave the first stage room for two layers alone
    layers = [(3, 10), (1, 300), (2, 300), (3, 100), (2, 300), (1, 10), (3, 10)]
    costs = Profile(
        tuple(
            LayerCosts(
                forward=forward,
                backward=2,
                input_gradient=1,
                weight_gradient=1,
                parameters=10,
                kept=((2 * i, kept),),
                weights=((2 * i + 1, 40),),
            )
            for i, (forward, kept) in enumerate(layers)
        )
    )
    found = pack(costs, frozen=0, stages=2, batch=16, by="memory", ceiling=2000.0, min_stages=2)
    assert (found.boundaries, found.simulated) == ((0, 3, 7), ((16, found.time),))


def test_what_must_stay_together():
    found = pack([1.0] * 8, frozen=0, stages=4, batch=4, together=[(1, 3)])
    assert not {2, 3} & set(found.boundaries)
    assert found.stages == 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"frozen": 4}, "frozen is 4 of 4 layers; .* nothing to train"),
        ({"frozen": -1}, "frozen is -1"),
        ({"stages": 8}, "4 layers.* can't fill 8 stages"),
        (
            {"stages": 3, "machine": Machine(devices=4)},
            "4 devices can't be shared out to pipelines of 3 stages",
        ),
        ({"lambda_frozen": 1.5}, "lambda_frozen is 1.5"),
        (
            {"lambda_frozen": None},
            "lambda_frozen is None, which is what a profile measured, but the costs are numbers",
        ),
        ({"by": "memory"}, "give a Profile"),
        ({"by": "luck"}, "by is 'luck'"),
        ({"batch": 0}, "batch is 0"),
        ({"ceiling": 1.0}, "2 or 1 stages don't fit the ceiling of 1"),
    ],
)
def test_bad_input(changed, message):
    with pytest.raises(ValueError, match=message):
        pack([1.0] * 4, **{"frozen": 0, "stages": 2, **changed})

"""Layouts: who holds what, and what makes no sense."""

from __future__ import annotations

import pytest

from pyops.elastic import Layout, moves

pytestmark = pytest.mark.cpu_only


def test_who_holds_what():
    layout = Layout(
        ranks=9, stages=4, replicas=2, boundaries=(0, 3, 5, 6, 8), frozen=2, micro_batches=8
    )
    assert [layout.is_active(rank) for rank in range(9)] == [True] * 8 + [False]
    assert [layout.replica(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [layout.stage(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [list(layout.layers(rank)) for rank in (0, 5, 7, 8)] == [[0, 1, 2], [3, 4], [6, 7], []]
    assert layout.pp_ranks(1) == (4, 5, 6, 7)
    assert layout.dp_ranks(2) == (2, 6)
    assert [layout.holders(layer) for layer in (0, 2, 3, 5, 7)] == [
        (0, 4),
        (0, 4),
        (1, 5),
        (2, 6),
        (3, 7),
    ]
    assert (layout.layer_count, layout.active) == (8, 8)


def test_neighbors_that_share_tokens_hold_the_same_layers_in_every_layout():
    two = Layout(ranks=9, stages=2, replicas=2, boundaries=(0, 3, 5), frozen=2, context=2)
    one = Layout(ranks=9, stages=1, replicas=4, boundaries=(0, 5), frozen=3, context=2)
    assert [two.replica(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [two.stage(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [one.replica(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [two.pp_ranks(1, part) for part in range(2)] == [(4, 6), (5, 7)]
    assert (two.dp_ranks(1), one.dp_ranks(0)) == ((2, 3, 6, 7), tuple(range(8)))
    assert [two.cp_ranks(rank) for rank in (0, 3, 6)] == [(0, 1), (2, 3), (6, 7)]
    assert [two.is_first(rank) for rank in range(8)] == [True, False, True] + [False] * 5
    assert (two.active, two.is_active(8)) == (8, False)
    assert {target for move in moves(two, one) for target in move.targets} == set(range(8))
    with pytest.raises(ValueError, match="there is no part 2; they are numbered from 0 to 1"):
        two.pp_ranks(0, 2)


def test_neighbors_that_share_weights_sum_gradients_with_those_of_the_same_part():
    layout = Layout(ranks=9, stages=1, replicas=2, boundaries=(0, 5), tensor=4)
    assert [layout.replica(rank) for rank in range(8)] == [0] * 4 + [1] * 4
    assert [layout.dp_ranks(0, part) for part in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [layout.tp_ranks(rank) for rank in (0, 3, 6)] == [(0, 1, 2, 3)] * 2 + [(4, 5, 6, 7)]
    both = Layout(ranks=8, stages=1, replicas=2, boundaries=(0, 5), context=2, tensor=2)
    assert [both.cp_ranks(rank) for rank in (0, 3, 6)] == [(0, 2), (1, 3), (4, 6)]
    assert [layout.is_first(rank) for rank in range(8)] == [True] * 4 + [False] * 4
    assert (layout.active, layout.is_active(8)) == (8, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 0}, "ranks is 0"),
        ({"stages": 1.0}, "stages is 1.0"),
        ({"replicas": True}, "replicas is True"),
        ({"micro_batches": -1}, "micro_batches is -1"),
        ({"replicas": 3}, "3 replicas of 2 stages need 6 ranks, but there are 4"),
        ({"context": 2}, "2 replicas of 2 stages of 2 ranks need 8 ranks, but there are 4"),
        ({"boundaries": (0, 5)}, "expected 3 rising whole numbers"),
        ({"boundaries": (0, 0, 5)}, "expected 3 rising whole numbers"),
        ({"boundaries": (1, 2, 5)}, "expected 3 rising whole numbers"),
        ({"frozen": 5}, "frozen is 5; it must be a whole number from 0 to 4"),
        ({"frozen": -1}, "frozen is -1"),
        ({"frozen": 3}, "the frozen prefix is not cut: boundaries.1. must be 3 or more"),
    ],
)
def test_what_makes_no_sense_is_named(change, message):
    right = {
        "ranks": 4,
        "stages": 2,
        "replicas": 2,
        "boundaries": (0, 2, 5),
        "frozen": 2,
        "micro_batches": 4,
    }
    assert Layout(**right).boundaries == (0, 2, 5)
    with pytest.raises(ValueError, match=message):
        Layout(**(right | change))


def test_a_rank_that_is_idle_or_is_none():
    layout = Layout(ranks=3, stages=2, replicas=1, boundaries=[0, 1, 2])
    assert layout == Layout(ranks=3, stages=2, replicas=1, boundaries=(0, 1, 2)), (
        "a list is as good"
    )
    for call, message in (
        (lambda: layout.stage(2), "rank 2 is idle"),
        (lambda: layout.replica(2), "rank 2 is idle"),
        (lambda: layout.layers(3), "there is no rank 3"),
        (lambda: layout.pp_ranks(1), "there is no replica 1"),
        (lambda: layout.dp_ranks(2), "there is no stage 2"),
        (lambda: layout.holders(2), "there is no layer 2"),
    ):
        with pytest.raises(ValueError, match=message):
            call()

"""Transitions: each rank ends with its layers, with the bits that another had, whatever the two
layouts are."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyops.elastic import Layout, carry, moves, transition
from tests.workers import RankError

pytestmark = pytest.mark.cpu_only


@st.composite
def layouts(draw, ranks: int, layers: int, least: int = 0) -> Layout:
    """Any layout of so many ranks and layers, with `least` or more of them frozen."""
    frozen = draw(st.integers(least, layers - 1))
    cuts = range(max(1, frozen), layers)
    stages = draw(st.integers(1, min(ranks, len(cuts) + 1)))
    replicas = draw(st.integers(1, ranks // stages))
    inner = sorted(draw(st.permutations(cuts))[: stages - 1])
    return Layout(ranks, stages, replicas, (0, *inner, layers), frozen, draw(st.integers(1, 8)))


@st.composite
def changes(draw) -> tuple[Layout, Layout]:
    ranks, layers = draw(st.integers(1, 7)), draw(st.integers(2, 9))
    old = draw(layouts(ranks, layers))
    return old, draw(layouts(ranks, layers, old.frozen))


def state_of(layer: int, frozen: int) -> dict:
    """Values that no other layer has, of several types, sizes and strides."""
    x = torch.arange(12.0).reshape(3, 4) + 100 * layer
    parameters = {
        "weight": x.t(),
        "bias": (x[0, : layer % 3] + 0.1).to(torch.bfloat16),
        "scale": torch.tensor(0.1 + layer),
    }
    slots = {
        "weight": {"exp_avg": -x.t(), "step": torch.tensor(7.0), "count": 3},
        "bias": {"rate": 0.1 + 0.2, "seen": x[0] > 101},
    }
    return {"parameters": parameters, "slots": {} if layer < frozen else slots}


def states_of(layout: Layout) -> list[dict]:
    return [
        {layer: state_of(layer, layout.frozen) for layer in layout.layers(rank)}
        for rank in range(layout.ranks)
    ]


def flat(value: object, name: str = "") -> dict:
    """{path: (type, bits)}"""
    if isinstance(value, dict):
        return {
            path: leaf for key in value for path, leaf in flat(value[key], f"{name}/{key}").items()
        }
    if isinstance(value, torch.Tensor):
        return {
            name: (
                value.dtype,
                tuple(value.shape),
                value.contiguous().reshape(-1).view(torch.uint8).tolist(),
            )
        }
    return {name: (type(value), value)}


def counted_moves(old: Layout, new: Layout) -> Counter:
    """How often each rank sends a layer."""
    sent: Counter = Counter()
    for move in moves(old, new):
        sent.update((move.source, *move.targets[:-1]))
    return sent


@settings(max_examples=300, deadline=None)
@given(changes())
def test_every_rank_has_its_layers_afterwards(change):
    old, new = change
    before = states_of(old)
    after = transition(before, old, new)
    assert len(after) == new.ranks
    for rank, state in enumerate(after):
        assert list(state) == list(new.layers(rank))
        for layer, each in state.items():
            assert flat(each) == flat(state_of(layer, new.frozen)), (rank, layer)
    assert [flat(state) for state in before] == [flat(state) for state in states_of(old)], (
        "the old states are left alone"
    )
    tensors = [leaf for state in after for each in state.values() for leaf in leaves(each)]
    assert len({id(leaf) for leaf in tensors}) == len(tensors), "no rank has a tensor of another"


def leaves(value: object) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves(each)]
    return [value] if isinstance(value, torch.Tensor) else []


@settings(max_examples=300, deadline=None)
@given(changes())
def test_what_goes_where(change):
    old, new = change
    wanted = Counter(
        (layer, r)
        for layer in range(new.layer_count)
        for r in new.holders(layer)
        if r not in old.holders(layer)
    )
    plan = moves(old, new)
    assert Counter((move.layer, target) for move in plan for target in move.targets) == wanted, (
        "each once, and nothing else"
    )
    assert all(move.source in old.holders(move.layer) and move.targets for move in plan)
    assert max(Counter((move.layer, move.source) for move in plan).values(), default=1) == 1, (
        "none sends a layer twice"
    )


def test_the_work_is_shared():
    """Four pipelines of one stage from two of two; eight from four."""
    old = Layout(ranks=4, stages=2, replicas=2, boundaries=(0, 6, 12))
    sent = counted_moves(old, Layout(ranks=4, stages=1, replicas=4, boundaries=(0, 12)))
    assert sent == {0: 6, 1: 6, 2: 6, 3: 6}
    old = Layout(ranks=8, stages=1, replicas=4, boundaries=(0, 10))
    sent = counted_moves(old, Layout(ranks=8, stages=1, replicas=8, boundaries=(0, 10)))
    assert sent == {0: 10, 1: 10, 2: 10, 3: 10}
    old = Layout(ranks=4, stages=4, replicas=1, boundaries=(0, 9, 10, 11, 12), frozen=9)
    plan = moves(old, Layout(ranks=4, stages=1, replicas=4, boundaries=(0, 12), frozen=9))
    assert [(move.source, move.targets) for move in plan[:9]] == [(0, (1, 2, 3))] * 9, (
        "a chain: rank 0 sends each layer once"
    )
    old = Layout(ranks=6, stages=1, replicas=2, boundaries=(0, 10))
    sent = counted_moves(old, Layout(ranks=6, stages=1, replicas=3, boundaries=(0, 10)))
    assert sent == {0: 5, 1: 5}


def test_nothing_moves_where_nothing_changes():
    layout = Layout(ranks=4, stages=2, replicas=2, boundaries=(0, 2, 5), frozen=1)
    assert moves(layout, layout) == ()
    before = states_of(layout)
    after = transition(before, layout, layout)
    assert all(after[r][layer] is before[r][layer] for r in range(4) for layer in layout.layers(r))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 5}, "ranks 4, the new one 5"),
        ({"boundaries": (0, 2, 6)}, "layer_count 5, the new one 6"),
        ({"frozen": 0}, "1 layers are frozen, and the new layout has 0"),
    ],
)
def test_there_is_no_way(change, message):
    right = {"ranks": 4, "stages": 2, "replicas": 2, "boundaries": (0, 2, 5), "frozen": 1}
    with pytest.raises(ValueError, match=message):
        moves(Layout(**right), Layout(**(right | change)))


def test_states_of_other_layers_are_refused():
    layout = Layout(ranks=2, stages=2, replicas=1, boundaries=(0, 2, 3))
    states = states_of(layout)
    del states[0][1]
    with pytest.raises(
        ValueError, match=r"rank 0 gives states of layers \[0\], but holds \[0, 1\]"
    ):
        transition(states, layout, layout)


# ------------------------------------------------------------------------------------------------
# over ranks


def carry_body(rank, group, ways):
    """Through all layouts of each way; the state that this rank ends with, as bits."""
    found = []
    for way in ways:
        state = states_of(way[0])[rank]
        for old, new in itertools.pairwise(way):
            state = carry(state, old, new, group=group)
            assert list(state) == list(new.layers(rank))
        found.append({layer: flat(each) for layer, each in state.items()})
    return found


def ways(ranks: int) -> list[list[Layout]]:
    """Halving, from idle ranks to more replicas, back to more stages, other cuts."""
    whole = Layout(ranks, 1, 1, (0, 6))
    deep = Layout(ranks, ranks, 1, (0, *range(6 - ranks + 1, 6), 6), frozen=1)
    wide = Layout(ranks, 1, ranks, (0, 6), frozen=4)
    found = [
        [whole, deep, wide],
        [wide, whole_frozen(ranks), wide],
        [deep, wide, Layout(ranks, 2, 1, (0, 5, 6), frozen=5)],
    ]
    if ranks == 4:
        found.append(
            [deep, Layout(4, 2, 2, (0, 3, 6), frozen=2), Layout(4, 2, 2, (0, 5, 6), frozen=2), wide]
        )
        found.append(
            [
                whole,
                Layout(4, 1, 3, (0, 6)),
                Layout(4, 2, 1, (0, 1, 6)),
                Layout(4, 2, 2, (0, 4, 6), frozen=4),
            ]
        )
    return found


def whole_frozen(ranks: int) -> Layout:
    return Layout(ranks, 1, 1, (0, 6), frozen=4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_carried_over_ranks_are_the_bits_of_the_pure_function(world, ranks):
    found = world(ranks).run(carry_body, ways(ranks))
    for number, way in enumerate(ways(ranks)):
        states = states_of(way[0])
        for old, new in itertools.pairwise(way):
            states = transition(states, old, new)
        for rank in range(ranks):
            assert found[rank][number] == {
                layer: flat(each) for layer, each in states[rank].items()
            }, (number, rank)


def mistakes_body(rank, group):
    """What each mistake of one rank raises on this one; and whether the next transition works."""
    old, new = Layout(2, 2, 1, (0, 2, 3)), Layout(2, 1, 2, (0, 3))
    good = states_of(old)[rank]
    found = []

    def tried(state, *layouts):
        with pytest.raises((ValueError, TypeError)) as caught:
            carry(state, *layouts, group=group)
        found.append(str(caught.value))

    tried({} if rank else good, old, new)
    tried(good | ({0: {"parameters": object()}} if rank == 0 else {}), old, new)
    tried(good, old, Layout(2, 1, 2, (0, 3), frozen=rank))
    tried(good, old, Layout(3, 1, 2, (0, 3)))
    found.append(sorted(carry(good, old, new, group=group)))
    return found


def test_a_mistake_of_one_rank_is_raised_on_both(world):
    first, second = world(2).run(mistakes_body)
    assert first == second
    assert "rank 1 gives states of layers [], but holds [2]" in first[0]
    assert "the state of layer 0 has a object" in first[1]
    assert "rank 0 goes from" in first[2]
    assert "but rank 1 from" in first[2]
    assert "the old layout has ranks 2, the new one 3" in first[3]
    assert first[4] == [0, 1, 2]


def alone_body(rank, group):
    return carry(
        {0: state_of(0, 0), 1: state_of(1, 0)},
        Layout(1, 1, 1, (0, 2)),
        Layout(1, 1, 1, (0, 2), frozen=1),
    )


def test_one_process_alone():
    state = alone_body(0, None)
    assert state[0]["slots"] == {}
    assert flat(state[1]) == flat(state_of(1, 0))


def test_the_wrong_number_of_ranks(world):
    with pytest.raises(RankError, match="the layouts are of 1 ranks, but the group has 2"):
        world(2).run(alone_body)

"""Each fragment is exchanged once in a period, and fragments partition the parameters."""

from __future__ import annotations

import pytest

from pyops.local_sgd.fragments import begins_at, fragment_of_layer, layer_of, layers_of

pytestmark = pytest.mark.cpu_only


def test_a_parameter_belongs_to_the_layer_up_to_its_first_number():
    assert layer_of("blocks.3.attention.weight") == "blocks.3"
    assert layer_of("model.layers.11.mlp.0.bias") == "model.layers.11"
    assert layer_of("head.weight") == "head"
    assert layer_of("weight") == "weight"


def test_layers_are_dealt_out_in_turn():
    names = ["e.weight", *(f"blocks.{i}.{k}" for i in range(4) for k in "ab"), "head.weight"]
    found = fragment_of_layer(layers_of(names), fragments=3)
    assert found == {
        "e": 0,
        "blocks.0": 1,
        "blocks.1": 2,
        "blocks.2": 0,
        "blocks.3": 1,
        "head": 2,
    }


def test_more_fragments_than_layers_are_refused():
    with pytest.raises(ValueError, match="fragments is 3, but the model has 2 layers"):
        fragment_of_layer(["a", "b"], fragments=3)


@pytest.mark.parametrize(("every", "fragments"), [(1, 1), (9, 3), (10, 3), (7, 7), (50, 4)])
def test_each_fragment_begins_once_in_every_period(every: int, fragments: int):
    for period in range(3):
        steps = range(period * every + 1, (period + 1) * every + 1)
        begun = [p for step in steps for p in begins_at(step, every=every, fragments=fragments)]
        assert begun == list(range(fragments))
    assert begins_at(every, every=every, fragments=fragments)[-1] == fragments - 1


def test_the_first_steps_of_post_local_sgd_exchange_everything():
    found = [begins_at(step, every=4, fragments=2, after=3) for step in range(1, 12)]
    assert found == [[0, 1], [0, 1], [0, 1], [], [0], [], [1], [], [0], [], [1]]

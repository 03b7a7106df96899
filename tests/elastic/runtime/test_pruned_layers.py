"""Layers with masks of pruning: they are refused before they go to other ranks, where the masks
would be missing and pruned weights would grow again."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from pyops.elastic import Callback, Elastic
from pyops.mesh import ALONE
from pyops.pruning import magnitude
from tests.elastic import networks
from tests.elastic.flat import make_elastic

pytestmark = pytest.mark.cpu_only

MASKED = r"blocks.1.up.weight has masks of pruning, .*; call release\(\) of its masks"


def make(layers: dict[str, nn.Module], **options: Any) -> Elastic:
    given: dict[str, Any] = {"samples": networks.SAMPLES, "batch": 8, "seed": 5, **options}
    return make_elastic(layers, optimizer=networks.optimizer, loss=networks.loss, **given)


def refused_at_the_start(rank: int, group: Any) -> str:
    """What a rank is told of layers that are pruned on rank 1 alone."""
    layers = networks.layers(3)
    if rank == 1:
        magnitude(layers["blocks.1"], 0.5, group=ALONE)
    with pytest.raises(ValueError, match=MASKED) as told:
        make(layers, stages=2)
    return str(told.value)


def test_pruned_layers_begin_no_run(world):
    first, second = world(2).run(refused_at_the_start)
    assert first == second


def test_layers_that_are_pruned_meanwhile_stay_where_they_are():
    asked: list[int] = []
    elastic = make(networks.layers(3), policy=Callback(lambda _, frozen: asked.append(frozen) or 2))
    state = elastic.state_dict()
    masks = magnitude(elastic.layers["blocks.1"], 0.5, group=ALONE)
    for share in elastic.shares():
        elastic.step(*networks.rows(share.samples), share=share, lr=0.01)
    for call in (elastic.decide, lambda: elastic.load_state_dict(state)):
        with pytest.raises(ValueError, match=MASKED):
            call()
    assert elastic.frozen == 0
    assert not asked
    masks.release()
    elastic.decide()
    assert elastic.frozen == 2
    elastic.close()

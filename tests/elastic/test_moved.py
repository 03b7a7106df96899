"""Layers of an elastic run belong to it: a second owner is refused, and what is moved or replaced
is followed or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyops.data_parallel import DataParallel
from pyops.elastic import Elastic
from pyops.optim import AdamW
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.elastic import networks
from tests.elastic.flat import make_elastic

pytestmark = pytest.mark.cpu_only


def run_of(layers: dict[str, nn.Module]) -> Elastic:
    return make_elastic(
        layers,
        optimizer=networks.optimizer,
        loss=networks.loss,
        samples=networks.SAMPLES,
        batch=9,
        seed=5,
        stages=1,
    )


def steps(elastic: Elastic, count: int) -> list[float]:
    shares = elastic.shares(most=count)
    return [elastic.step(*networks.rows(each.samples), share=each, lr=0.05).loss for each in shares]


@pytest.mark.parametrize("second", ["DataParallel", "ZeroOptimizer", "Elastic"])
def test_a_second_owner_is_refused_until_the_run_is_closed(second):
    layers = networks.layers(2)
    elastic, plain = run_of(layers), run_of(networks.layers(2))
    whole = nn.ModuleList(layers.values())

    def wrap():
        if second == "Elastic":
            return run_of(layers)
        return (
            DataParallel(whole)
            if second == "DataParallel"
            else ZeroOptimizer(whole, AdamW, ZeroConfig(stage=1), lr=0.1)
        )

    with pytest.raises(ValueError, match=rf"{second}: .* belongs to an Elastic.*close\(\)"):
        wrap()
    assert steps(elastic, 3) == steps(plain, 3), "the first one goes on as if nothing had been"
    elastic.close()
    wrap().close()


@pytest.mark.parametrize("first", ["DataParallel", "ZeroOptimizer"])
def test_layers_of_another_owner_are_refused(first):
    layers = networks.layers(2)
    whole = nn.ModuleList(layers.values())
    owner = (
        DataParallel(whole)
        if first == "DataParallel"
        else ZeroOptimizer(whole, AdamW, ZeroConfig(stage=1), lr=0.1)
    )
    with pytest.raises(ValueError, match=rf"Elastic: .* belongs to a {first}"):
        run_of(layers)
    owner.close()
    run_of(layers).close()


def test_other_memory_is_followed():
    """An elastic run steps the parameters themselves, wherever they are; of the buffers it uses the
    gradients alone."""
    layers, others = networks.layers(2), networks.layers(2)
    elastic, plain = run_of(layers), run_of(others)
    assert steps(elastic, 1) == steps(plain, 1)
    for layer in layers.values():
        for parameter in layer.parameters():
            parameter.data = parameter.data.clone()
    found, wanted = steps(elastic, 2), steps(plain, 2)
    assert found == wanted
    assert found[0] != found[1]
    for name, layer in layers.items():
        for p, q in zip(layer.parameters(), others[name].parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("how", ["half", "replaced", "assign"])
def test_what_can_not_be_followed_is_refused(how):
    layers = networks.layers(2)
    elastic = run_of(layers)
    steps(elastic, 1)
    head = layers["head"]
    if how == "half":
        head.half()
    elif how == "replaced":
        head.weight = nn.Parameter(head.weight.detach().clone())
    else:
        head.load_state_dict(
            {name: value.clone() for name, value in head.state_dict().items()}, assign=True
        )
    before = [p.detach().clone() for layer in layers.values() for p in layer.parameters()]
    with pytest.raises(
        (ValueError, RuntimeError), match=r"is another Parameter now|must have the same dtype"
    ):
        steps(elastic, 1)
    after = [p for layer in layers.values() for p in layer.parameters()]
    assert all(torch.equal(p, q) for p, q in zip(after, before, strict=True)), "nothing is changed"

"""Layers that come on the meta device: each rank gives memory and first values to its own, and to
no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops.elastic import Bound, Elastic
from pyops.elastic.layout.layer_memory import is_held, take
from tests.elastic import networks
from tests.elastic.flat import make_elastic

pytestmark = pytest.mark.cpu_only

BLOCKS, EPOCHS = 4, 4


class Table(nn.Module):
    """One for all blocks, in no state_dict, as that of rotary positions is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, networks.WIDTH), persistent=False)


class Block(networks.Block):
    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.table.scale)


def layers() -> dict[str, nn.Module]:
    made = networks.layers(BLOCKS)
    table = Table()
    for name, layer in made.items():
        if name.startswith("blocks."):
            made[name] = Block(table)
            made[name].load_state_dict(layer.state_dict())
    return made


def trained(
    rank: int, group: Any, on_meta: bool
) -> tuple[list[str], list[str], list[float], dict[str, Tensor]]:
    """(layers that were given first values at the start, in all, losses, weights)"""
    real, filled = layers(), []

    def initialise(name: str, layer: nn.Module) -> None:
        filled.append(name)
        layer.load_state_dict(real[name].state_dict())
        for own, buffer in layer.named_buffers():
            buffer.copy_(real[name].get_buffer(own))

    given = layers()
    if on_meta:
        for layer in given.values():
            layer.to("meta")
    elastic = make_elastic(
        given,
        optimizer=networks.optimizer,
        loss=networks.loss,
        samples=networks.SAMPLES,
        batch=8,
        seed=5,
        stages=4,
        policy=Bound(1 / 2),
        max_grad_norm=0.5,
        initialize=initialise if on_meta else None,
        costs=[4.0] + [1.0] * 5,
    )
    first = list(filled)
    assert [name for name, layer in given.items() if is_held(layer)] == (
        first or list(elastic_names(elastic))
    )
    losses = []
    for _ in range(EPOCHS):
        for share in elastic.shares():
            losses.append(
                elastic.step(
                    *networks.rows(share.samples), share=share, lr=networks.lr_of(share.step)
                ).loss
            )
        elastic.decide()
    weights = {
        name: t.clone()
        for each in elastic.states().values()
        for name, t in each["parameters"].items()
    }
    assert elastic.layout.stages == 1
    elastic.close()
    return first, filled, losses, weights


def test_what_is_held_keeps_its_values_when_a_table_comes():
    layer = nn.Linear(3, 3)
    layer.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    before = layer.weight.detach().clone()

    def initialise(layer: nn.Module) -> None:
        layer.weight.fill_(7.0)
        layer.table.fill_(2.0)

    take(layer, None, device=torch.device("cpu"), initialize=initialise)
    assert torch.equal(layer.weight, before)
    assert layer.table.tolist() == [2.0] * 3


def elastic_names(elastic: Elastic) -> list[str]:
    return [list(elastic.layers)[number] for number in elastic.layout.layers(elastic.rank)]


def test_a_run_from_meta_equals_one_from_memory(world):
    ours, theirs = (world(4).run(trained, on_meta) for on_meta in (True, False))
    assert sorted(name for first, *_ in ours for name in first) == sorted(layers()), (
        "each layer on one rank"
    )
    assert ours[0][0] == ["embedding"]
    assert "blocks.0" in ours[0][1], "whose table nobody sends"
    for own, other in zip(ours, theirs, strict=True):
        assert own[2] == other[2]
        assert own[3].keys() == other[3].keys() == theirs[0][3].keys()
        assert all(torch.equal(value, other[3][name]) for name, value in own[3].items())
    assert ours[0][2][-1] < ours[0][2][0]

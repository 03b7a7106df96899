"""What a micro-batch costs besides its rows, and what that makes of their number."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pyops.elastic.planning import overhead
from pyops.elastic.planning.overhead import MOST, _crossing, machine_of, rows_besides
from pyops.pipeline import LayerCosts, Profile, profile
from tests.elastic.flat import pack

pytestmark = pytest.mark.cpu_only


def test_the_straight_line_by_hand():
    assert _crossing(4, 26.0, 16, 50.0) == pytest.approx(9.0)
    assert _crossing(1, 1.0, 4, 4.0) == 0.0
    assert _crossing(1, 1.0, 4, 40.0) == 0.0  # a line that begins below 0
    assert _crossing(1, 2.0, 4, 2.0) == MOST  # rows that cost nothing
    assert _crossing(1, 2.0, 4, 1.0) == MOST


def test_it_is_measured_with_code_rows_and_with_many(monkeypatch):
    asked = []

    def rows_of(count: int) -> tuple[Tensor, Tensor, dict]:
        asked.append(count)
        return torch.ones(count, 3), torch.zeros(count, 3), {}

    def profiled(layers: list[nn.Module], x: Tensor, **options: object) -> Profile:
        profile(layers, x, **options)  # takes what it is given
        each = LayerCosts(forward=0.005 + 0.001 * len(x), backward=0.005 + 0.001 * len(x))
        return Profile((each, each))

    monkeypatch.setattr(overhead, "profile", profiled)
    layers = [nn.Identity(), nn.Linear(3, 3)]
    found = rows_besides(
        lambda: layers, rows_of, loss=lambda y, target: (y - target).sum(), rows=16, rounds=1
    )
    assert asked == [4, 16]
    assert found == pytest.approx(5.0)
    assert layers[1].weight.grad is None


def layers_with(*parameters: int) -> list[nn.Module]:
    return [nn.ParameterList([torch.zeros(count)]) for count in parameters]


def test_few_micro_batches_where_each_costs_much():
    costs = [1, *[10] * 6, 1]
    several = {}
    for besides in (0.0, 0.5, 5.0, 100.0):
        machine = replace(machine_of(layers_with(*costs), besides=besides, stages=4), devices=4)
        several[besides] = pack(
            list(map(float, costs)), frozen=0, stages=4, machine=machine, batch=64
        ).micro_batches
    assert several[0.0] == 32
    assert several[100.0] == 4
    assert list(several.values()) == sorted(several.values(), reverse=True)
    assert len(set(several.values())) > 2


def test_its_unit_is_a_row():
    # One stage has all: a micro-batch of 8 rows that costs 8 rows besides takes as long as 16 rows.
    plain, dear = (
        pack(
            [3.0, 6.0, 3.0],
            frozen=0,
            stages=1,
            machine=machine_of(layers_with(3, 6, 3), besides=besides, stages=1),
            batch=8,
        )
        for besides in (0.0, 8.0)
    )
    assert (plain.micro_batches, dear.micro_batches) == (1, 1)
    assert plain.time == pytest.approx(8 * 12.0)
    assert dear.time == pytest.approx(2 * plain.time)

"""What "auto" chooses by: a line through two timings for each candidate, the first unless another
is clearly faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import pyops
from pyops.comm.collectives import probe
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.probe import TABLE_WIDTH, Cost, fastest
from tests.workers import COSTS

pytestmark = pytest.mark.cpu_only


def test_the_fastest_depends_on_the_size():
    table = {"shared_memory": Cost(10e-6, 1e-9), "ring": Cost(100e-6, 0.1e-9)}
    assert fastest(table, nbytes=4096) == "shared_memory"
    assert fastest(table, nbytes=1 << 30) == "ring"


def test_a_timing_that_is_a_little_better_does_not_count():
    assert fastest({"first": Cost(10e-6, 0.0), "second": Cost(8e-6, 0.0)}, nbytes=1) == "first"
    assert fastest({"first": Cost(10e-6, 0.0), "second": Cost(4e-6, 0.0)}, nbytes=1) == "second"


def test_a_line_goes_through_both_timings(monkeypatch: pytest.MonkeyPatch):
    seconds = {("a", 4096): 5e-6, ("a", 1 << 20): 105e-6, ("b", 4096): 50e-6, ("b", 1 << 20): 40e-6}
    calls = []

    def timed(run, tensor: torch.Tensor) -> float:
        run(tensor)
        name, nbytes = calls[-1]
        first = len(calls) <= 4  # the turn that warms up must not count
        return seconds[name, nbytes] / (1000 if first else 1)

    monkeypatch.setattr(probe, "_time", timed)
    runners = {
        name: lambda x, name=name: calls.append((name, x.numel() * x.element_size()))
        for name in "ab"
    }
    table = probe.measure(runners, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert table["a"].seconds(4096) == pytest.approx(5e-6)
    assert table["a"].seconds(1 << 20) == pytest.approx(105e-6)
    assert table["b"] == Cost(pytest.approx(50e-6), 0.0), (
        "a larger tensor that took less time says nothing of bandwidth"
    )


@pytest.mark.parametrize("slow", ["this rank", "another rank", "no rank"])
def test_turns_end_early_where_they_take_long_on_a_rank(slow: str, monkeypatch: pytest.MonkeyPatch):
    def timed(run, tensor: torch.Tensor) -> float:
        run(tensor)
        large = tensor.numel() * tensor.element_size() == 1 << 20
        return 0.09 if large and slow == "this rank" else 1e-6

    sizes, told = [], []

    def reduces(tensor: torch.Tensor) -> None:
        sizes.append(tensor.numel() * tensor.element_size())
        told.append(bool(tensor.any()))
        if slow == "another rank" and len(sizes) == 9:
            tensor += 1  # its flag, after two turns of two candidates at two sizes

    monkeypatch.setattr(probe, "_time", timed)
    runners = {"a": reduces, "b": reduces}
    probe.measure(runners, dtype=torch.float32, device=torch.device("cpu"))
    assert sum(told) == (slow == "this rank"), "the other ranks hear of it"
    turns = 9 if slow == "no rank" else 2
    assert sizes.count(1 << 20) == 2 * turns
    assert sizes.count(4096) == 2 * turns + turns - 1


def test_a_table_goes_round_unchanged_and_fits():
    table = {
        name: Cost(1.2345678901234567e-05, 1.2345678901234567e-10)
        for name in ("shared_memory", "two_shot", "native")
    }
    text = probe.to_json(table)
    assert len(text.encode()) <= TABLE_WIDTH
    assert probe.from_json(text) == table


def _measured(rank: int, group: Any) -> Any:
    presumed, tables = Communicator.presumed_costs, []
    try:
        for costs in ({}, presumed, {("cpu", "torch.float32"): {"ring": Cost(1e-9, 0.0)}}):
            Communicator.presumed_costs = costs
            fresh = dist.new_group(backend="gloo")
            assert torch.equal(
                pyops.comm.all_reduce(torch.ones(5), group=fresh), torch.full((5,), 2.0)
            )
            tables.append(Communicator.of(fresh)._costs[("cpu", "torch.float32")])
    finally:
        Communicator.presumed_costs = presumed
    return tables


def test_a_new_group_measures_unless_the_costs_are_presumed(world: Any):
    first, second = world(2).run(_measured)
    assert first == second, "every rank goes by the table of rank 0"
    measured, presumed, of_too_few = first
    assert set(measured) == {"shared_memory", "two_shot", "ring"}
    assert all(cost.latency > 0 or cost.per_byte > 0 for cost in measured.values())
    assert presumed == {name: COSTS[name] for name in measured}
    assert set(of_too_few) == set(measured), "a table that lacks an algorithm does not count"

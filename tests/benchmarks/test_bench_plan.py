"""What the bench of the planner makes of its measurements."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.instruments.verdicts import verdicts
from benchmarks.plan import bench_plan, measured_laptop
from benchmarks.plan.bench_plan import Measured, rank_correlation
from benchmarks.plan.plan_teams import LAYOUTS, SIZES
from benchmarks.plan.planned_choices import Choice
from pyops.plan import Case, Layout, Line, Machine, MeasuredCosts, load_cluster, step_time
from pyops.plan.clusters import cluster_of
from pyops.plan.measuring.machine import WIDTHS
from tests.plan.shapes import TINY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.cpu_only

MACHINE = Machine("one", {"fp32": dict.fromkeys(WIDTHS, 1e10)}, 1e10, 8.0, 1, 1e-5, 1e9)
LINES = {1: Line(1e-3, 1e-3)}
COSTS = MeasuredCosts(LINES, LINES, LINES, LINES, Line(0.0, 1e-9), launch=1e-5)
CASE = Case(TINY, MACHINE.cluster(), bench_plan.SOFTWARE, "fp32", COSTS)


def made(*, overheads: tuple[float, float]) -> list[Measured]:
    """Layouts whose steps take what is predicted with these overheads; every third one fitted."""
    costs = replace(COSTS, of_a_message=overheads[0], straggling=overheads[1])
    found = []
    for number in range(6):
        layout = Layout(dp=1 + number // 3, micro_batch=1 + number % 2, num_microbatches=1 + number)
        seconds = step_time(replace(CASE, measured=costs), layout).total
        found.append(Measured(layout, (seconds,) * 5, 1.0, CASE, number % 3 == 0))
    return found


def test_rank_correlation():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == -1.0
    assert rank_correlation([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(0.8)


@pytest.mark.full
def test_overheads_are_found_again_and_hold_for_layouts_that_were_held_out():
    found = made(overheads=(400.0, 0.1))
    assert bench_plan.fit(found) == pytest.approx((400.0, 0.1))
    fitted = bench_plan.with_overheads(found, (400.0, 0.1))
    assert all(each.planned == pytest.approx(each.step) for each in fitted)
    together = bench_plan.together(fitted)
    assert together["rank_correlation"] == 1.0
    assert together["best_predicted_over_best"] == 1.0
    assert together["held_out_off_most"] < 1e-9
    slower = [replace(each, seconds=(1.1 * each.step,)) for each in fitted]
    assert bench_plan.together(slower)["held_out_off_most"] == pytest.approx(1 - 1 / 1.1)


def test_the_overheads_of_a_gpt_are_used_where_none_are_fitted(monkeypatch: pytest.MonkeyPatch):
    """Then every layout is held out."""
    found = [replace(each, fitted=False) for each in made(overheads=(400.0, 0.1))]
    monkeypatch.setattr(bench_plan, "measured", lambda tried, rounds: found)
    tried = bench_plan.Tried("", "", {}, (1,), lambda _: CASE, fits=False)
    *rows, last = bench_plan.run_tried(SimpleNamespace(rounds=5), tried, bench="plan_images")
    assert last["overheads"] == [COSTS.of_a_message, COSTS.straggling]
    alone = made(overheads=(COSTS.of_a_message, COSTS.straggling))
    assert rows[-1]["planned_ms"] == pytest.approx(1e3 * alone[-1].step, rel=1e-3)


def test_rows_have_what_was_measured_and_predicted():
    *rows, last = bench_plan.rows_of(made(overheads=(0.0, 0.0)), rounds=5, overheads=(0.0, 0.0))
    assert [row["fitted"] for row in rows] == [True, False, False] * 2
    assert rows[0]["case"] == "1 process, 1 x 1 rows"
    assert rows[0]["us"]["a step"][1] == pytest.approx(
        1e6 * made(overheads=(0.0, 0.0))[0].step, 1e-4
    )
    assert last["case"] == "6 layouts together"
    assert last["overheads"] == [0.0, 0.0]


def test_a_search_has_a_row():
    choice = Choice("GPT", TINY, load_cluster("h100").with_devices(2), 4)
    row = bench_plan.search_row(choice)
    assert row["case"] == "search, GPT on 2 devices"
    assert row["layouts"] == choice.plan().num_tried
    assert 0 < row["us"]["best"][1] < 30e6
    # Not this process's own memory, of which other tests have taken some.
    assert all(verdict.met for verdict in verdicts({**row, "process_gib": 0.5}))
    assert verdicts({**row, "process_gib": 1.5})[-1].met is False


def test_the_layouts_are_twenty_and_share_the_rows():
    every = [(n, layout) for n, several in LAYOUTS.items() for layout in several]
    assert len(every) == 20
    for ranks, layout in every:
        layout.validate()
        assert (layout.num_ranks, layout.batch) == (ranks, SIZES["reference"].batch)


def test_the_file_of_a_laptop_is_written_anew():
    text = measured_laptop.FILE.read_text()
    found = measured_laptop.figures([MACHINE, replace(MACHINE, copy=3e10), MACHINE])
    new = measured_laptop.rewritten(text, found, name="X1", source="3 calls, 2030-01-02")
    tree = tomllib.loads(new)
    cluster = cluster_of(tree)
    assert cluster.device.name == "core of an X1"
    assert cluster.device.memory_bandwidth == 1e10
    assert cluster.device.peak == {"fp32": 1e10, "bf16": 478e9}
    assert (cluster.node.bandwidth, cluster.network.latency) == (1e9, 1e-5)
    assert cluster.sources["device"].endswith("the median of 3 calls, 2030-01-02")
    assert cluster.device.efficiency == load_cluster("laptop").device.efficiency

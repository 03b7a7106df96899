"""Blocks measured in place of formulas; ranks that take turns on processors; layouts tried."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from pyops.plan import (
    PYOPS,
    Case,
    Layout,
    Line,
    Machine,
    MeasuredCosts,
    ModelShape,
    Options,
    Plan,
    PlanError,
    best,
    explain,
    measure_blocks,
    memory,
    step_time,
)
from pyops.plan.costs.times import COMPUTED
from pyops.plan.layouts.reasons import strategies_of
from pyops.plan.measuring.machine import WIDTHS
from tests.plan.shapes import TINY, gpt

pytestmark = pytest.mark.cpu_only

RATES = dict.fromkeys(WIDTHS, 20e9)
MACHINE = Machine("a machine", {"fp32": RATES}, 10e9, 8.0, 4, 50e-6, 2e9, 2)
COSTS = MeasuredCosts(
    forward={1: Line(1e-3, 2e-3), 2: Line(1e-3, 1e-3)},
    backward={1: Line(2e-3, 4e-3), 2: Line(2e-3, 2e-3)},
    ends_forward={1: Line(0.0, 1e-3), 2: Line(0.0, 1e-3)},
    ends_backward={1: Line(0.0, 2e-3), 2: Line(0.0, 2e-3)},
    optimizer=Line(0.0, 1e-9),
    launch=1e-6,
    again=0.75,
    of_a_message=1000.0,
    straggling=0.0,
)
SHAPE = gpt(4, 64, 4, vocab=96, sequence=32)
ALONE = replace(PYOPS, straggling=0.0)


def of(layout: Layout, **changes: Any) -> Any:
    cluster = replace(MACHINE.cluster(devices=layout.num_ranks), processors=0)
    costs = replace(COSTS, **changes)
    return step_time(Case(SHAPE, cluster, ALONE, "fp32", costs), layout)


def test_a_line_goes_through_two_points():
    line = Line.through((1.0, 3.0), (4.0, 9.0))
    assert (line.fixed, line.each) == (1.0, 2.0)
    assert line.at(10) == 21.0
    steep = Line.through((1.0, 1.0), (4.0, 8.0))  # which would begin below nothing
    assert (steep.fixed, steep.each) == (0.0, 2.0)


def test_a_step_is_made_of_what_was_measured():
    """Two rows in each of three micro-batches on one rank: four blocks of 5 and 10 ms, ends of 6,
    and no messages; 1 ns for each parameter."""
    found = of(Layout(micro_batch=2, num_microbatches=3))
    computed = found.products + found.attention + found.between
    assert computed == pytest.approx(3 * (4 * (5 + 10) + 6) * 1e-3)
    assert found.host == 0.0
    assert found.optimizer == pytest.approx(1e-9 * SHAPE.num_parameters)
    assert found.recomputed == 0.0
    again = of(Layout(micro_batch=2, num_microbatches=3, recompute="block"))
    assert again.recomputed == pytest.approx(3 * 4 * 0.75 * 5e-3)


@pytest.mark.parametrize(
    ("layout", "messages"),
    [
        (Layout(dp=2), 3 + 1),
        (Layout(dp=2, zero=3, num_microbatches=2), 3 + 2 * 3 * 5),
        (Layout(tp=2, num_microbatches=2), 3 + 2 * (4 * 4 + 4)),
        (Layout(tp=2, sequence_parallel=True), 3 + 4 * 6 + 4),
        (Layout(pp=2, schedule="1f1b", num_microbatches=4), 3 + 2 * 4),
        (Layout(cp=2), 3 + 3 * 4 + 1),
    ],
    ids=str,
)
def test_each_message_takes_the_host_some_time(layout: Layout, messages: int):
    """1,000 operations of a microsecond each, four blocks."""
    assert of(layout).host == pytest.approx(1000 * messages * 1e-6)


def test_several_ranks_wait_for_the_slowest_and_one_for_nobody():
    """The largest of n numbers with a deviation of 0.1 is about 0.1 sqrt(2 ln n) above them."""
    alone = Layout(micro_batch=2, num_microbatches=3, recompute="block")
    assert of(alone, straggling=0.1) == of(alone)
    for layout in (Layout(dp=2, micro_batch=2), Layout(tp=2, dp=2, micro_batch=2)):
        ranks = 1.0 + 0.1 * math.sqrt(2.0 * math.log(layout.num_ranks))
        assert of(layout, straggling=0.1).total == pytest.approx(ranks * of(layout).total)


def test_ranks_of_tp_have_the_blocks_that_were_measured_for_them():
    found = of(Layout(tp=2, micro_batch=2))
    assert found.products + found.attention + found.between == pytest.approx(
        (4 * (3 + 6) + 6) * 1e-3
    )
    unknown = of(Layout(tp=4, micro_batch=2))  # by the formulas, in their place
    assert unknown.products != pytest.approx(found.products)


def test_sequence_parallel_ranks_compute_a_part_of_what_lies_between_the_layers():
    plain = of(Layout(tp=2, micro_batch=2))
    cut = of(Layout(tp=2, micro_batch=2, sequence_parallel=True))
    assert cut.products == pytest.approx(plain.products)
    assert cut.attention == pytest.approx(plain.attention)
    # All of it but what the MLP's activation moves, and the ends.
    assert 0.4 * plain.between < cut.between < 0.9 * plain.between


def test_ranks_of_cp_have_a_part_of_the_rows():
    whole, half = of(Layout(micro_batch=1)), of(Layout(cp=2, micro_batch=2))
    first, second = (each.products + each.attention + each.between for each in (whole, half))
    assert first == pytest.approx(second)


def test_more_ranks_than_processors_take_turns():
    """Four copies on two processors take twice as long; a pipeline waits less than it did."""
    cluster = MACHINE.cluster()
    assert cluster.processors == 2
    case = Case(SHAPE, cluster, ALONE, "fp32", COSTS)
    layout = Layout(dp=4, micro_batch=2)
    found = step_time(case, layout)
    busy = sum(getattr(found, name) for name in COMPUTED)
    assert found.crowding == pytest.approx(busy)
    # Messages were timed with four ranks, turns and all.
    assert found.data_messages > 0
    assert found.total == pytest.approx(2 * busy + found.data_messages)
    assert step_time(replace(case, cluster=replace(cluster, processors=4)), layout).crowding == 0
    staged = Layout(pp=4, schedule="1f1b", num_microbatches=4)
    crowded = step_time(case, staged)
    assert crowded.idle > 0
    assert crowded.total < 2 * (crowded.total - crowded.crowding)


def test_blocks_are_measured_here():
    shape = gpt(2, 32, 2, vocab=64, sequence=16)
    found = measure_blocks(shape, tp=(1, 2, 3))
    assert set(found.forward) == set(found.backward) == {1, 2}
    for lines in (found.forward, found.backward):
        assert all(1e-6 < line.at(4) < 1.0 for line in lines.values())
    assert 0 < found.launch < 1e-3
    assert 0 < found.optimizer.at(1 << 20) < 1.0
    assert found.facts["ranks"] == "1"
    with pytest.raises(PlanError, match="precision is 'fp8'; choose one of fp32, bf16, fp16"):
        measure_blocks(shape, precision="fp8")


def test_the_gpt_of_a_shape_has_its_parameters():
    for shape in (TINY, replace(TINY, gated=True, rms_norm=True, bias=False, hidden=96)):
        assert ModelShape.of_gpt(shape.gpt_config(), name=shape.name) == replace(
            shape, num_kv_heads=4, head_dim=16, hidden=shape.inner
        )
        part = ModelShape.of_gpt(shape.gpt_config(tp=2, num_layers=1))
        assert (part.num_layers, part.num_heads, part.vocab_size) == (1, 2, 48)
        assert 2 * part.block_matrices == shape.block_matrices


@pytest.fixture
def plan() -> Plan:
    return best(SHAPE, MACHINE.cluster(), Options(batch=8, precision="fp32"), measured=COSTS)


def test_the_fastest_of_those_tried_comes_first(plan: Plan):
    every = [plan.best.layout, *(each.layout for each in plan.runners_up)]
    found = plan.tried([0.3, 0.1, 0.2])
    assert [found.best.layout, *(each.layout for each in found.runners_up[:2])] == [
        every[1],
        every[2],
        every[0],
    ]
    assert found.best.seconds == 0.1
    assert found.runners_up[2:] == plan.runners_up[2:]
    same = replace(plan, best=plan.runners_up[0])
    assert found.parallel_part == same.parallel_part  # of what was predicted
    assert not set(dict(found.reasons)) & set(strategies_of(found.layout))
    assert "a step: 100 ms, measured; predicted were" in explain(found)
    assert Plan.from_json(found.to_json()) == found
    for wrong in ([], [0.0], [1.0] * 99):
        with pytest.raises(PlanError, match="give times above 0 of 1 to 10 layouts"):
            plan.tried(wrong)


def test_a_plan_with_measured_blocks_goes_through_json(plan: Plan):
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.measured
    assert "from blocks, the optimizer and links as they were measured" in explain(plan)
    assert plan.cluster.processors == 2


def test_only_what_was_measured_is_searched(plan: Plan):
    """Blocks were measured for tp 1 and 2, of four ranks."""
    assert {each.layout.tp for each in (plan.best, *plan.runners_up)} <= {1, 2}
    with pytest.raises(PlanError, match="fixed is tp=4, which no layout of 4 devices"):
        options = Options(batch=8, precision="fp32", fixed={"tp": 4})
        best(SHAPE, MACHINE.cluster(), options, measured=COSTS)


def test_every_term_is_counted(plan: Plan):
    found = plan.best.time
    assert found.total == pytest.approx(sum(getattr(found, f.name) for f in fields(found)))
    assert memory(SHAPE, plan.layout, PYOPS, precision="fp32").total > 0

"""The search: what is chosen, why not the others, and what a plan becomes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyops.config import load_config, plan_for_run
from pyops.plan import (
    PYOPS,
    Case,
    Layout,
    Link,
    ModelShape,
    Options,
    Plan,
    PlanError,
    best,
    load_cluster,
    search,
)
from pyops.plan.show import explain, summary, table
from tests.grids import full
from tests.plan.shapes import LLAMA_8B, TINY, gpt, llama

pytestmark = pytest.mark.cpu_only

H100 = load_cluster("h100")
MODEL = {"vocab_size": 8192, "sequence_length": 2048, "num_layers": 8, "num_heads": 16, "dim": 2048}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return best(LLAMA_8B, H100.with_devices(8), Options(batch=16))


def of(shape: ModelShape, devices: int, **options: Any) -> Plan:
    fixed = options.pop("fixed", {})
    return best(shape, H100.with_devices(devices), Options(fixed=fixed, **options))


def test_a_small_model_is_only_copied():
    found = of(gpt(8, 1024, 8, vocab=8192), 8, batch=64)
    assert (found.layout.tp, found.layout.pp, found.layout.dp) == (1, 1, 8)
    assert found.best.memory.gib < 80


def test_a_model_whose_states_fit_on_no_device_is_shared_out(plan: Plan):
    assert plan.layout.zero or plan.layout.tp * plan.layout.pp > 1
    reasons = dict(plan.reasons)
    assert "GiB at the least" in reasons["one rank a copy, whole (dp)"]
    assert "most of it states" in reasons["one rank a copy, whole (dp)"]
    assert "slower" in reasons["tp alone"]
    assert plan.num_fitting < plan.num_tried


# The choice between pipeline and ZeRO needs neither the other schedules nor the other ways to
# recompute, and without them the search is a fifteenth as long.
@pytest.mark.parametrize("fixed", [{"schedule": "1f1b", "recompute": "block"}, full({})], ids=str)
def test_slow_links_move_the_choice_to_fewer_messages(fixed: dict[str, str]):
    """The same 70 billion on a network a hundredth as fast: less ZeRO 3, more of the pipeline."""
    shape, options = llama(80, 8192, 64, 28672), Options(batch=128, fixed=fixed)
    fast = best(shape, H100.with_devices(64), options)
    slow = replace(H100, network=replace(H100.network, bandwidth=0.5e9))
    other = best(shape, slow.with_devices(64), options)
    assert other.layout.pp > fast.layout.pp
    assert other.best.seconds > fast.best.seconds


def test_of_layouts_that_are_alike_that_with_fewer_axes_is_taken():
    """With endless links, and products whose width does not matter, tp with sequence parallelism
    takes as long as copies, and less memory."""
    efficiency = replace(H100.device.efficiency, half_width=0.0)
    endless = Link(1e30, 1.0, 0.0, 0.0)
    device = replace(H100.device, efficiency=efficiency)
    cluster = replace(H100, device=device, node=endless, num_devices=8)
    case = Case(gpt(8, 4096, 2, vocab=8192), cluster, PYOPS)
    chosen, *others = search(case, Options(batch=64)).fitting
    alike = [each for each in others if each.seconds < 1.01 * chosen.seconds]
    assert chosen.layout.axes_used == 1
    assert any(each.layout.tp > 1 and each.memory.total < chosen.memory.total for each in alike), (
        sorted({str(each.layout) for each in alike})
    )


def test_what_is_fixed_is_kept():
    for fixed in ({"tp": 2}, {"pp": 2, "schedule": "zb1p"}, {"zero": 3}, {"recompute": "block"}):
        found = of(LLAMA_8B, 8, batch=16, fixed=fixed)
        for each in (found.best, *found.runners_up):
            assert all(getattr(each.layout, name) == value for name, value in fixed.items())


def test_every_layout_makes_the_grid_and_the_batch(plan: Plan):
    for each in (plan.best, *plan.runners_up):
        each.layout.validate()
        assert (each.layout.num_ranks, each.layout.batch) == (8, 16)
        assert each.memory.gib <= 0.92 * 80


def test_a_plan_goes_through_json(plan: Plan):
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert json.loads(text)["summary"]["seconds"] == plan.best.seconds
    for damaged in ("{", "[]", '{"format": 1}', text.replace('"format": 2', '"format": 9')):
        with pytest.raises(PlanError, match=r"no plan in JSON|format [19], expected 2"):
            Plan.from_json(damaged)


@pytest.mark.parametrize(
    ("devices", "fixed"),
    [
        (1, {}),
        (8, {"zero": 3, "recompute": "block"}),
        (4, {"tp": 2, "pp": 2, "schedule": "interleaved", "sequence_parallel": True}),
        (4, {"pp": 4, "schedule": "zbv"}),
    ],
)
def test_the_file_of_a_plan_is_what_pyops_train_takes(tmp_path: Path, devices: int, fixed: dict):
    """Its layout is that of the ParallelPlan that a run makes of the file."""
    shape = ModelShape.of_numbers(MODEL)
    found = of(shape, devices, batch=64, fixed=fixed)
    file = tmp_path / "plan.toml"
    file.write_text(found.toml(model=MODEL))
    config = load_config(file)
    config.check_ranks(devices)
    layout, ours = found.layout, found.parallel_plan()
    ours.validate()
    ours.axes(devices)
    theirs = plan_for_run(config, num_rows=64 // layout.dp)
    for name in ("tp", "pp", "dp", "sequence_parallel", "recompute", "precision"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.microbatches, ours.zero.stage) == (theirs.microbatches, theirs.zero.stage)
    assert ours.pipeline.schedule == theirs.pipeline.schedule
    assert ours.pipeline.stages_per_rank == theirs.pipeline.stages_per_rank
    assert theirs.microbatches == layout.num_microbatches


def test_the_command_starts_as_many_ranks():
    assert " --nproc-per-node 4 " in of(TINY, 4, batch=8).command("x.toml")
    assert "--nnodes 2 " in of(TINY, 16, batch=16).command()


def test_the_text_says_what_was_found(plan: Plan):
    assert "8.03 billion parameters, on 8 x NVIDIA H100 SXM (1 node)" in summary(plan)
    lines = table(plan, rows=4).splitlines()
    assert len(lines) == 5
    assert lines[1].startswith(f"* {plan.layout}")
    text = explain(plan, tokens=1e12)
    for part in ("activations", "why not simpler", "Amdahl", "failures: one in", "MFU: 6 (N - E)"):
        assert part in text
    for figure in plan.cluster.sources:
        assert figure in text


def test_the_largest_search_is_quick_and_small():
    """405 billion parameters on 16,384 devices."""
    found = of(llama(126, 16384, 128, 53248), 16384, batch=2048)
    assert found.num_tried > 100
    assert found.layout.pp > 1


def test_a_model_that_fits_nowhere_is_told_what_is_missing():
    shape = llama(126, 16384, 128, 53248)
    with pytest.raises(
        PlanError, match=r"406 billion .* fits on no layout of 8 x NVIDIA.* GiB .* more than"
    ):
        of(shape, 8, batch=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": -1}, "batch is -1; give a whole number of rows, 0 or more"),
        ({"precision": "fp64"}, "precision is 'fp64'; choose one of fp32, bf16, fp16"),
        ({"memory_part": 0.0}, r"memory_part is 0.0; give a number above 0, up to 1"),
        ({"memory_part": 1.5}, r"memory_part is 1.5; give a number above 0, up to 1"),
        ({"optimizer_bytes": -4.0}, "optimizer_bytes is -4.0; give 8 for Adam"),
        ({"recompute": ("all",)}, "recompute has 'all'; choose among none, attention, block"),
        ({"fixed": {"ep": 2}}, "fixed has ep=2: pyops has no layer of experts"),
        ({"fixed": {"rows": 2}}, "fixed has 'rows', which a layout has not; it has tp"),
        ({"fixed": {"tp": 3}}, r"fixed is tp=3, which no layout of 8 devices with 16 rows"),
        ({"batch": 7}, "batch is 7 rows, which no layout of 8 devices can share"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str):
    shape = replace(TINY, num_layers=1, num_heads=1)
    with pytest.raises(PlanError, match=message):
        best(shape, H100.with_devices(8), Options(**{"batch": 16, **options}))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tp=0), "tp is 0; give a whole number, 1 or more"),
        (Layout(zero=4), "zero is 4; choose one of 0, 1, 2, 3"),
        (Layout(pp=2), "schedule is 'none' with pp 2; give schedule=\"1f1b\""),
        (Layout(schedule="1f1b"), "schedule is '1f1b' with pp 1; leave schedule out"),
        (Layout(recompute="all"), "recompute is 'all'; choose one of none, attention, block"),
        (
            Layout(pp=2, schedule="1f1b", stages_per_rank=2),
            "stages_per_rank is 2, but schedule '1f1b' has 1",
        ),
        (Layout(sequence_parallel=True), "sequence_parallel is True with tp 1"),
    ],
)
def test_layouts_that_make_no_sense_are_refused(layout: Layout, message: str):
    with pytest.raises(PlanError, match=message):
        layout.validate()


def test_rows_that_copies_can_not_share_are_refused():
    assert Layout(dp=4, micro_batch=2).with_batch(64).num_microbatches == 8
    with pytest.raises(PlanError, match=r"batch is 12 rows, which dp 4 x micro_batch 2 = 8 do not"):
        Layout(dp=4, micro_batch=2).with_batch(12)


def test_planning_imports_nothing_of_the_trainer():
    source = Path(sys.modules["pyops.plan"].__file__).parent
    assert not [p for p in source.glob("*.py") if "pyops.train" in p.read_text()]

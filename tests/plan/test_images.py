"""CoAtNets in the planner: memory and time of layouts, the search, and what is refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace
from typing import Any

import pytest

from benchmarks.plan.plan_image_teams import IMAGE_LAYOUTS, IMAGE_SIZES, ImageTrial, case_of
from benchmarks.plan.plan_teams import Ranks
from pyops.plan import (
    PYOPS,
    ImageCase,
    ImageShape,
    Layout,
    Line,
    MeasuredLayers,
    Memory,
    Options,
    Plan,
    PlanError,
    best,
    image_memory,
    image_step,
    load_cluster,
    summary,
    table,
)
from pyops.plan.costs.images import stage_bounds
from tests.plan.test_measured import COSTS

pytestmark = pytest.mark.cpu_only

H100 = load_cluster("h100")
SIZE = IMAGE_SIZES["tiny"]
ZERO = ImageShape.named("coatnet-0")


def case(shape: ImageShape, devices: int = 8) -> ImageCase:
    return ImageCase(shape, H100.with_devices(devices), PYOPS)


def even(shape: ImageShape) -> MeasuredLayers:
    """Every layer takes 1 ms and 1 ms an image, and twice that in backward."""
    number = shape.num_layers
    forward, backward = (Line(1e-3, 1e-3),) * number, (Line(2e-3, 2e-3),) * number
    return MeasuredLayers({1: forward}, {1: backward}, Line(0.0, 1e-9), launch=0.0)


PEAKS = (
    Layout(dp=2, zero=3, micro_batch=4),
    Layout(dp=2, micro_batch=4, recompute="block"),
    Layout(pp=2, schedule="1f1b", micro_batch=2, num_microbatches=4),
)


def _peaks(rank: int, group: Any) -> list[float]:
    found = case_of(SIZE, load_cluster("laptop"), even(SIZE.shape))

    def trial(layout: Layout) -> ImageTrial:
        return ImageTrial(SIZE, layout, stage_bounds(found, layout))

    return Ranks({2: PEAKS}, make=trial, costs=lambda _: None).prepare()


@pytest.mark.full
def test_peaks_are_within_five_percent_of_those_counted(world):
    found = case_of(SIZE, load_cluster("laptop"), even(SIZE.shape))
    first, second = world(2).run(_peaks)
    for layout, *counted in zip(PEAKS, first, second, strict=True):
        taken = image_memory(found, layout)
        predicted = taken.total - taken.reserved
        assert predicted == pytest.approx(max(counted), rel=0.05), layout


@pytest.mark.parametrize(
    ("less", "more"),
    [
        (Layout(dp=8, zero=3), Layout(dp=8, zero=2)),
        (Layout(dp=8, zero=2), Layout(dp=8, zero=1)),
        (Layout(dp=8, zero=1), Layout(dp=8)),
        (Layout(tp=4), Layout(tp=2)),
        (Layout(micro_batch=4), Layout(micro_batch=8)),
        (Layout(micro_batch=8, recompute="block"), Layout(micro_batch=8)),
    ],
    ids=str,
)
def test_memory_falls_with_what_shares_it_out(less: Layout, more: Layout):
    found = case(ImageShape.named("coatnet-5"))
    shared, whole = image_memory(found, less), image_memory(found, more)
    assert shared.total < whole.total
    for term in ("parameters", "states"):
        assert getattr(shared, term) <= getattr(whole, term), term


def test_ranks_of_tp_share_parameters_and_their_states():
    """All but the norms and what lies beside the cut layers, which is whole on each of them."""
    found, small = case(ImageShape.named("coatnet-5")), 0.02
    alone, shared = (image_memory(found, Layout(tp=t)) for t in (1, 4))
    for term in ("parameters", "gradients", "states"):
        part = getattr(shared, term) / getattr(alone, term)
        assert 0.25 <= part < 0.25 + small, term


def test_terms_add_up_and_larger_images_take_more():
    found = case(ZERO)
    taken = image_memory(found, Layout(dp=8, micro_batch=16))
    assert taken.total == pytest.approx(sum(getattr(taken, f.name) for f in fields(Memory)))
    wide = replace(found, shape=ZERO.with_image_size(384))
    # Where blocks are computed again the first one has most inside, and only the stem is before it.
    again = image_memory(found, Layout(dp=8, micro_batch=16, recompute="block"))
    stem, first, *_ = ZERO.layers
    before = stem.kept_bytes(16, element=2) + 2 * 16 * first.taken
    assert again.activations == pytest.approx(before)
    assert again.recomputed == pytest.approx(first.kept_bytes(16, element=2) - 2 * 16 * first.taken)
    larger = image_memory(wide, Layout(dp=8, micro_batch=16))
    assert larger.activations > (384 / 224) ** 2 * taken.activations


@pytest.mark.parametrize("number", range(8))
def test_no_step_is_faster_than_its_operations(number: int):
    found = case(ImageShape.named(f"coatnet-{number}"))
    for layout in (Layout(dp=8, micro_batch=8), Layout(tp=2, dp=4, micro_batch=16)):
        operations = found.shape.operations() * layout.batch
        peak = found.cluster.device.operations("bf16")
        assert image_step(found, layout).total > operations / (8 * peak), layout


def test_a_step_is_made_of_what_was_measured():
    """Nine layers of 3 + 3 ms an image, one micro-batch of two images: 9 x 9 ms; in two stages five
    layers are the slowest, and the other four are waited for once."""
    shape = SIZE.shape
    found = replace(case_of(SIZE, load_cluster("laptop"), even(shape)), precision="fp32")
    number = shape.num_layers
    alone = image_step(found, Layout(micro_batch=2, num_microbatches=3))
    computed = alone.products + alone.attention + alone.between
    assert computed == pytest.approx(3 * number * 9e-3)
    assert alone.optimizer == pytest.approx(1e-9 * shape.num_parameters)
    staged = Layout(pp=2, schedule="1f1b", micro_batch=2, num_microbatches=3)
    bounds = stage_bounds(found, staged)
    sizes = sorted(b - a for a, b in itertools.pairwise(bounds))
    assert sizes == [number // 2, number - number // 2]
    there = image_step(found, staged)
    assert there.products + there.attention + there.between == pytest.approx(3 * sizes[1] * 9e-3)
    assert there.idle == pytest.approx(sizes[0] * 9e-3)
    assert alone.stragglers == 0.0
    late = even(shape).straggling * math.sqrt(2.0 * math.log(2))  # of two ranks
    assert there.stragglers == pytest.approx(late * (there.total - there.stragglers))


def test_the_layouts_of_the_bench_share_the_images():
    every = [(n, layout) for n, several in IMAGE_LAYOUTS.items() for layout in several]
    assert len(every) >= 10
    for ranks, layout in every:
        layout.validate()
        assert (layout.num_ranks, layout.batch) == (ranks, IMAGE_SIZES["half"].batch)


def test_the_search_finds_a_layout_that_no_other_beats():
    plan = best(ImageShape.named("coatnet-4"), H100.with_devices(8), Options(batch=1024))
    assert plan.layout.num_ranks == 8
    assert plan.layout.batch == 1024
    assert plan.best.memory.gib < 0.92 * 80
    for other in plan.runners_up:
        assert other.seconds > 0.99 * plan.best.seconds
    assert "1024 images of 224 x 224 pixels a step" in summary(plan)
    assert "img/s each" in table(plan)
    assert 0.0 < plan.mfu() < 1.0
    again = Plan.from_json(plan.to_json())
    assert again.shape == plan.shape
    assert again.layout == plan.layout


def test_a_large_model_on_small_devices_shares_its_states():
    """CoAtNet-7 takes 36.4 GiB of states, more than a device of 32 GB has."""
    small = replace(H100, device=replace(H100.device, memory_gib=32.0)).with_devices(8)
    plan = best(ImageShape.named("coatnet-7"), small, Options(batch=64))
    assert plan.layout.zero or plan.layout.pp > 1 or plan.layout.tp > 1
    assert dict(plan.reasons)["one rank a copy, whole (dp)"].startswith("40.3 GiB")


def test_a_batch_norm_is_not_cut_into_micro_batches_of_a_pipeline():
    shape = ImageShape.named("coatnet-0", norm="batch")
    with pytest.raises(PlanError, match="fixed is pp=2, which no layout"):
        best(shape, H100.with_devices(4), Options(batch=64, fixed={"pp": 2}))
    assert best(ZERO, H100.with_devices(4), Options(batch=64, fixed={"pp": 2})).layout.pp == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ImageShape.named("coatnet-9"), "there is no CoAtNet '9'; choose one of 0, 1"),
        (lambda: ZERO.with_image_size(100), "image_size is 100, .* the next that is one is 128"),
        (
            lambda: best(ZERO, H100, Options(batch=64), measured=COSTS),
            "measured has blocks of a decoder, but coatnet-0",
        ),
        (
            lambda: best(ZERO, H100, Options(batch=64, codecs=("int8",))),
            "codecs is .*not counted for models of images",
        ),
        (
            lambda: ImageShape.of_numbers({"config": {"depth": 3}, "name": "x"}),
            "a CoAtNet has no depth",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, message: str):
    with pytest.raises(PlanError, match=message):
        make()

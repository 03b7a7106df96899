"""This machine measured, and pipelines of measured layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pyops.mesh import ALONE
from pyops.pipeline import LayerCosts, Profile, profile
from pyops.plan import Layout, Machine, Options, PlanError, ProfiledCosts, best
from pyops.plan.measuring.machine import WIDTHS, _slowest
from tests.plan.shapes import TINY

pytestmark = pytest.mark.cpu_only

WIDE = {WIDTHS[0]: 20e9, WIDTHS[1]: 32e9}
MACHINE = Machine("a machine", {"fp32": WIDE, "bf16": WIDE}, 10e9, 8.0, 2, 50e-6, 2e9)


def test_a_measured_machine_predicts_what_was_measured():
    cluster = MACHINE.cluster()
    device = cluster.device
    for width, measured in WIDE.items():
        rate = device.operations("fp32") * device.efficiency.of_width(width)
        assert rate == pytest.approx(measured)
    assert (cluster.num_devices, device.memory_gib) == (2, 8.0)
    assert (cluster.node.speed, cluster.node.latency) == (2e9, 50e-6)
    assert "measured by Machine.here" in cluster.sources["device"]
    assert MACHINE.cluster(devices=4).device.memory_gib == 4.0
    assert best(TINY, cluster, Options(batch=4, precision="fp32")).best.seconds > 0


def test_messages_are_computed_by_the_ranks_where_no_processor_is_spare():
    for processors, contention in ((0, 0.5), (3, 0.5), (2, 1.0)):
        found = replace(MACHINE, processors=processors).cluster()
        assert found.node.contention == contention


def test_threads_are_those_of_the_ranks_that_measured():
    before = torch.get_num_threads()
    try:
        for own in (1, 2):
            torch.set_num_threads(own)
            machine = replace(MACHINE, processors=4, threads=2)
            assert machine.cluster().processors == 2
            assert replace(machine, threads=1).cluster().processors == 4
            assert machine.cluster().node.contention == 1.0
            assert replace(machine, threads=1).cluster().node.contention == 0.5
    finally:
        torch.set_num_threads(before)


def test_the_slowest_rank_counts():
    quick = {width: 3 * rate for width, rate in WIDE.items()}
    other = replace(MACHINE, products={"fp32": quick, "bf16": quick}, latency=1e-3, bandwidth=1e9)
    for several in ([MACHINE, other], [other, MACHINE]):
        found = _slowest(several)
        assert found.products == MACHINE.products
        assert (found.latency, found.bandwidth, found.copy) == (1e-3, 1e9, 10e9)


def test_a_machine_whose_wide_products_are_slower_has_no_half_width():
    slower = replace(MACHINE, products={"fp32": {WIDTHS[0]: 32e9, WIDTHS[1]: 20e9}})
    efficiency = slower.cluster().device.efficiency
    assert efficiency.half_width == 0.0
    assert slower.cluster().device.operations("fp32") == 32e9


def _measured(rank: int, group: Any) -> tuple[Machine, bool]:
    found = Machine.here(group=group)
    return found, found.num_ranks == 2


@pytest.mark.full
def test_this_machine_is_measured_between_ranks(world):
    (first, both), (second, other) = world(2).run(_measured)
    assert both
    assert other
    assert first == second
    rates = [rate for widths in first.products.values() for rate in widths.values()]
    assert all(1e7 < rate < 1e15 for rate in rates)
    assert 1e8 < first.copy < 1e13
    assert 0 < first.latency < 1
    assert 1e6 < first.bandwidth < 1e13
    assert best(TINY, first.cluster(), Options(batch=4, precision="fp32")).layout.num_ranks == 2


LAYERS = tuple(
    LayerCosts(
        name=f"layer {i}",
        forward=1.0,
        backward=2.0,
        forward_apart=1.0,
        input_gradient=1.0,
        weight_gradient=1.0,
        activation=8,
        parameters=10,
        kept=((100 + i, 64),),
        weights=((i, 40),),
    )
    for i in range(4)
)


def test_a_pipeline_of_measured_layers():
    """Two ranks of two layers each, four micro-batches: (4 + 1) x 6 seconds."""
    costs = ProfiledCosts(Profile(LAYERS))
    alone, _ = costs.step(Layout(num_microbatches=4))
    assert alone == pytest.approx(48.0)
    seconds, fullest = costs.step(Layout(pp=2, schedule="1f1b", num_microbatches=4))
    assert seconds == pytest.approx(30.0)
    assert fullest == pytest.approx(2 * (2 * 40 + 8 * 10) + 2 * 2 * 64)
    slow = ProfiledCosts(Profile(LAYERS), latency=1.0)
    assert slow.step(Layout(pp=2, schedule="1f1b", num_microbatches=4))[0] > seconds
    split, _ = costs.step(Layout(pp=2, schedule="zb1p", num_microbatches=4))
    assert split < seconds
    again, _ = costs.step(Layout(pp=2, schedule="1f1b", num_microbatches=4, recompute="block"))
    assert again > seconds


def test_a_profile_is_not_cut():
    costs = ProfiledCosts(Profile(LAYERS))
    with pytest.raises(PlanError, match="tp is 2, but the profile has whole layers; set it to 1"):
        costs.step(Layout(tp=2))
    with pytest.raises(PlanError, match="the profile has 4 layers, fewer than 8 stages"):
        costs.step(Layout(pp=8, schedule="1f1b", num_microbatches=8))


def test_a_convolutional_model_of_torch_is_planned_for_by_its_profile():
    """Convolutions on smaller and smaller images: the pipeline is cut by time, not by layers."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GELU()),
        nn.Sequential(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.GELU()),
        nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GELU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    ]
    found = profile(layers, torch.randn(2, 3, 32, 32), rounds=2, warmup=1, group=ALONE)
    costs = ProfiledCosts(found)
    alone, most = costs.step(Layout(num_microbatches=4))
    assert alone == pytest.approx(4 * sum(layer.time for layer in found.layers))
    elements = sum(p.numel() for layer in layers for p in layer.parameters())
    images = 4 * 2 * (16 * 32 * 32 + 16 * 16 * 16 + 32 * 8 * 8)  # bytes before each activation
    assert most > 4 * elements + images
    seconds, fullest = costs.step(Layout(pp=2, schedule="1f1b", num_microbatches=4))
    assert alone / 2 < seconds < alone * 1.3
    assert fullest > 0

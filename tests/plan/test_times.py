"""The time of a step: invariants that hold for every layout."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from pyops.plan import PYOPS, Case, Cluster, Layout, Link, StepTime, load_cluster, step_time
from pyops.plan.costs.links import group_link
from pyops.plan.layouts.options import Options
from pyops.plan.layouts.search import search
from tests.plan.shapes import LLAMA_8B, gpt, llama

pytestmark = pytest.mark.cpu_only

H100 = load_cluster("h100")
SHAPE = gpt(8, 2048, 16, vocab=8192)
EVERY = [
    Layout(micro_batch=2, num_microbatches=4),
    Layout(dp=8, zero=0, num_microbatches=2),
    Layout(dp=8, zero=1, num_microbatches=2),
    Layout(dp=8, zero=2, num_microbatches=2),
    Layout(dp=8, zero=3, num_microbatches=2, recompute="block"),
    Layout(tp=4, num_microbatches=4),
    Layout(tp=4, num_microbatches=4, sequence_parallel=True, recompute="attention"),
    Layout(pp=4, schedule="1f1b", num_microbatches=8),
    Layout(pp=4, schedule="zb1p", num_microbatches=8, recompute="block"),
    Layout(pp=2, schedule="interleaved", stages_per_rank=2, num_microbatches=8),
    Layout(pp=4, schedule="zbv", stages_per_rank=2, num_microbatches=8),
    Layout(tp=2, pp=2, dp=4, zero=1, schedule="1f1b", num_microbatches=4),
]


def seconds(layout: Layout, cluster: Cluster = H100) -> StepTime:
    cluster = replace(cluster, num_devices=layout.num_ranks)
    return step_time(Case(SHAPE, cluster, PYOPS), layout)


@pytest.mark.parametrize("layout", EVERY, ids=str)
def test_no_step_is_faster_than_its_operations(layout: Layout):
    peak = H100.device.operations("bf16") * layout.num_ranks
    tokens = layout.batch * SHAPE.sequence_length
    assert seconds(layout).total > tokens * SHAPE.operations(causal=True) / peak


@pytest.mark.parametrize("layout", EVERY, ids=str)
def test_terms_add_up_and_none_is_negative(layout: Layout):
    found = seconds(layout)
    parts = [getattr(found, field.name) for field in fields(StepTime)]
    assert found.total == pytest.approx(sum(parts))
    assert all(part >= 0 for part in parts)
    assert (found.idle > 0) == (layout.pp > 1)
    assert (found.tensor_messages > 0) == (layout.tp > 1)
    assert (found.data_messages > 0) == (layout.dp > 1)
    assert (found.recomputed > 0) == (layout.recompute != "none")


def test_ranks_with_endless_links_share_the_time():
    """dp over endless links, without stragglers, is as fast as one rank with its part."""
    endless = Link(1e30, 1.0, 0.0, 0.0)
    cluster = replace(H100, node=endless, network=endless)
    software = replace(PYOPS, straggling=0.0)
    one = step_time(Case(SHAPE, cluster, software), Layout(num_microbatches=16))
    for stage in (0, 1, 2, 3):
        layout = Layout(dp=8, zero=stage, num_microbatches=2)
        found = step_time(Case(SHAPE, cluster.with_devices(8), software), layout)
        assert found.total - found.optimizer == pytest.approx(
            (one.total - one.optimizer) / 8, rel=1e-6
        )
        shared = 8 if stage else 1
        assert found.optimizer == pytest.approx(one.optimizer / shared)


def test_a_group_sees_the_cards_of_all_its_ranks_on_a_node():
    """min(links within the node, ranks on a node x a card): literals of the A100's file."""
    cluster = load_cluster("a100")
    node, card = 0.8 * 300e9, 0.9 * 25e9
    for stride, speed in ((1, 8 * card), (2, 4 * card), (4, 2 * card), (8, card), (16, card)):
        link = group_link(cluster, ranks=32, stride=stride)
        assert link.speed == pytest.approx(speed)
    assert group_link(cluster, ranks=8, stride=1).speed == pytest.approx(node)
    assert group_link(cluster, ranks=4, stride=2).speed == pytest.approx(node)
    fast = replace(cluster, network=replace(cluster.network, bandwidth=100e9))
    assert group_link(fast, ranks=32, stride=1).speed == pytest.approx(node)


def test_a_slower_link_never_helps():
    for layout in EVERY:
        slow = replace(H100, node=replace(H100.node, bandwidth=20e9))
        assert seconds(layout, slow).total >= seconds(layout).total


def test_tensor_parallelism_over_nodes_is_slower():
    small = replace(H100, devices_per_node=4)
    layout = Layout(tp=8, num_microbatches=4)
    # Four cards of 45 GB/s against links of 360 GB/s.
    ratio = seconds(layout, small).tensor_messages / seconds(layout).tensor_messages
    assert 1.5 < ratio < 2.5


def test_recomputing_blocks_takes_a_forward_more():
    plain, again = (seconds(Layout(num_microbatches=2, recompute=how)) for how in ("none", "block"))
    products = again.products / 3 + again.attention / 3.5 + again.between / 3
    assert again.recomputed == pytest.approx(products, rel=0.2)
    assert again.total > plain.total


def test_short_kernels_wait_for_the_host():
    """Twenty launches of 5 us for a block and pass."""
    tiny = gpt(8, 64, 4, vocab=64, sequence=16)
    found = step_time(Case(tiny, H100.with_devices(1), PYOPS), Layout())
    assert found.host + found.products + found.attention + found.between == pytest.approx(
        8 * 3 * 20 * 5e-6
    )
    assert seconds(Layout(micro_batch=8)).host == 0.0


def test_more_microbatches_hide_the_bubble():
    few, many = (seconds(Layout(pp=4, schedule="1f1b", num_microbatches=m)) for m in (4, 32))
    assert few.idle == pytest.approx(many.idle)
    assert few.idle / few.total > 3 * many.idle / many.total


def test_the_rank_with_the_head_is_the_slowest():
    """Eight blocks on four ranks, and the head beside two of them."""
    wide = replace(SHAPE, vocab_size=262144)
    layout = Layout(pp=4, schedule="1f1b", num_microbatches=8)
    case = Case(SHAPE, H100.with_devices(4), PYOPS)
    plain = step_time(case, layout).products
    assert step_time(replace(case, shape=wide), layout).products > 1.5 * plain


def test_the_choice_is_dominated_by_none():
    found = search(Case(LLAMA_8B, H100.with_devices(8), PYOPS), Options(batch=16))
    best = found.fitting[0]
    assert len(found.fitting) > 100
    assert all(each.seconds >= best.seconds / 1.01 for each in found.fitting)
    fewer = [
        each
        for each in found.fitting
        if each.seconds < best.seconds
        and each.memory.total < best.memory.total
        and each.layout.axes_used <= best.layout.axes_used
    ]
    assert not fewer


def test_of_layouts_that_are_alike_that_with_less_memory_is_taken():
    """A small model on 8 devices: its copies take as long with ZeRO 0, 1 and 2."""
    found = search(Case(llama(16, 2048, 16, 8192), H100.with_devices(8), PYOPS), Options(batch=64))
    best, quickest = found.fitting[0], min(each.seconds for each in found.fitting)
    alike = [
        each
        for each in found.fitting
        if each.seconds <= 1.01 * quickest
        and each.layout.axes_used == best.layout.axes_used
        and each.layout.micro_batch == best.layout.micro_batch
        and each.layout.zero < 3
        and each.layout.offload == "none"
    ]
    assert {each.layout.zero for each in alike} == {0, 1, 2}
    assert best.memory.total == min(each.memory.total for each in alike)
